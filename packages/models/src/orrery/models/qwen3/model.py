"""Qwen3, dense (https://arxiv.org/abs/2505.09388): pre-norm blocks of attention with query and key norms, then SwiGLU.

T tokens · D hidden
"""

from collections.abc import Sequence

from torch import Tensor, nn

from orrery.kernels.attention import Documents
from orrery.manifest.schema import Model
from orrery.models.attention import Attention
from orrery.models.causal_lm import CausalLm
from orrery.models.feed_forward import FeedForward
from orrery.models.norm import RmsNorm


class Block(nn.Module):
    def __init__(self, config: Model) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size)

    def forward(self, x_TD: Tensor, angles: Sequence[Tensor], documents: Documents) -> Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), angles, documents)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


class Qwen3(CausalLm):
    def __init__(self, config: Model) -> None:
        super().__init__(config, Block)
