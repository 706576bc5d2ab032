"""Qwen3-MoE (https://arxiv.org/abs/2505.09388): Qwen3's attention, a mixture of experts in every block.

T tokens · D hidden · K experts a token
"""

from collections.abc import Sequence

from torch import Tensor, nn

from orrery.kernels.attention import Documents
from orrery.manifest.schema import Model
from orrery.models.attention import Attention
from orrery.models.causal_lm import CausalLm
from orrery.models.mixture import MixtureOfExperts
from orrery.models.norm import RmsNorm


class Block(nn.Module):
    def __init__(self, config: Model) -> None:
        super().__init__()
        assert config.moe is not None  # the schema's law for this family
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MixtureOfExperts(config.hidden_size, config.moe)

    def forward(self, x_TD: Tensor, angles: Sequence[Tensor], documents: Documents, routed_experts_TK: Tensor | None = None) -> Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), angles, documents)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD), routed_experts_TK)


class Qwen3Moe(CausalLm):
    def __init__(self, config: Model) -> None:
        super().__init__(config, Block)
