"""GLM-4.5 (https://arxiv.org/abs/2508.06471): partly rotary attention with biases, some dense blocks, then mixtures with shared experts.

Experts are scored by sigmoids, one by one; a bias an expert takes part in the choice only, which keeps them evenly used without a loss."""

from orrery.manifest.schema import Model
from orrery.models.block import Block
from orrery.models.causal_lm import Decoder


class Glm4Moe(Decoder):
    def __init__(self, config: Model) -> None:
        super().__init__(config, Block)
