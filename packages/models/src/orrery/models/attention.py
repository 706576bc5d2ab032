"""Attention of the families with whole keys and values: grouped query heads, optional biases and norms a head, rotary positions.

T tokens · D hidden · H query heads · G key and value heads · K head size · R turning part of a head
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from orrery.kernels.attention import Documents, varlen_attention
from orrery.manifest.schema import Llama3RopeScaling, Model
from orrery.models.norm import RmsNorm


def rotary_angles(
    positions_T: Tensor,
    rotary_dim: int,
    theta: float,
    dtype: torch.dtype,
    scaling: Llama3RopeScaling | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, R] of RoFormer's angles, position · theta^(−2i/R), both halves of R alike (the GPT-NeoX layout).

    Angles are made in float32 whatever `dtype` the result has: bfloat16 cannot tell late positions apart.
    """
    exponent = (
        torch.arange(0, rotary_dim, 2, dtype=torch.int64, device=positions_T.device).float()
        / rotary_dim
    )
    frequency = 1.0 / theta**exponent
    if scaling is not None:
        frequency = slowed(frequency, scaling)
    angle_TR = positions_T.float()[:, None] * frequency
    angle_TR = torch.cat((angle_TR, angle_TR), dim=-1)[:, None]
    return angle_TR.cos().to(dtype), angle_TR.sin().to(dtype)


def slowed(frequency: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Frequencies that turn less than `low` times in the original context are divided by `factor`, those above `high` stay; others mix."""
    turns = scaling.original_max_positions * frequency / (2 * math.pi)
    kept = (
        (turns - scaling.low_frequency_factor)
        / (scaling.high_frequency_factor - scaling.low_frequency_factor)
    ).clamp(0.0, 1.0)
    return (1 - kept) * frequency / scaling.factor + kept * frequency


def rotate(x_THK: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Turn the first R dimensions of each head; the others stay."""
    rotary_dim = cos_T1R.shape[-1]
    if rotary_dim < x_THK.shape[-1]:
        return torch.cat(
            (rotate(x_THK[..., :rotary_dim], cos_T1R, sin_T1R), x_THK[..., rotary_dim:]), dim=-1
        )
    first, second = x_THK.chunk(2, dim=-1)
    return x_THK * cos_T1R + torch.cat((-second, first), dim=-1) * sin_T1R


class LocalCore(nn.Module):
    """Attention proper where whole documents are here. Context parallel replaces it from outside."""

    def forward(self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, documents: Documents) -> Tensor:
        return varlen_attention(q_THK, k_TGK, v_TGK, documents)


class Attention(nn.Module):
    def __init__(self, config: Model) -> None:
        super().__init__()
        hidden_size, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden_size, config.num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, config.num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, config.num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * head_dim, hidden_size, bias=False)
        self.q_norm = RmsNorm(head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RmsNorm(head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.core: nn.Module = LocalCore()

    def forward(self, x_TD: Tensor, angles: Sequence[Tensor], documents: Documents) -> Tensor:
        q_THK = self.q_norm(self.q_proj(x_TD).unflatten(-1, (-1, self.head_dim)))
        k_TGK = self.k_norm(self.k_proj(x_TD).unflatten(-1, (-1, self.head_dim)))
        v_TGK = self.v_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        out_THK = self.core(rotate(q_THK, *angles), rotate(k_TGK, *angles), v_TGK, documents)
        return self.o_proj(out_THK.flatten(1))
