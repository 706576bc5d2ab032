"""Custom operators around the Triton kernels, opaque to torch.compile.

Inputs are contiguous. On a CPU the operators run `plain.py`, to test compiled graphs.
"""

import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from orrery.kernels.expert_rows import plain

available = find_spec("triton") is not None
_interpreted = available and os.environ.get("TRITON_INTERPRET") == "1"


def _backend(rows: Tensor) -> Any:
    if not rows.is_cuda and not _interpreted:
        return plain
    from orrery.kernels.expert_rows import triton

    return triton


@torch.library.custom_op("orrery::spread_rows", mutates_args=())
def spread_rows(x_TD: Tensor, place_TK: Tensor, num_rows: int) -> Tensor:
    """Return [M, D]: row place_TK[t, k] is x[t]. A row of several slots gets any of them."""
    if (backend := _backend(x_TD)) is not plain:
        return backend.spread_rows(x_TD, place_TK, num_rows)
    out_MD = x_TD.new_empty(num_rows, x_TD.shape[1])
    out_MD[place_TK] = x_TD[:, None]
    return out_MD


@spread_rows.register_fake
def _(x_TD: Tensor, place_TK: Tensor, num_rows: int) -> Tensor:
    return x_TD.new_empty(num_rows, x_TD.shape[1])


@torch.library.custom_op("orrery::sum_rows", mutates_args=())
def sum_rows(y_MD: Tensor, place_TK: Tensor) -> Tensor:
    return _backend(y_MD).sum_rows(y_MD, place_TK)


@sum_rows.register_fake
def _(y_MD: Tensor, place_TK: Tensor) -> Tensor:
    return y_MD.new_empty(place_TK.shape[0], y_MD.shape[1])


@torch.library.custom_op("orrery::swiglu_rows", mutates_args=())
def swiglu_rows(gate_up_M2I: Tensor, score_M: Tensor) -> Tensor:
    return _backend(gate_up_M2I).swiglu_rows(gate_up_M2I, score_M)


@swiglu_rows.register_fake
def _(gate_up_M2I: Tensor, score_M: Tensor) -> Tensor:
    return gate_up_M2I.new_empty(gate_up_M2I.shape[0], gate_up_M2I.shape[1] // 2)


@torch.library.custom_op("orrery::swiglu_rows_backward", mutates_args=())
def swiglu_rows_backward(
    grad_MI: Tensor, gate_up_M2I: Tensor, score_M: Tensor
) -> tuple[Tensor, Tensor]:
    return _backend(gate_up_M2I).swiglu_rows_backward(grad_MI, gate_up_M2I, score_M)


@swiglu_rows_backward.register_fake
def _(grad_MI: Tensor, gate_up_M2I: Tensor, score_M: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate_up_M2I), torch.empty_like(score_M)
