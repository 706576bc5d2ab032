"""Reference: operands converted to float32, plain autograd."""

import torch
import torch.nn.functional as F
from torch import Tensor


def wide_linear(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    """Return `orrery.kernels.wide_linear.wide_linear`'s result, on any device and dtype."""
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    return F.linear(x_TD.to(dtype), weight_ND.to(dtype))
