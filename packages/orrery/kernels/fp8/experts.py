"""Compute a mixture's experts in FP8, with permutation and SwiGLU fused into quantization.

    gate_up = x[token] · w_gate_upᵀ;  act = swiglu_rows(gate_up, score);  out = Σ_rows act · w_downᵀ

- Rows are in expert order (`expert_rows.py`).
- Results equal, bit for bit, those of `gather_rows`, `fp8_grouped_matmul`, `swiglu_rows`,
  `fp8_grouped_matmul` and `combine_rows` in turn.
- On a GPU x[token], act and the output gradient in expert order are stored in FP8 only.
- For the backward pass the forward pass saves `gate_up`, and the FP8 columns (`quantize.py`) of
  x[token] and act.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from orrery.kernels.expert_rows import RowOrder, sum_rows, swiglu_rows_backward
from orrery.kernels.fp8.products import Parts
from orrery.kernels.fp8.quantize import BLOCK


def fp8_experts(
    x_TD: Tensor,
    score_TK: Tensor,
    rows: RowOrder,
    weights: tuple[Tensor, Tensor],
    parts: tuple[Parts, Parts],
    has_spare: bool = False,
) -> Tensor:
    """Return [T, D]: each token's sum of score · output over its experts.

    `score_TK` weights the K experts of each token. `rows` is from `sort_by_expert` with block 128.
    `weights` are gate-up [E, 2·I, D] and down [E, D, I]. `parts` are the `weight_parts` of each, or
    two empty lists. With `has_spare`, the last 128 rows belong to no expert, and slots without an
    expert point to one of them. Outputs and gradients of these rows are set to zero.
    """
    keeps = [torch.is_grad_enabled() and weight.requires_grad for weight in weights]
    order = (rows.row_M, rows.place_TK, rows.ends_E, rows.counts_E)
    return _Experts.apply(x_TD, score_TK, *weights, *order, *keeps, has_spare, *parts[0], *parts[1])


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        score_TK: Tensor,
        gate_up: Tensor,
        down: Tensor,
        row_M: Tensor,
        place_TK: Tensor,
        ends_E: Tensor,
        counts_E: Tensor,
        keeps_x: bool,
        keeps_act: bool,
        has_spare: bool,
        *parts: Tensor,
    ) -> Tensor:
        first, second = list(parts[:4]), list(parts[4:])
        groups = (ends_E, counts_E)
        token_M, score_M = row_M // place_TK.shape[1], score_TK.flatten()[row_M]
        product = torch.ops.orrery.fp8_grouped
        gate_up_M2I, *of_x = product(x_TD, gate_up, first, *groups, keeps_x, token_M)
        y_MD, *of_act = product(gate_up_M2I, down, second, *groups, keeps_act, None, score_M)
        if has_spare:
            y_MD[-BLOCK:] = 0
        ctx.has_spare, ctx.dtypes, ctx.num_parts = (
            has_spare,
            (gate_up.dtype, down.dtype),
            len(parts),
        )
        rows = (gate_up_M2I, score_M, token_M, place_TK)
        kept = (first[2:], second[2:]) if parts else ([gate_up], [down])
        ctx.save_for_backward(*rows, *groups, *of_x, *of_act, *kept[0], *kept[1])
        return sum_rows(y_MD, place_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        gate_up_M2I, score_M, token_M, place_TK, *saved = ctx.saved_tensors
        groups, of_x, of_act, weights = saved[:2], saved[2:4], saved[4:6], saved[6:]
        half = len(weights) // 2
        wants_x, wants_score, wants_gate_up, wants_down = ctx.needs_input_grad[:4]
        gradients = torch.ops.orrery.fp8_grouped_backward
        grad_act, grad_down = gradients(
            grad_TD.contiguous(), of_act, weights[half:], *groups, True, wants_down, token_M
        )
        grad_gate_up_M2I, grad_score_M = swiglu_rows_backward(grad_act, gate_up_M2I, score_M)
        grad_x_MD, grad_gate_up = gradients(
            grad_gate_up_M2I, of_x, weights[:half], *groups, wants_x, wants_gate_up
        )
        if ctx.has_spare:
            grad_score_M[-BLOCK:] = 0
            grad_x_MD[-BLOCK:] = 0
        grad_x = sum_rows(grad_x_MD, place_TK) if wants_x else None
        grad_score = grad_score_M[place_TK] if wants_score else None
        of_weights = (
            gradient.to(dtype) if wants else None
            for gradient, dtype, wants in zip(
                (grad_gate_up, grad_down), ctx.dtypes, (wants_gate_up, wants_down), strict=True
            )
        )
        return grad_x, grad_score, *of_weights, *[None] * (7 + ctx.num_parts)
