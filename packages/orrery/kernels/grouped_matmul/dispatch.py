"""The grouped product and its two gradients as custom operators, opaque to torch.compile.

- x's gradient is `orrery::grouped_matmul` with transposed weights. Gradients are computed, and
  their inputs kept, only if wanted.
- bfloat16 on a GPU with K and N multiples of 8 (rows aligned to 16 bytes) runs torch's grouped GEMM
  without a host sync. Other cases loop over the groups.
- Rows from `ends[-1]` on belong to no group. They do not reach the weight's gradient, and are
  undefined in the output and x's gradient. The loop fills them with NaN to expose readers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Public since torch 2.10, private before.
_grouped_mm: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
# Private. Without it, products are slow while a collective runs.
_set_carveout = getattr(torch._C, "_set_sm_carveout_experimental", None)
_num_reserved = 0


def reserve_multiprocessors(count: int) -> None:
    """Leave `count` multiprocessors to collectives in all later grouped products.

    torch's grouped GEMM has one long-lived block a multiprocessor. Blocks of occupied
    multiprocessors run last, and can double the time.
    """
    global _num_reserved
    _num_reserved = count


@contextmanager
def _carveout() -> Iterator[None]:
    """Apply the reservation to one launch, because the limit is global."""
    if _set_carveout is None or not _num_reserved:
        yield
        return
    _set_carveout(_num_reserved)
    try:
        yield
    finally:
        _set_carveout(None)


def grouped_matmul(x_MK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Return rows `ends[e − 1]:ends[e]` of x times weight[e] transposed: [M, N] in x's dtype.

    x [M, K] and weight [E, N, K] of one dtype. ends i32 [E], rising, at most M. Groups may be
    empty, M may be 0. Raise ValueError if shapes or dtypes do not match.
    """
    num_groups, _, width = weight_ENK.shape
    fits = x_MK.shape[1] == width and ends_E.shape == (num_groups,)
    if not fits or x_MK.dtype != weight_ENK.dtype:
        raise ValueError(
            f"x {x_MK.dtype} {list(x_MK.shape)}, weight {weight_ENK.dtype} "
            f"{list(weight_ENK.shape)} and ends {list(ends_E.shape)} "
            "must be [M, K], [E, N, K] and [E], x and weight of one dtype"
        )
    return _product(x_MK, weight_ENK, ends_E)


def _is_fused(a: Tensor, *widths: int) -> bool:
    aligned = all(width % 8 == 0 for width in widths)
    return _grouped_mm is not None and a.is_cuda and a.dtype == torch.bfloat16 and aligned


def product(x_MK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    if x_MK.shape[0] and _is_fused(x_MK, *weight_ENK.shape[1:]):
        with _carveout():
            return _grouped_mm(x_MK.contiguous(), weight_ENK.transpose(1, 2), offs=ends_E)
    out_MN = x_MK.new_full((x_MK.shape[0], weight_ENK.shape[1]), float("nan"))
    start = 0
    for e, end in enumerate(ends_E.tolist()):
        if start < end:
            torch.mm(x_MK[start:end], weight_ENK[e].T, out=out_MN[start:end])
        start = end
    return out_MN


def weight_gradient(grad_MN: Tensor, x_MK: Tensor, ends_E: Tensor) -> Tensor:
    """Return [E, N, K]: grad[rows of group e]ᵀ @ x[rows of group e], zero for an empty group."""
    num_groups, n, k = ends_E.shape[0], grad_MN.shape[1], x_MK.shape[1]
    if x_MK.shape[0] and _is_fused(x_MK, n, k):
        with _carveout():
            return _grouped_mm(grad_MN.contiguous().T, x_MK.contiguous(), offs=ends_E)
    out_ENK = x_MK.new_zeros(num_groups, n, k)
    start = 0
    for e, end in enumerate(ends_E.tolist()):
        if start < end:
            torch.mm(grad_MN[start:end].T, x_MK[start:end], out=out_ENK[e])
        start = end
    return out_ENK


@torch.library.custom_op("orrery::grouped_matmul", mutates_args=())
def _product(x_MK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    return product(x_MK, weight_ENK, ends_E)


@_product.register_fake
def _(x_MK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    return x_MK.new_empty(x_MK.shape[0], weight_ENK.shape[1])


@torch.library.custom_op("orrery::grouped_matmul_weight_gradient", mutates_args=())
def _weight_gradient(grad_MN: Tensor, x_MK: Tensor, ends_E: Tensor) -> Tensor:
    return weight_gradient(grad_MN, x_MK, ends_E)


@_weight_gradient.register_fake
def _(grad_MN: Tensor, x_MK: Tensor, ends_E: Tensor) -> Tensor:
    return x_MK.new_empty(ends_E.shape[0], grad_MN.shape[1], x_MK.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    x_MK, weight_ENK, ends_E = inputs
    wants_x, wants_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x_MK if wants_weight else None, weight_ENK if wants_x else None, ends_E)


def _backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, ...]:
    x_MK, weight_ENK, ends_E = ctx.saved_tensors
    grad_MN = grad_MN.contiguous()  # the grouped GEMM refuses a sum's expanded gradient
    grad_x_MK = grad_weight_ENK = None
    if ctx.needs_input_grad[0]:
        grad_x_MK = _product(grad_MN, weight_ENK.transpose(1, 2), ends_E)
    if ctx.needs_input_grad[1]:
        grad_weight_ENK = _weight_gradient(grad_MN, x_MK, ends_E)
    return grad_x_MK, grad_weight_ENK, None


_product.register_autograd(_backward, setup_context=_setup_context)
