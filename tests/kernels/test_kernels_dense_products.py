"""Linear layers have the bits of `F.linear`; products by head equal an einsum."""

import pytest
import torch
import torch.nn.functional as F

from orrery.kernels.dense_products import head_products, linear, reference_head_products

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def operands(has_tail, dtype=torch.float64):
    """Return x [7, 3, 4], weight [3, 4, 5] and a tail [7, 3, 2]: views, as attention has them."""
    torch.manual_seed(0)
    columns = torch.randn(7, 3, 6, device=DEVICE, dtype=dtype)
    x, tail = columns.split((4, 2), dim=-1)
    weight = torch.randn(3, 9, 4, device=DEVICE, dtype=dtype)[:, 4:].transpose(1, 2)
    return [one.detach().requires_grad_() for one in (x, weight, tail)[: 3 if has_tail else 2]]


@pytest.mark.parametrize("has_tail", [False, True])
def test_results_and_gradients_equal_those_of_an_einsum(has_tail):
    given = operands(has_tail)
    out, wanted = head_products(*given), reference_head_products(*given)
    assert out.is_contiguous()
    torch.testing.assert_close(out, wanted)
    grad = torch.randn_like(out)
    grads = (torch.autograd.grad(each, given, grad) for each in (out, wanted))
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("has_tail", [False, True])
def test_the_operator_is_sound_for_compilers(has_tail):
    given = operands(has_tail, torch.float32)
    if not has_tail:
        given.append(None)
    torch.library.opcheck(torch.ops.orrery.head_products.default, tuple(given))


def test_other_shapes_and_dtypes_are_refused():
    x, weight, tail = operands(True)
    for wrong in ((x, weight[:2]), (x, weight.float()), (x, weight, tail[:5])):
        with pytest.raises(ValueError, match=r"must be \[T, H, I\], \[H, I, O\] and \[T, H, R\]"):
            head_products(*wrong)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_has_the_bits_of_torch(has_bias, dtype):
    torch.manual_seed(0)
    shapes = [(33, 24), (40, 24), (40,)][: 3 if has_bias else 2]
    given = [torch.randn(shape, device=DEVICE).to(dtype).requires_grad_() for shape in shapes]
    grad = torch.randn(33, 40, device=DEVICE).to(dtype)
    results = []
    for call in (linear, F.linear):
        out = call(*given)
        results.append([out, *torch.autograd.grad(out, given, grad)])
    assert all(map(torch.equal, *results))


def test_gradients_of_frozen_weights_are_not_computed():
    x, weight = torch.randn(5, 4, device=DEVICE), torch.randn(3, 4, device=DEVICE)
    linear(x.requires_grad_(), weight).sum().backward()
    assert weight.grad is None and x.grad is not None
    torch.library.opcheck(torch.ops.orrery.linear.default, (x, weight, None))
