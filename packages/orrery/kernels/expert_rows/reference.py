"""Reference: indexing and plain autograd. Sums in float32 (float64 for float64), rounded once."""

import torch
import torch.nn.functional as F
from torch import Tensor

from orrery.kernels.expert_rows.dispatch import RowOrder


def gather_rows(x_TD: Tensor, order: RowOrder) -> Tensor:
    return x_TD[order.row_M // order.place_TK.shape[1]]


def order_slots(value_TK: Tensor, order: RowOrder) -> Tensor:
    return value_TK.flatten()[order.row_M]


def combine_rows(y_MD: Tensor, order: RowOrder) -> Tensor:
    dtype = torch.promote_types(y_MD.dtype, torch.float32)
    return y_MD[order.place_TK].to(dtype).sum(1).to(y_MD.dtype)


def swiglu_rows(gate_up_M2I: Tensor, score_M: Tensor) -> Tensor:
    dtype = torch.promote_types(gate_up_M2I.dtype, torch.float32)
    gate_MI, up_MI = gate_up_M2I.to(dtype).chunk(2, dim=1)
    return (F.silu(gate_MI) * up_MI * score_M[:, None]).to(gate_up_M2I.dtype)
