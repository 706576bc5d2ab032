"""The row movements with backwards of their own: each gradient is again a gather or a sum in fixed order, never an accumulating scatter.

- Two forms that agree within rounding: `aten`, plain operations that Inductor fuses, and `triton`, kernels behind custom operators
  (`orrery::spread_rows`, `orrery::sum_rows`, `orrery::swiglu_rows`, `orrery::swiglu_rows_backward`). Without a form named, a GPU
  takes `triton`, in compiled graphs too (92 against 81 % of the bound of a layer, benchmarks/kernels/experts.json), a CPU `aten`.
- Sums run in float32 (float64 for float64 inputs) and are rounded once.
- `swiglu_rows` keeps only its two inputs: silu is computed again in the backward.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from orrery.kernels.expert_rows import operators, plain
from orrery.kernels.expert_rows.order import Plan

Form = Literal["aten", "triton"]


def gather_rows(x_TD: Tensor, plan: Plan, form: Form | None = None) -> Tensor:
    """x_MD: at each row its slot's token. The gradient of a token is the sum over its K rows."""
    return _Gather.apply(x_TD, plan.row_M, plan.place_TK, form or _form(x_TD))


def combine_rows(y_MD: Tensor, plan: Plan, form: Form | None = None) -> Tensor:
    """out_TD: for each token the sum of its K rows, in the order of its slots. The gradient of a row is its token's."""
    return _Combine.apply(y_MD, plan.row_M, plan.place_TK, form or _form(y_MD))


def order_slots(value_TK: Tensor, plan: Plan) -> Tensor:
    """value_M: one number a slot, such as its score, in row order."""
    return _OrderSlots.apply(value_TK, plan.row_M, plan.place_TK)


def swiglu_rows(gate_up_M2I: Tensor, score_M: Tensor, form: Form | None = None) -> Tensor:
    """act_MI = silu(gate) · up · score, multiplied in float32 and rounded once to the dtype of gate_up.

    gate_up [M, 2·I] holds gate in its first I columns and up in the others; score [M] floating, commonly float32.
    """
    if gate_up_M2I.shape[1] % 2 or score_M.shape != gate_up_M2I.shape[:1]:
        raise ValueError(
            f"gate_up {list(gate_up_M2I.shape)} and score {list(score_M.shape)} must be [M, 2·I] and [M]"
        )
    return _Swiglu.apply(gate_up_M2I, score_M, form or _form(gate_up_M2I))


def _form(rows: Tensor) -> Form:
    return "triton" if operators.available and rows.is_cuda else "aten"


def _spread(x_TD: Tensor, row_M: Tensor, place_TK: Tensor, form: Form) -> Tensor:
    if form == "triton":
        return operators.spread_rows(x_TD.contiguous(), place_TK, row_M.shape[0])
    return plain.spread_rows(x_TD, row_M, place_TK.shape[1])


def _sum(y_MD: Tensor, place_TK: Tensor, form: Form) -> Tensor:
    if form == "triton":
        return operators.sum_rows(y_MD.contiguous(), place_TK)
    return plain.sum_rows(y_MD, place_TK)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, row_M: Tensor, place_TK: Tensor, form: Form) -> Tensor:
        ctx.save_for_backward(place_TK)
        ctx.form = form
        return _spread(x_TD, row_M, place_TK, form)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor | None, ...]:
        (place_TK,) = ctx.saved_tensors
        return _sum(grad_MD, place_TK, ctx.form), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_MD: Tensor, row_M: Tensor, place_TK: Tensor, form: Form) -> Tensor:
        ctx.save_for_backward(row_M, place_TK)
        ctx.form = form
        return _sum(y_MD, place_TK, form)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        row_M, place_TK = ctx.saved_tensors
        return _spread(grad_TD, row_M, place_TK, ctx.form), None, None, None


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
    def forward(ctx: Any, gate_up_M2I: Tensor, score_M: Tensor, form: Form) -> Tensor:
        ctx.save_for_backward(gate_up_M2I, score_M)
        ctx.form = form
        if form == "triton":
            return operators.swiglu_rows(gate_up_M2I.contiguous(), score_M.contiguous())
        return plain.swiglu_rows(gate_up_M2I, score_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MI: Tensor) -> tuple[Tensor | None, ...]:
        gate_up_M2I, score_M = ctx.saved_tensors
        if ctx.form == "triton":
            return *operators.swiglu_rows_backward(
                grad_MI.contiguous(), gate_up_M2I.contiguous(), score_M.contiguous()
            ), None
        return *plain.swiglu_rows_backward(grad_MI, gate_up_M2I, score_M), None
