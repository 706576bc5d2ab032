"""Qwen3, dense (https://arxiv.org/abs/2505.09388): pre-norm blocks of attention with query and key norms, then SwiGLU."""

from orrery.manifest.schema import Model
from orrery.models.block import Block
from orrery.models.causal_lm import Decoder


class Qwen3(Decoder):
    def __init__(self, config: Model) -> None:
        super().__init__(config, Block)
