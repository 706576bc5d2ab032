"""The `aten` backend: plain operations without autograd. The operators also run it on a CPU.

No result is `x.to(x.dtype)`: torch 2.11's compiler returns intermediates of an `autograd.Function`
as outputs, and silently zeroes the gradient of an alias (fixed in torch 2.13).
"""

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def spread_rows(x_TD: Tensor, row_M: Tensor, num_slots: int) -> Tensor:
    return x_TD[row_M // num_slots]


def sum_rows(y_MD: Tensor, place_TK: Tensor) -> Tensor:
    return cast(y_MD[place_TK].sum(1, dtype=wide(y_MD.dtype)), y_MD.dtype)


def swiglu_rows(gate_up_M2I: Tensor, score_M: Tensor) -> Tensor:
    gate_MI, up_MI = cast(gate_up_M2I, wide(gate_up_M2I.dtype)).chunk(2, dim=1)
    return cast(gate_MI * gate_MI.sigmoid() * up_MI * score_M[:, None], gate_up_M2I.dtype)


def swiglu_rows_backward(
    grad_MI: Tensor, gate_up_M2I: Tensor, score_M: Tensor
) -> tuple[Tensor, Tensor]:
    """Return both gradients. silu'(g) = σ(g) (1 + g (1 − σ(g)))."""
    dtype = wide(gate_up_M2I.dtype)
    gate_MI, up_MI = gate_up_M2I.to(dtype).chunk(2, dim=1)
    grad_MI = grad_MI.to(dtype)
    sigmoid_MI = gate_MI.sigmoid()
    silu_MI = gate_MI * sigmoid_MI
    grad_score_M = (grad_MI * silu_MI * up_MI).sum(1).to(score_M.dtype)
    grad_MI = grad_MI * score_M[:, None]
    grad_gate_MI = grad_MI * up_MI * sigmoid_MI * (1 + gate_MI * (1 - sigmoid_MI))
    return torch.cat([grad_gate_MI, grad_MI * silu_MI], dim=1).to(gate_up_M2I.dtype), grad_score_M
