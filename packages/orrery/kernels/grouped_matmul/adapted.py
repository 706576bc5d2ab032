"""A grouped product with adapters, as one operator: x weight[e]ᵀ + (x a[e]ᵀ) b[e]ᵀ.

- x's gradient is the same operator with transposed weights and a and b exchanged.
- The second output is the narrow product x a[e]ᵀ, for b's gradient.
- In bfloat16 on a GPU with Triton, ranks up to 64 run in `low_rank.py`.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from orrery.kernels.grouped_matmul import dispatch

HAS_TRITON = find_spec("triton") is not None


def adapted_grouped_matmul(
    x_MK: Tensor, weight_ENK: Tensor, a_ERK: Tensor, b_ENR: Tensor, ends_E: Tensor
) -> Tensor:
    """Return rows `ends[e − 1]:ends[e]` of x times (weight[e] + b[e] a[e]) transposed: [M, N].

    x [M, K], weight [E, N, K], a [E, R, K] and b [E, N, R] of one dtype. ends as in
    `grouped_matmul`. Raise ValueError if shapes or dtypes do not match.
    """
    (num_groups, rank, _), width = a_ERK.shape, x_MK.shape[1]
    wide = weight_ENK.shape == (num_groups, b_ENR.shape[1], width) and a_ERK.shape[2] == width
    narrow = b_ENR.shape[::2] == (num_groups, rank) and ends_E.shape == (num_groups,)
    if not wide or not narrow:
        raise ValueError(
            f"x {list(x_MK.shape)}, weight {list(weight_ENK.shape)}, a {list(a_ERK.shape)}, "
            f"b {list(b_ENR.shape)} and ends {list(ends_E.shape)} "
            "must be [M, K], [E, N, K], [E, R, K], [E, N, R] and [E]"
        )
    if {weight_ENK.dtype, a_ERK.dtype, b_ENR.dtype} != {x_MK.dtype}:
        raise ValueError(
            f"x {x_MK.dtype}, weight {weight_ENK.dtype}, a {a_ERK.dtype} and b {b_ENR.dtype} "
            "must be of one dtype"
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
    y_MN = dispatch.product(x_MK, weight_ENK, ends_E)
    if _is_fused(x_MK, a_ERK.shape[1]):
        from orrery.kernels.grouped_matmul import low_rank

        return y_MN, low_rank.add_low_rank(y_MN, x_MK, a_ERK, b_ENR, ends_E)
    narrow_MR = dispatch.product(x_MK, a_ERK, ends_E)
    return y_MN + dispatch.product(narrow_MR, b_ENR, ends_E), narrow_MR


@_adapted.register_fake
def _(
    x_MK: Tensor, weight_ENK: Tensor, a_ERK: Tensor, b_ENR: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor]:
    num_rows = x_MK.shape[0]
    return x_MK.new_empty(num_rows, weight_ENK.shape[1]), x_MK.new_empty(num_rows, a_ERK.shape[1])


@torch.library.custom_op("orrery::narrow_grouped_matmul", mutates_args=())
def _narrow(x_MK: Tensor, a_ERK: Tensor, ends_E: Tensor) -> Tensor:
    """Return the second output of `_adapted` [M, R], for a's gradient if x needs none."""
    x_MK = x_MK.contiguous()
    if _is_fused(x_MK, a_ERK.shape[1]):
        from orrery.kernels.grouped_matmul import low_rank

        return low_rank.narrow_product(x_MK, a_ERK, ends_E)
    return dispatch.product(x_MK, a_ERK, ends_E)


@_narrow.register_fake
def _(x_MK: Tensor, a_ERK: Tensor, ends_E: Tensor) -> Tensor:
    return x_MK.new_empty(x_MK.shape[0], a_ERK.shape[1])


@torch.library.custom_op("orrery::adapter_gradient", mutates_args=())
def _adapter_gradient(
    wide_MW: Tensor, narrow_MR: Tensor, ends_E: Tensor, narrow_first: bool
) -> Tensor:
    """Return [E, W, R], or [E, R, W] if `narrow_first`, with zeros for an empty group."""
    wide_MW, narrow_MR = wide_MW.contiguous(), narrow_MR.contiguous()
    if _is_fused(wide_MW, narrow_MR.shape[1]):
        from orrery.kernels.grouped_matmul import low_rank

        return low_rank.thin_gradient(wide_MW, narrow_MR, ends_E, narrow_first)
    factors = (narrow_MR, wide_MW) if narrow_first else (wide_MW, narrow_MR)
    return dispatch.weight_gradient(*factors, ends_E)


@_adapter_gradient.register_fake
def _(wide_MW: Tensor, narrow_MR: Tensor, ends_E: Tensor, narrow_first: bool) -> Tensor:
    sides = (narrow_MR.shape[1], wide_MW.shape[1])
    return wide_MW.new_empty(ends_E.shape[0], *(sides if narrow_first else sides[::-1]))


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
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
    grad_x_MK = grad_narrow_MR = grad_weight_ENK = grad_a_ERK = grad_b_ENR = None
    if wants_x:
        weights = (x.transpose(1, 2) for x in (weight_ENK, b_ENR, a_ERK))
        grad_x_MK, grad_narrow_MR = _adapted(grad_MN, *weights, ends_E)
    elif wants_a:
        grad_narrow_MR = _narrow(grad_MN, b_ENR.transpose(1, 2), ends_E)
    if wants_weight:
        gradient = torch.ops.orrery.grouped_matmul_weight_gradient
        grad_weight_ENK = gradient(grad_MN, x_MK, ends_E)
    if wants_a:
        grad_a_ERK = _adapter_gradient(x_MK, grad_narrow_MR, ends_E, True)
    if wants_b:
        grad_b_ENR = _adapter_gradient(grad_MN, narrow_MR, ends_E, False)
    return grad_x_MK, grad_weight_ENK, grad_a_ERK, grad_b_ENR, None


_adapted.register_autograd(_backward, setup_context=_setup_context)
