"""Llama 2 to 3.3 and what is built like them, such as SmolLM2 (https://arxiv.org/abs/2407.21783): pre-norm attention, then SwiGLU."""

from orrery.manifest.schema import Model
from orrery.models.block import Block
from orrery.models.causal_lm import Decoder


class Llama(Decoder):
    def __init__(self, config: Model) -> None:
        super().__init__(config, Block)
