"""Root-mean-square normalisation (Zhang & Sennrich 2019): statistics in float32, result in the input's dtype."""

import torch.nn.functional as F
from torch import Tensor, nn


class RmsNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(Tensor(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
