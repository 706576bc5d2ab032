"""Public functions of expert rows, with hand-written backward passes that torch.compile traces.

- Each gradient is a gather or a sum in fixed order, never an accumulating scatter.
- Backends: `aten` operations for Inductor to fuse, or `triton` operators on a GPU.
- Sums run in float32 (float64 for float64) and are rounded once.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from orrery.kernels.expert_rows import operators, plain

Backend = Literal["aten", "triton"]


class RowOrder(NamedTuple):
    """Slot t·K + k is the k-th choice of token t. A row is a position in expert order."""

    row_M: Tensor  # i64: the slot at each row
    place_TK: Tensor  # i64: the row of each slot, the inverse of row_M
    ends_E: Tensor  # i32: the end of each expert's rows, rising


def sort_by_expert(expert_TK: Tensor, num_experts: int) -> RowOrder:
    """Sort slots by expert, stably. expert_TK: integers [T, K] in [0, num_experts]. T may be 0.

    The id `num_experts` means no expert: such rows come last, beyond `ends_E[-1]`.
    """
    # Narrow keys, because a radix sort passes once over each byte.
    key_dtype = torch.int16 if num_experts < 32768 else torch.int32
    if num_experts < 256:
        key_dtype = torch.uint8
    expert_M, row_M = expert_TK.flatten().to(key_dtype).sort(stable=True)
    index_M = torch.arange(row_M.shape[0], device=row_M.device)
    place_M = torch.empty_like(row_M).scatter_(0, row_M, index_M)
    experts_E = torch.arange(num_experts, dtype=key_dtype, device=row_M.device)
    ends_E = torch.searchsorted(expert_M, experts_E, right=True, out_int32=True)
    return RowOrder(row_M, place_M.view_as(expert_TK), ends_E)


def gather_rows(x_TD: Tensor, order: RowOrder, backend: Backend | None = None) -> Tensor:
    """Return x_MD: each row's token. A token's gradient is the sum over its K rows."""
    return _Gather.apply(x_TD, order.row_M, order.place_TK, backend or _choose_backend(x_TD))


def combine_rows(y_MD: Tensor, order: RowOrder, backend: Backend | None = None) -> Tensor:
    """Return out_TD: each token's sum over its K rows, in slot order."""
    return _Combine.apply(y_MD, order.row_M, order.place_TK, backend or _choose_backend(y_MD))


def order_slots(value_TK: Tensor, order: RowOrder) -> Tensor:
    """Return value_M: one number a slot, such as its score, in row order."""
    return _OrderSlots.apply(value_TK, order.row_M, order.place_TK)


def swiglu_rows(gate_up_M2I: Tensor, score_M: Tensor, backend: Backend | None = None) -> Tensor:
    """Return silu(gate) · up · score, computed in float32 and rounded once to gate_up's dtype.

    gate_up [M, 2·I] has gate in its first I columns. score [M] is floating. Scored here, the
    backward pass does not need the down projection's output. Raise ValueError on other shapes.
    """
    if gate_up_M2I.shape[1] % 2 or score_M.shape != gate_up_M2I.shape[:1]:
        raise ValueError(
            f"gate_up {list(gate_up_M2I.shape)} and score {list(score_M.shape)} "
            "must be [M, 2·I] and [M]"
        )
    return _Swiglu.apply(gate_up_M2I, score_M, backend or _choose_backend(gate_up_M2I))


def _choose_backend(rows: Tensor) -> Backend:
    return "triton" if operators.available and rows.is_cuda else "aten"


def _spread(x_TD: Tensor, row_M: Tensor, place_TK: Tensor, backend: Backend) -> Tensor:
    if backend == "triton":
        return operators.spread_rows(x_TD.contiguous(), place_TK, row_M.shape[0])
    return plain.spread_rows(x_TD, row_M, place_TK.shape[1])


def _sum(y_MD: Tensor, place_TK: Tensor, backend: Backend) -> Tensor:
    if backend == "triton":
        return operators.sum_rows(y_MD.contiguous(), place_TK)
    return plain.sum_rows(y_MD, place_TK)


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
        return _sum(grad_MD, place_TK, ctx.backend), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y_MD: Tensor, row_M: Tensor, place_TK: Tensor, backend: Backend
    ) -> Tensor:
        ctx.save_for_backward(row_M, place_TK)
        ctx.backend = backend
        return _sum(y_MD, place_TK, backend)

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
        return grad_M[place_TK], None, None


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_M2I: Tensor, score_M: Tensor, backend: Backend) -> Tensor:
        ctx.save_for_backward(gate_up_M2I, score_M)
        ctx.backend = backend
        if backend == "triton":
            return operators.swiglu_rows(gate_up_M2I.contiguous(), score_M.contiguous())
        return plain.swiglu_rows(gate_up_M2I, score_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MI: Tensor) -> tuple[Tensor | None, ...]:
        tensors = (grad_MI, *ctx.saved_tensors)
        if ctx.backend == "triton":
            contiguous = (x.contiguous() for x in tensors)
            return *operators.swiglu_rows_backward(*contiguous), None
        return *plain.swiglu_rows_backward(*tensors), None
