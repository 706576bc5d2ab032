"""A grouped product with adapters in it, as one operator: x weight[e]ᵀ + (x a[e]ᵀ) b[e]ᵀ.

`orrery::adapted_grouped_matmul` is its own gradient with respect to x: the weights transposed, a and b in each other's place. The narrow
product x a[e]ᵀ is its second result, which the gradient of b needs; the first is kept once, where a sum of two products would be kept with
both. In bfloat16 on a GPU with Triton, ranks to 64 run in `low_rank.py`'s kernels, all else in grouped products.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from orrery.kernels.grouped_matmul import operators

HAS_TRITON = find_spec("triton") is not None


def adapted_grouped_matmul(
    x_MK: Tensor, weight_ENK: Tensor, a_ERK: Tensor, b_ENR: Tensor, ends_E: Tensor
) -> Tensor:
    """Rows `ends[e − 1]:ends[e]` of x times (weight[e] + b[e] a[e]) transposed: [M, N] in x's dtype.

    x [M, K], weight [E, N, K], a [E, R, K] and b [E, N, R] of one dtype; ends i32 [E], rising, at most M; a group may be empty.
    Rows from ends[-1] on are undefined, in the output and in x's gradient.
    """
    shapes = (weight_ENK.shape[::2], b_ENR.shape[:2], b_ENR.shape[2], ends_E.shape)
    if (
        shapes != (a_ERK.shape[::2], weight_ENK.shape[:2], a_ERK.shape[1], weight_ENK.shape[:1])
        or x_MK.shape[1] != a_ERK.shape[2]
    ):
        raise ValueError(
            f"x {list(x_MK.shape)}, weight {list(weight_ENK.shape)}, a {list(a_ERK.shape)}, b {list(b_ENR.shape)} and ends "
            f"{list(ends_E.shape)} must be [M, K], [E, N, K], [E, R, K], [E, N, R] and [E]"
        )
    if {weight_ENK.dtype, a_ERK.dtype, b_ENR.dtype} != {x_MK.dtype}:
        raise ValueError(
            f"x {x_MK.dtype}, weight {weight_ENK.dtype}, a {a_ERK.dtype} and b {b_ENR.dtype} must be of one dtype"
        )
    return _adapted(x_MK, weight_ENK, a_ERK, b_ENR, ends_E)[0]


def _is_fused(x: Tensor, rank: int) -> bool:
    if not (HAS_TRITON and x.is_cuda and x.dtype == torch.bfloat16):
        return False
    from orrery.kernels.grouped_matmul import low_rank

    return rank <= low_rank.MAX_RANK


@torch.library.custom_op("orrery::adapted_grouped_matmul", mutates_args=())
def _adapted(
    x_MK: Tensor, weight_ENK: Tensor, a_ERK: Tensor, b_ENR: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor]:
    x_MK = x_MK.contiguous()
    y_MN = operators.product(x_MK, weight_ENK, ends_E)
    if _is_fused(x_MK, a_ERK.shape[1]):
        from orrery.kernels.grouped_matmul import low_rank

        return y_MN, low_rank.add_low_rank(y_MN, x_MK, a_ERK, b_ENR, ends_E)
    narrow_MR = operators.product(x_MK, a_ERK, ends_E)
    return y_MN + operators.product(narrow_MR, b_ENR, ends_E), narrow_MR


@_adapted.register_fake
def _(
    x_MK: Tensor, weight_ENK: Tensor, a_ERK: Tensor, b_ENR: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor]:
    return x_MK.new_empty(x_MK.shape[0], weight_ENK.shape[1]), x_MK.new_empty(
        x_MK.shape[0], a_ERK.shape[1]
    )


@torch.library.custom_op("orrery::narrow_grouped_matmul", mutates_args=())
def _narrow(x_MK: Tensor, a_ERK: Tensor, ends_E: Tensor) -> Tensor:
    """The second result of `adapted_grouped_matmul` by itself, [M, R]: all of x's gradient that a's needs."""
    x_MK = x_MK.contiguous()
    if _is_fused(x_MK, a_ERK.shape[1]):
        from orrery.kernels.grouped_matmul import low_rank

        return low_rank.narrow_product(x_MK, a_ERK, ends_E)
    return operators.product(x_MK, a_ERK, ends_E)


@_narrow.register_fake
def _(x_MK: Tensor, a_ERK: Tensor, ends_E: Tensor) -> Tensor:
    return x_MK.new_empty(x_MK.shape[0], a_ERK.shape[1])


@torch.library.custom_op("orrery::adapter_gradient", mutates_args=())
def _adapter_gradient(
    wide_MW: Tensor, narrow_MR: Tensor, ends_E: Tensor, narrow_first: bool
) -> Tensor:
    """[E, W, R], or [E, R, W] where the narrow factor is first; zero for an empty group."""
    wide_MW, narrow_MR = wide_MW.contiguous(), narrow_MR.contiguous()
    if _is_fused(wide_MW, narrow_MR.shape[1]):
        from orrery.kernels.grouped_matmul import low_rank

        return low_rank.thin_gradient(wide_MW, narrow_MR, ends_E, narrow_first)
    factors = (narrow_MR, wide_MW) if narrow_first else (wide_MW, narrow_MR)
    return operators.weight_gradient(*factors, ends_E)


@_adapter_gradient.register_fake
def _(wide_MW: Tensor, narrow_MR: Tensor, ends_E: Tensor, narrow_first: bool) -> Tensor:
    sides = (narrow_MR.shape[1], wide_MW.shape[1])
    return wide_MW.new_empty(ends_E.shape[0], *(sides if narrow_first else sides[::-1]))


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    x_MK, weight_ENK, a_ERK, b_ENR, ends_E = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    wants_x, wants_weight, wants_a, wants_b = ctx.needs_input_grad[:4]
    wanted = (
        x_MK if wants_weight or wants_a else None,
        output[1] if wants_b else None,
        weight_ENK if wants_x else None,
        a_ERK if wants_x else None,
        b_ENR if wants_x or wants_a else None,
    )
    ctx.save_for_backward(*wanted, ends_E)


def _backward(ctx: Any, grad_MN: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x_MK, narrow_MR, weight_ENK, a_ERK, b_ENR, ends_E = ctx.saved_tensors
    if grad_MN is None:
        return (None,) * 5
    grad_MN = grad_MN.contiguous()
    wants_x, wants_weight, wants_a, wants_b = ctx.needs_input_grad[:4]
    grad_x_MK = grad_narrow_MR = None
    if wants_x:
        grad_x_MK, grad_narrow_MR = _adapted(
            grad_MN,
            weight_ENK.transpose(1, 2),
            b_ENR.transpose(1, 2),
            a_ERK.transpose(1, 2),
            ends_E,
        )
    elif wants_a:
        grad_narrow_MR = _narrow(grad_MN, b_ENR.transpose(1, 2), ends_E)
    grad_weight_ENK = (
        torch.ops.orrery.grouped_matmul_weight_gradient(grad_MN, x_MK, ends_E)
        if wants_weight
        else None
    )
    grad_a_ERK = _adapter_gradient(x_MK, grad_narrow_MR, ends_E, True) if wants_a else None
    grad_b_ENR = _adapter_gradient(grad_MN, narrow_MR, ends_E, False) if wants_b else None
    return grad_x_MK, grad_weight_ENK, grad_a_ERK, grad_b_ENR, None


_adapted.register_autograd(_backward, setup_context=_keep)
