"""Products by head equal an einsum, with strided operands and a tail."""

import pytest
import torch

from orrery.kernels.head_products import head_products, reference_head_products

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
