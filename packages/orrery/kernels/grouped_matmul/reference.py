"""Reference grouped product: a loop over the groups, plain autograd. Rows of no group are zero."""

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_matmul(x_MK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Return `orrery.kernels.grouped_matmul.grouped_matmul`'s result, on any device and dtype."""
    ends = [0, *ends_E.tolist()]
    # One unbind, not E selects: the backward is one stack instead of E full-size zero tensors.
    weights = enumerate(weight_ENK.unbind(0))
    outputs = [F.linear(x_MK[ends[e] : ends[e + 1]], weight) for e, weight in weights]
    return torch.cat([*outputs, x_MK.new_zeros(x_MK.shape[0] - ends[-1], weight_ENK.shape[1])])
