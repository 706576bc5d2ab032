"""Sort token rows by expert and back, and apply SwiGLU between an expert's matrix products.

T tokens, K experts per token, M = T·K routed rows, E experts, D hidden size, I intermediate size

    rows = sort_by_expert(expert_TK, E)
    x_MD, score_M = gather_rows(x_TD, rows), order_slots(score_TK, rows)
    act_MI = swiglu_rows(grouped_matmul(x_MD, gate_up_E2ID, rows.ends_E), score_M)
    out_TD = combine_rows(grouped_matmul(act_MI, down_EDI, rows.ends_E), rows)

Sums are computed in float32, in a fixed order.
"""

import os
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from orrery.kernels import HAS_TRITON

# mypy: disable-error-code="no-untyped-def"


Backend = Literal["aten", "triton"]


class RowOrder(NamedTuple):
    """Slots sorted by expert. Slot t·K + k is for token t's k-th expert."""

    row_M: Tensor  # i64: slot of each row, 0 for padding
    place_TK: Tensor  # i64: row of each slot, −1 for slots without a row
    ends_E: Tensor  # i32: end of each expert's rows
    counts_E: Tensor  # i32: number of each expert's slots


def sort_by_expert(expert_TK: Tensor, num_experts: int, block: int = 1) -> RowOrder:
    """Sort slots stably by expert id. Slots with id `num_experts` (no expert) come last.

    Each expert's rows begin at a multiple of `block`.
    """
    # Radix sort makes one pass per byte, so it is faster on narrow keys.
    key_dtype = torch.int16 if num_experts < 32768 else torch.int32
    if num_experts < 256:
        key_dtype = torch.uint8
    expert_M, row_M = expert_TK.flatten().to(key_dtype).sort(stable=True)
    index_M = torch.arange(row_M.shape[0], device=row_M.device)
    place_M = torch.empty_like(row_M).scatter_(0, row_M, index_M)
    experts_E = torch.arange(num_experts, dtype=key_dtype, device=row_M.device)
    ends_E = torch.searchsorted(expert_M, experts_E, right=True, out_int32=True)
    counts_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1))
    if block > 1 and row_M.shape[0]:
        dense_E = ends_E
        ends_E = ((counts_E + block - 1) // block * block).cumsum(0, dtype=torch.int32)
        shift_E = F.pad(ends_E, (1, 0)) - F.pad(dense_E, (1, 0))
        place_M = place_M + shift_E[expert_TK.flatten().long()]
        num_rows = (row_M.shape[0] // block + num_experts + 1) * block
        slot_M = torch.arange(row_M.shape[0], device=row_M.device)
        row_M = row_M.new_zeros(num_rows).scatter_(0, place_M, slot_M)
    return RowOrder(row_M, place_M.view_as(expert_TK), ends_E, counts_E)


def gather_rows(x_TD: Tensor, order: RowOrder, backend: Backend | None = None) -> Tensor:
    return _Gather.apply(x_TD, order.row_M, order.place_TK, backend or _choose_backend(x_TD))


def combine_rows(y_MD: Tensor, order: RowOrder, backend: Backend | None = None) -> Tensor:
    return _Combine.apply(y_MD, order.row_M, order.place_TK, backend or _choose_backend(y_MD))


def order_slots(value_TK: Tensor, order: RowOrder) -> Tensor:
    return _OrderSlots.apply(value_TK, order.row_M, order.place_TK)


def swiglu_rows(gate_up_M2I: Tensor, score_M: Tensor, backend: Backend | None = None) -> Tensor:
    """Return silu(gate) · up · score [M, I] in gate_up's dtype.

    gate_up [M, 2·I] has the gate's columns first. score is [M]. Raise ValueError on other shapes.
    """
    if gate_up_M2I.shape[1] % 2 or score_M.shape != gate_up_M2I.shape[:1]:
        raise ValueError(
            f"gate_up {list(gate_up_M2I.shape)} and score {list(score_M.shape)} "
            "must be [M, 2·I] and [M]"
        )
    return _Swiglu.apply(gate_up_M2I, score_M, backend or _choose_backend(gate_up_M2I))


def sum_rows(y_MD: Tensor, place_TK: Tensor, backend: Backend | None = None) -> Tensor:
    """Return [T, D]: each token's sum of `y[place[t, k]]` over k with place ≥ 0.

    Rows of y to which no place points are not read. Not differentiable.
    """
    if (backend or _choose_backend(y_MD)) == "triton":
        return _sum_rows(y_MD.contiguous(), place_TK)
    return _aten_sum_rows(y_MD, place_TK)


def swiglu_rows_backward(
    grad_MI: Tensor, gate_up_M2I: Tensor, score_M: Tensor, backend: Backend | None = None
) -> tuple[Tensor, Tensor]:
    tensors = (grad_MI, gate_up_M2I, score_M)
    if (backend or _choose_backend(gate_up_M2I)) == "triton":
        return _swiglu_rows_backward(*(x.contiguous() for x in tensors))
    return _aten_swiglu_rows_backward(*tensors)


def _choose_backend(rows: Tensor) -> Backend:
    return "triton" if HAS_TRITON and rows.is_cuda else "aten"


def _spread(x_TD: Tensor, row_M: Tensor, place_TK: Tensor, backend: Backend) -> Tensor:
    if backend == "triton":
        return _spread_rows(x_TD.contiguous(), place_TK, row_M.shape[0])
    return x_TD[row_M // place_TK.shape[1]]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, row_M: Tensor, place_TK: Tensor, backend: Backend
    ) -> Tensor:
        ctx.save_for_backward(place_TK)
        ctx.backend = backend
        return _spread(x_TD, row_M, place_TK, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor | None, ...]:
        (place_TK,) = ctx.saved_tensors
        return sum_rows(grad_MD, place_TK, ctx.backend), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y_MD: Tensor, row_M: Tensor, place_TK: Tensor, backend: Backend
    ) -> Tensor:
        ctx.save_for_backward(row_M, place_TK)
        ctx.backend = backend
        return sum_rows(y_MD, place_TK, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        row_M, place_TK = ctx.saved_tensors
        return _spread(grad_TD, row_M, place_TK, ctx.backend), None, None, None


class _OrderSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value_TK: Tensor, row_M: Tensor, place_TK: Tensor) -> Tensor:
        ctx.save_for_backward(place_TK)
        return value_TK.flatten()[row_M]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_M: Tensor) -> tuple[Tensor | None, ...]:
        (place_TK,) = ctx.saved_tensors
        return slot_values(grad_M, place_TK), None, None


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_M2I: Tensor, score_M: Tensor, backend: Backend) -> Tensor:
        ctx.save_for_backward(gate_up_M2I, score_M)
        ctx.backend = backend
        if backend == "triton":
            return _swiglu_rows(gate_up_M2I.contiguous(), score_M.contiguous())
        return _aten_swiglu_rows(gate_up_M2I, score_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MI: Tensor) -> tuple[Tensor | None, ...]:
        gate_up_M2I, score_M = ctx.saved_tensors
        return *swiglu_rows_backward(grad_MI, gate_up_M2I, score_M, ctx.backend), None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def slot_values(value_M: Tensor, place_TK: Tensor) -> Tensor:
    """Return each slot's value [T, K], 0 for slots without a row."""
    return torch.where(place_TK < 0, 0, value_M[place_TK.clamp(min=0)])


def _aten_sum_rows(y_MD: Tensor, place_TK: Tensor) -> Tensor:
    y_TKD = y_MD[place_TK.clamp(min=0)].masked_fill((place_TK < 0)[..., None], 0)
    return y_TKD.sum(1, dtype=_wide(y_MD.dtype)).to(y_MD.dtype)


def _aten_swiglu_rows(gate_up_M2I: Tensor, score_M: Tensor) -> Tensor:
    gate_MI, up_MI = gate_up_M2I.to(_wide(gate_up_M2I.dtype)).chunk(2, dim=1)
    return (gate_MI * gate_MI.sigmoid() * up_MI * score_M[:, None]).to(gate_up_M2I.dtype)


def _aten_swiglu_rows_backward(
    grad_MI: Tensor, gate_up_M2I: Tensor, score_M: Tensor
) -> tuple[Tensor, Tensor]:
    dtype = _wide(gate_up_M2I.dtype)
    gate_MI, up_MI = gate_up_M2I.to(dtype).chunk(2, dim=1)
    grad_MI = grad_MI.to(dtype)
    sigmoid_MI = gate_MI.sigmoid()
    silu_MI = gate_MI * sigmoid_MI
    grad_score_M = (grad_MI * silu_MI * up_MI).sum(1).to(score_M.dtype)
    grad_MI = grad_MI * score_M[:, None]
    grad_gate_MI = grad_MI * up_MI * sigmoid_MI * (1 + gate_MI * (1 - sigmoid_MI))
    return torch.cat([grad_gate_MI, grad_MI * silu_MI], dim=1).to(gate_up_M2I.dtype), grad_score_M


def _triton(rows: Tensor) -> Any:
    if not rows.is_cuda and not (HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"):
        return None
    from orrery.kernels import expert_rows_triton

    return expert_rows_triton


@torch.library.custom_op("orrery::spread_rows", mutates_args=())
def _spread_rows(x_TD: Tensor, place_TK: Tensor, num_rows: int) -> Tensor:
    if kernels := _triton(x_TD):
        return kernels.spread_rows(x_TD, place_TK, num_rows)
    out_MD = x_TD.new_empty(num_rows, x_TD.shape[1])
    token_S, slot_S = (place_TK >= 0).nonzero(as_tuple=True)
    out_MD[place_TK[token_S, slot_S]] = x_TD[token_S]
    return out_MD


@_spread_rows.register_fake
def _(x_TD: Tensor, place_TK: Tensor, num_rows: int) -> Tensor:
    return x_TD.new_empty(num_rows, x_TD.shape[1])


@torch.library.custom_op("orrery::sum_rows", mutates_args=())
def _sum_rows(y_MD: Tensor, place_TK: Tensor) -> Tensor:
    if kernels := _triton(y_MD):
        return kernels.sum_rows(y_MD, place_TK)
    return _aten_sum_rows(y_MD, place_TK)


@_sum_rows.register_fake
def _(y_MD: Tensor, place_TK: Tensor) -> Tensor:
    return y_MD.new_empty(place_TK.shape[0], y_MD.shape[1])


@torch.library.custom_op("orrery::swiglu_rows", mutates_args=())
def _swiglu_rows(gate_up_M2I: Tensor, score_M: Tensor) -> Tensor:
    if kernels := _triton(gate_up_M2I):
        return kernels.swiglu_rows(gate_up_M2I, score_M)
    return _aten_swiglu_rows(gate_up_M2I, score_M)


@_swiglu_rows.register_fake
def _(gate_up_M2I: Tensor, score_M: Tensor) -> Tensor:
    return gate_up_M2I.new_empty(gate_up_M2I.shape[0], gate_up_M2I.shape[1] // 2)


@torch.library.custom_op("orrery::swiglu_rows_backward", mutates_args=())
def _swiglu_rows_backward(
    grad_MI: Tensor, gate_up_M2I: Tensor, score_M: Tensor
) -> tuple[Tensor, Tensor]:
    if kernels := _triton(gate_up_M2I):
        return kernels.swiglu_rows_backward(grad_MI, gate_up_M2I, score_M)
    return _aten_swiglu_rows_backward(grad_MI, gate_up_M2I, score_M)


@_swiglu_rows_backward.register_fake
def _(grad_MI: Tensor, gate_up_M2I: Tensor, score_M: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate_up_M2I), torch.empty_like(score_M)


def reference_gather_rows(x_TD: Tensor, order: RowOrder) -> Tensor:
    return x_TD[order.row_M // order.place_TK.shape[1]]


def reference_order_slots(value_TK: Tensor, order: RowOrder) -> Tensor:
    return value_TK.flatten()[order.row_M]


def reference_combine_rows(y_MD: Tensor, order: RowOrder) -> Tensor:
    out_TD = y_MD.new_zeros(len(order.place_TK), y_MD.shape[1], dtype=_wide(y_MD.dtype))
    for place_T in order.place_TK.unbind(1):
        token_S = (place_T >= 0).nonzero().flatten()
        out_TD = out_TD.index_add(0, token_S, y_MD[place_T[token_S]].to(out_TD.dtype))
    return out_TD.to(y_MD.dtype)


def reference_swiglu_rows(gate_up_M2I: Tensor, score_M: Tensor) -> Tensor:
    dtype = _wide(gate_up_M2I.dtype)
    gate_MI, up_MI = gate_up_M2I.to(dtype).chunk(2, dim=1)
    return (F.silu(gate_MI) * up_MI * score_M[:, None]).to(gate_up_M2I.dtype)


HALF = (torch.bfloat16, torch.float16)


def wide_linear(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    """Return x · weightᵀ [T, N] in float32 (float64 for float64)."""
    if x_TD.is_cuda and x_TD.dtype in HALF and x_TD.dtype == weight_ND.dtype:
        return torch.ops.orrery.wide_linear(x_TD, weight_ND)
    return reference_wide_linear(x_TD, weight_ND)


def reference_wide_linear(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    return F.linear(x_TD.to(dtype), weight_ND.to(dtype))


@torch.library.custom_op("orrery::wide_linear", mutates_args=())
def _wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    return _wide_mm(x, weight.T)


@_wide_linear.register_fake
def _(x, weight):
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)


@torch.library.custom_op("orrery::wide_linear_backward", mutates_args=())
def _wide_linear_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight, from two half-precision terms that sum to grad."""
    rounded = grad.to(x.dtype)
    parts = torch.cat((rounded, (grad - rounded.float()).to(x.dtype)), dim=1)
    grad_x = torch.mm(parts, torch.cat((weight, weight)))
    high, low = _wide_mm(parts.T, x).chunk(2)
    return grad_x, (high + low).to(weight.dtype)


@_wide_linear_backward.register_fake
def _(grad, x, weight):
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _wide_mm(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _gradients(ctx, grad):
    return torch.ops.orrery.wide_linear_backward(grad, *ctx.saved_tensors)


_wide_linear.register_autograd(_gradients, setup_context=_setup_context)
