"""Qwen3-MoE (https://arxiv.org/abs/2505.09388): Qwen3's attention, a mixture of experts in every block."""

from orrery.manifest.schema import Model
from orrery.models.block import Block
from orrery.models.causal_lm import Decoder


class Qwen3Moe(Decoder):
    def __init__(self, config: Model) -> None:
        super().__init__(config, Block)
