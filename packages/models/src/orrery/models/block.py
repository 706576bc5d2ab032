"""The block of the pre-norm families: attention, then a feed-forward, dense or a mixture, each beside a residual.

T tokens · D hidden · K experts a token
"""

from collections.abc import Sequence

from torch import Tensor, nn

from orrery.kernels.attention import Documents
from orrery.manifest.schema import Model
from orrery.models.attention import Attention
from orrery.models.feed_forward import FeedForward
from orrery.models.mixture import MixtureOfExperts
from orrery.models.norm import RmsNorm


class Block(nn.Module):
    """Block `index` of the manifest's network: a mixture where it has one and the first `num_dense_layers` are past."""

    def __init__(self, config: Model, index: int) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: FeedForward | MixtureOfExperts
        if config.moe is not None and index >= config.moe.num_dense_layers:
            self.mlp = MixtureOfExperts(config.hidden_size, config.moe)
        else:
            self.mlp = FeedForward(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        x_TD: Tensor,
        angles: Sequence[Tensor],
        documents: Documents,
        replayed_TK: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`replayed_TK` replays an engine's choices, for blocks with a mixture; with it, also how many differ from own choice (i64 [])."""
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), angles, documents)
        inner_TD = self.post_attention_layernorm(x_TD)
        if isinstance(self.mlp, MixtureOfExperts):
            out_TD, num_differing = self.mlp(inner_TD, replayed_TK)
            return x_TD + out_TD if num_differing is None else (x_TD + out_TD, num_differing)
        return x_TD + self.mlp(inner_TD)
