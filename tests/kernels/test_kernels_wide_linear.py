"""Wide projections: results are not rounded, gradients once."""

import torch

from orrery.kernels.expert_rows import reference_wide_linear, wide_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_half_precision_operands_give_the_result_and_gradients_of_converted_ones():
    x, weight = (
        torch.randn(rows, 24, device=DEVICE).bfloat16().requires_grad_() for rows in (40, 6)
    )
    grad = torch.randn(40, 6, device=DEVICE)
    exact = (x.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    reference_wide_linear(*exact).backward(grad.double())
    y = torch.ops.orrery.wide_linear(x, weight)
    assert y.dtype == torch.float32
    # float32 sums of 24 exact products
    torch.testing.assert_close(
        y.double(), reference_wide_linear(*exact).detach(), rtol=0, atol=1e-5
    )
    y.backward(grad)
    for found, wanted in zip((x.grad, weight.grad), (exact[0].grad, exact[1].grad), strict=True):
        # One rounding to bfloat16's 8 bits; the gradient has 16 bits.
        error = (found.double() - wanted).abs()
        assert (error <= wanted.abs() * 2**-8 + wanted.abs().max() * 2**-15).all()


def test_on_a_cpu_it_is_the_reference():
    x, weight = torch.randn(5, 8), torch.randn(3, 8)
    assert torch.equal(wide_linear(x, weight), reference_wide_linear(x, weight))


def test_the_operator_is_sound_for_compilers():
    x, weight = (
        torch.randn(4, 8).bfloat16().requires_grad_(),
        torch.randn(3, 8).bfloat16().requires_grad_(),
    )
    torch.library.opcheck(torch.ops.orrery.wide_linear.default, (x, weight))
