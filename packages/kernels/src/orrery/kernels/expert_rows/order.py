"""The order of rows by expert: one stable sort and its inverse, all on the device."""

from typing import NamedTuple

import torch
from torch import Tensor


class Plan(NamedTuple):
    """Slot t·K + k is the k-th choice of token t; a row is a place in expert order."""

    row_M: Tensor  # i64: the slot that stands at each row
    place_TK: Tensor  # i64: the row of each slot, the inverse of row_M
    ends_E: Tensor  # i32: where each expert's rows end, rising


def plan(expert_TK: Tensor, num_experts: int) -> Plan:
    """Rows sorted by expert, and by slot within an expert. expert_TK: integers [T, K] in [0, num_experts]; T may be 0.

    The id `num_experts` means nowhere: such rows stand last, beyond `ends_E[-1]`, where `grouped_matmul` leaves rows alone.
    Deterministic, without atomics; the host waits for nothing.
    """
    # A radix sort passes once over each byte of its keys.
    key_dtype = (
        torch.uint8 if num_experts < 256 else torch.int16 if num_experts < 32768 else torch.int32
    )
    expert_M, row_M = expert_TK.flatten().to(key_dtype).sort(stable=True)
    place_M = torch.empty_like(row_M).scatter_(
        0, row_M, torch.arange(row_M.shape[0], device=row_M.device)
    )
    experts_E = torch.arange(num_experts, dtype=key_dtype, device=row_M.device)
    ends_E = torch.searchsorted(expert_M, experts_E, right=True, out_int32=True)
    return Plan(row_M, place_M.view_as(expert_TK), ends_E)
