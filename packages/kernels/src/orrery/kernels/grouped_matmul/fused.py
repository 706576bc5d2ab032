"""Torch's grouped GEMM where it runs, the loop elsewhere."""

import torch
import torch.nn.functional as F
from torch import Tensor

from orrery.kernels.grouped_matmul import reference

# Public since torch 2.10, private before; None where this torch has neither.
_grouped_mm = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def grouped_matmul(x_MK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Rows `ends[e − 1]:ends[e]` of x times weight[e] transposed: [M, N] in x's dtype.

    x [M, K]; weight [E, N, K]; ends i32 [E], rising, the last one M; a group may be empty, M may be 0.
    """
    if _grouped_mm is not None and x_MK.is_cuda and x_MK.dtype == torch.bfloat16 and x_MK.shape[0] > 0:
        out_MN = _grouped_mm(x_MK, weight_ENK.transpose(1, 2), offs=ends_E)
        if out_MN.requires_grad:
            out_MN.register_hook(torch.Tensor.contiguous)  # its backward refuses expanded gradients, such as a plain sum's
        return out_MN
    return reference.grouped_matmul(x_MK, weight_ENK, ends_E)
