"""Layers of the pre-norm families.

T tokens · D hidden · H query heads · G key and value heads · K head size · R rotary part of a head
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orrery.kernels.attention import Documents, varlen_attention
from orrery.manifest.schema import Llama3RopeScaling, Lora, Model


class RmsNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension (Zhang & Sennrich 2019).

    Statistics are float32.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(Tensor(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate x) · up x)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD))


class Adapter(nn.Module):
    """LoRA factors `a` [..., rank, in] and `b` [..., out, rank] of one weight [..., out, in]."""

    def __init__(self, weight: Tensor, lora: Lora, dtype: torch.dtype) -> None:
        super().__init__()
        *stack, num_outputs, num_inputs = weight.shape
        options = {"dtype": dtype, "device": weight.device}
        self.a = nn.Parameter(torch.empty(*stack, lora.rank, num_inputs, **options))
        self.b = nn.Parameter(torch.empty(*stack, num_outputs, lora.rank, **options))
        self.scale = lora.alpha / lora.rank

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.scaled(x.dtype)
        return F.linear(F.linear(x, a), b)

    def scaled(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return a and scaled b, to avoid another pass over all rows."""
        return self.a.to(dtype), (self.b * self.scale).to(dtype)


def rotary_angles(
    positions_T: Tensor,
    rotary_dim: int,
    theta: float,
    dtype: torch.dtype,
    scaling: Llama3RopeScaling | None = None,
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, 1, R] of RoFormer's angles, position · theta^(−2i/R).

    Both halves of R are equal (GPT-NeoX). Angles are float32, because bfloat16 cannot tell late
    positions apart.
    """
    index = torch.arange(0, rotary_dim, 2, dtype=torch.int64, device=positions_T.device)
    frequency = 1.0 / theta ** (index.float() / rotary_dim)
    if scaling is not None:
        frequency = _scale_frequencies(frequency, scaling)
    angle_TR = positions_T.float()[:, None] * frequency
    angle_TR = torch.cat((angle_TR, angle_TR), dim=-1)[:, None]
    return angle_TR.cos().to(dtype), angle_TR.sin().to(dtype)


def _scale_frequencies(frequency: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Divide low frequencies by `factor`, keep high frequencies, interpolate between.

    Low is below `low` turns in the original context, high above `high` turns.
    """
    turns = scaling.original_max_positions * frequency / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequency / scaling.factor + kept * frequency


def apply_rotary(x_THK: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Rotate the first R dimensions of each head."""
    rotary_dim = cos_T1R.shape[-1]
    if rotary_dim < x_THK.shape[-1]:
        rotated_THR = apply_rotary(x_THK[..., :rotary_dim], cos_T1R, sin_T1R)
        return torch.cat((rotated_THR, x_THK[..., rotary_dim:]), dim=-1)
    first, second = x_THK.chunk(2, dim=-1)
    return x_THK * cos_T1R + torch.cat((-second, first), dim=-1) * sin_T1R


class LocalCore(nn.Module):
    """Attention on this device. Context parallelism replaces the module."""

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
        q_THK, k_TGK = apply_rotary(q_THK, *angles), apply_rotary(k_TGK, *angles)
        return self.o_proj(self.core(q_THK, k_TGK, v_TGK, documents).flatten(1))
