"""The attention of the Qwen3 families: grouped query heads, RMS norm on each head's query and key, rotary positions.

T tokens · D hidden · H query heads · G key and value heads · K head size
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from orrery.kernels.attention import Documents, varlen_attention
from orrery.models.norm import RmsNorm


def rotary_angles(positions_T: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, K] of RoFormer's angles, position · theta^(−2i/K), both halves of a head alike (the GPT-NeoX layout).

    Angles are made in float32 whatever `dtype` the result has: bfloat16 cannot tell late positions apart.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64, device=positions_T.device).float() / head_dim
    angle_TK = positions_T.float()[:, None] * (1.0 / theta**exponent)
    angle_TK = torch.cat((angle_TK, angle_TK), dim=-1)[:, None]
    return angle_TK.cos().to(dtype), angle_TK.sin().to(dtype)


def rotate(x_THK: Tensor, cos_T1K: Tensor, sin_T1K: Tensor) -> Tensor:
    first, second = x_THK.chunk(2, dim=-1)
    return x_THK * cos_T1K + torch.cat((-second, first), dim=-1) * sin_T1K


class LocalCore(nn.Module):
    """Attention proper where whole documents are here. Context parallel replaces it from outside."""

    def forward(self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, documents: Documents) -> Tensor:
        return varlen_attention(q_THK, k_TGK, v_TGK, documents)


class Attention(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.q_norm = RmsNorm(head_dim, eps)
        self.k_norm = RmsNorm(head_dim, eps)
        self.core: nn.Module = LocalCore()

    def forward(self, x_TD: Tensor, angles: Sequence[Tensor], documents: Documents) -> Tensor:
        q_THK = self.q_norm(self.q_proj(x_TD).unflatten(-1, (-1, self.head_dim)))
        k_TGK = self.k_norm(self.k_proj(x_TD).unflatten(-1, (-1, self.head_dim)))
        v_TGK = self.v_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        out_THK = self.core(rotate(q_THK, *angles), rotate(k_TGK, *angles), v_TGK, documents)
        return self.o_proj(out_THK.flatten(1))
