"""Multiply each group's rows by its matrix, optionally with LoRA adapters a and b.

Group e is rows `ends[e − 1]:ends[e]`. Later rows of the output and of x's gradient are undefined.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from orrery.kernels import HAS_TRITON

# A private torch function. Without it, collectives slow products down.
_set_carveout = getattr(torch._C, "_set_sm_carveout_experimental", None)
_num_reserved = 0


def reserve_multiprocessors(count: int) -> None:
    """Leave `count` streaming multiprocessors (SMs) free for collectives.

    torch's grouped GEMM runs one block per SM. A block on a collective's SM would start late and
    delay the product.
    """
    global _num_reserved
    _num_reserved = count


@contextmanager
def _carveout() -> Iterator[None]:
    """Reserve SMs for one launch, because torch's setting is global."""
    if _set_carveout is None or not _num_reserved:
        yield
        return
    _set_carveout(_num_reserved)
    try:
        yield
    finally:
        _set_carveout(None)


def grouped_matmul(x_MK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Return [M, N] in x's dtype: x's rows of group e times weight[e]ᵀ.

    x [M, K] and weight [E, N, K] have one dtype. ends i32 [E] ascends to at most M. Groups may be
    empty. Raise ValueError on other shapes or dtypes.
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


def reference_grouped_matmul(x_MK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    ends = [0, *ends_E.tolist()]
    weights = enumerate(weight_ENK.unbind(0))
    outputs = [F.linear(x_MK[ends[e] : ends[e + 1]], weight) for e, weight in weights]
    return torch.cat([*outputs, x_MK.new_zeros(x_MK.shape[0] - ends[-1], weight_ENK.shape[1])])


def _is_fused(a: Tensor, *widths: int) -> bool:
    aligned = all(width % 8 == 0 for width in widths)
    return a.is_cuda and a.dtype == torch.bfloat16 and aligned


def product(x_MK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    if x_MK.shape[0] and _is_fused(x_MK, *weight_ENK.shape[1:]):
        with _carveout():
            return F.grouped_mm(x_MK.contiguous(), weight_ENK.transpose(1, 2), offs=ends_E)
    out_MN = x_MK.new_full((x_MK.shape[0], weight_ENK.shape[1]), float("nan"))
    start = 0
    for e, end in enumerate(ends_E.tolist()):
        if start < end:
            torch.mm(x_MK[start:end], weight_ENK[e].T, out=out_MN[start:end])
        start = end
    return out_MN


def weight_gradient(grad_MN: Tensor, x_MK: Tensor, ends_E: Tensor) -> Tensor:
    """Return [E, N, K]: grad[group e]ᵀ @ x[group e], 0 for an empty group."""
    num_groups, n, k = ends_E.shape[0], grad_MN.shape[1], x_MK.shape[1]
    if x_MK.shape[0] and _is_fused(x_MK, n, k):
        with _carveout():
            return F.grouped_mm(grad_MN.contiguous().T, x_MK.contiguous(), offs=ends_E)
    out_ENK = x_MK.new_zeros(num_groups, n, k)
    start = 0
    for e, end in enumerate(ends_E.tolist()):
        if start < end:
            torch.mm(grad_MN[start:end].T, x_MK[start:end], out=out_ENK[e])
        start = end
    return out_ENK


_product = torch.library.custom_op("orrery::grouped_matmul", product, mutates_args=())


@_product.register_fake
def _(x_MK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    return x_MK.new_empty(x_MK.shape[0], weight_ENK.shape[1])


_weight_gradient = torch.library.custom_op(
    "orrery::grouped_matmul_weight_gradient", weight_gradient, mutates_args=()
)


@_weight_gradient.register_fake
def _(grad_MN: Tensor, x_MK: Tensor, ends_E: Tensor) -> Tensor:
    return x_MK.new_empty(ends_E.shape[0], grad_MN.shape[1], x_MK.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    x_MK, weight_ENK, ends_E = inputs
    wants_x, wants_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x_MK if wants_weight else None, weight_ENK if wants_x else None, ends_E)


def _backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, ...]:
    x_MK, weight_ENK, ends_E = ctx.saved_tensors
    grad_MN = grad_MN.contiguous()  # grouped GEMM refuses the stride 0 of a sum's gradient
    grad_x_MK = grad_weight_ENK = None
    if ctx.needs_input_grad[0]:
        grad_x_MK = _product(grad_MN, weight_ENK.transpose(1, 2), ends_E)
    if ctx.needs_input_grad[1]:
        grad_weight_ENK = _weight_gradient(grad_MN, x_MK, ends_E)
    return grad_x_MK, grad_weight_ENK, None


_product.register_autograd(_backward, setup_context=_setup_context)


def adapted_grouped_matmul(
    x_MK: Tensor, weight_ENK: Tensor, a_ERK: Tensor, b_ENR: Tensor, ends_E: Tensor
) -> Tensor:
    """Return [M, N]: x's rows of group e times (weight[e] + b[e] a[e])ᵀ.

    a is [E, R, K], b is [E, N, R]. `grouped_matmul` explains the other arguments.
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


def _low_rank(x: Tensor, rank: int) -> Any:
    if not (HAS_TRITON and x.is_cuda and x.dtype == torch.bfloat16):
        return None
    from orrery.kernels import grouped_matmul_triton

    return grouped_matmul_triton if rank <= grouped_matmul_triton.MAX_RANK else None


@torch.library.custom_op("orrery::adapted_grouped_matmul", mutates_args=())
def _adapted(
    x_MK: Tensor, weight_ENK: Tensor, a_ERK: Tensor, b_ENR: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor]:
    x_MK = x_MK.contiguous()
    y_MN = product(x_MK, weight_ENK, ends_E)
    if low_rank := _low_rank(x_MK, a_ERK.shape[1]):
        return y_MN, low_rank.add_low_rank(y_MN, x_MK, a_ERK, b_ENR, ends_E)
    narrow_MR = product(x_MK, a_ERK, ends_E)
    return y_MN + product(narrow_MR, b_ENR, ends_E), narrow_MR


@_adapted.register_fake
def _(
    x_MK: Tensor, weight_ENK: Tensor, a_ERK: Tensor, b_ENR: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor]:
    num_rows = x_MK.shape[0]
    return x_MK.new_empty(num_rows, weight_ENK.shape[1]), x_MK.new_empty(num_rows, a_ERK.shape[1])


@torch.library.custom_op("orrery::narrow_grouped_matmul", mutates_args=())
def _narrow(x_MK: Tensor, a_ERK: Tensor, ends_E: Tensor) -> Tensor:
    x_MK = x_MK.contiguous()
    if low_rank := _low_rank(x_MK, a_ERK.shape[1]):
        return low_rank.narrow_product(x_MK, a_ERK, ends_E)
    return product(x_MK, a_ERK, ends_E)


@_narrow.register_fake
def _(x_MK: Tensor, a_ERK: Tensor, ends_E: Tensor) -> Tensor:
    return x_MK.new_empty(x_MK.shape[0], a_ERK.shape[1])


@torch.library.custom_op("orrery::adapter_gradient", mutates_args=())
def _adapter_gradient(
    wide_MW: Tensor, narrow_MR: Tensor, ends_E: Tensor, narrow_first: bool
) -> Tensor:
    """Return b's gradient [E, N, R], or with `narrow_first` a's gradient [E, R, K]."""
    wide_MW, narrow_MR = wide_MW.contiguous(), narrow_MR.contiguous()
    if low_rank := _low_rank(wide_MW, narrow_MR.shape[1]):
        return low_rank.thin_gradient(wide_MW, narrow_MR, ends_E, narrow_first)
    factors = (narrow_MR, wide_MW) if narrow_first else (wide_MW, narrow_MR)
    return weight_gradient(*factors, ends_E)


@_adapter_gradient.register_fake
def _(wide_MW: Tensor, narrow_MR: Tensor, ends_E: Tensor, narrow_first: bool) -> Tensor:
    sides = (narrow_MR.shape[1], wide_MW.shape[1])
    return wide_MW.new_empty(ends_E.shape[0], *(sides if narrow_first else sides[::-1]))


def _setup_adapted(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
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


def _adapted_backward(
    ctx: Any, grad_MN: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
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
        grad_weight_ENK = _weight_gradient(grad_MN, x_MK, ends_E)
    if wants_a:
        grad_a_ERK = _adapter_gradient(x_MK, grad_narrow_MR, ends_E, True)
    if wants_b:
        grad_b_ENR = _adapter_gradient(grad_MN, narrow_MR, ends_E, False)
    return grad_x_MK, grad_weight_ENK, grad_a_ERK, grad_b_ENR, None


_adapted.register_autograd(_adapted_backward, setup_context=_setup_adapted)
