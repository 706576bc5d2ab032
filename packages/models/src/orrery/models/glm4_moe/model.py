"""GLM-4.5 (https://arxiv.org/abs/2508.06471): partly rotary attention with biases, some dense blocks, then mixtures with shared experts.

Experts are scored by sigmoids, one by one; a bias an expert takes part in the choice only, which keeps them evenly used without a loss.
"""

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Model
from orrery.models.block import Block
from orrery.models.causal_lm import Decoder


class Glm4Moe(Decoder):
    def __init__(self, config: Model) -> None:
        assert config.moe is not None  # the schema's law for this family
        if config.moe.score != "sigmoid":
            raise OrreryError(
                f"model.moe.score {config.moe.score!r}: GLM-4.5 scores by sigmoids only; set model.moe.score to 'sigmoid'"
            )
        if not config.moe.num_shared_experts:
            raise OrreryError(
                "model.moe.num_shared_experts 0: engines read GLM-4.5 with a shared expert only; set it to 1 or more"
            )
        super().__init__(config, Block)
