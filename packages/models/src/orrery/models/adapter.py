"""The low-rank factors beside one weight; `lora.py` says where they stand and how they begin."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orrery.manifest.schema import Lora


class Adapter(nn.Module):
    """`a` [..., rank, in] and `b` [..., out, rank] of one weight [..., out, in], in a dtype of their own."""

    def __init__(self, weight: Tensor, lora: Lora, dtype: torch.dtype) -> None:
        super().__init__()
        *stack, num_outputs, num_inputs = weight.shape
        self.a = nn.Parameter(
            torch.empty(*stack, lora.rank, num_inputs, dtype=dtype, device=weight.device)
        )
        self.b = nn.Parameter(
            torch.empty(*stack, num_outputs, lora.rank, dtype=dtype, device=weight.device)
        )
        self.scale = lora.alpha / lora.rank

    def forward(self, x: Tensor) -> Tensor:
        """What is added to the projection of x [M, in]."""
        a, b = self.scaled(x.dtype)
        return F.linear(F.linear(x, a), b)

    def scaled(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """a, and b with the scale in it: on the result it would be another pass over all rows."""
        return self.a.to(dtype), (self.b * self.scale).to(dtype)
