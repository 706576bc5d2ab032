"""The families of networks: which module, placements and names belong to `model.family` of a manifest."""

from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from orrery.manifest.schema import Model
from orrery.models.causal_lm import CausalLm
from orrery.models.glm4_moe import sharding as glm4_moe_sharding
from orrery.models.glm4_moe import weights as glm4_moe_weights
from orrery.models.glm4_moe.model import Glm4Moe
from orrery.models.llama import sharding as llama_sharding
from orrery.models.llama import weights as llama_weights
from orrery.models.llama.model import Llama
from orrery.models.names import Names
from orrery.models.qwen3 import sharding as qwen3_sharding
from orrery.models.qwen3 import weights as qwen3_weights
from orrery.models.qwen3.model import Qwen3
from orrery.models.qwen3_moe import sharding as qwen3_moe_sharding
from orrery.models.qwen3_moe import weights as qwen3_moe_weights
from orrery.models.qwen3_moe.model import Qwen3Moe


class Family(NamedTuple):
    network: type[CausalLm]
    sharding: ModuleType
    weights: ModuleType


_FAMILIES = {
    "qwen3": Family(Qwen3, qwen3_sharding, qwen3_weights),
    "qwen3_moe": Family(Qwen3Moe, qwen3_moe_sharding, qwen3_moe_weights),
    "llama": Family(Llama, llama_sharding, llama_weights),
    "glm4_moe": Family(Glm4Moe, glm4_moe_sharding, glm4_moe_weights),
}


def build(model: Model, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> CausalLm:
    """The manifest's network with unset parameters: NaN, or no storage at all on the device "meta".

    Call `orrery.models.weights.initialize` or `.load` next, on the module as it is or after sharding it.
    """
    with torch.device("meta"):
        module = _FAMILIES[model.family].network(model)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)  # and not `module.to`: buffers keep the dtype that they were made with
    if torch.device(device).type != "meta":
        module = module.to_empty(device=device)
        module.compute_buffers()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(torch.nan)
    return module


def hf_config(model: Model) -> dict[str, Any]:
    """The content of a Hugging Face `config.json` for this model, as transformers and vLLM read it."""
    return _FAMILIES[model.family].weights.hf_config(model)


def hf_names(module: CausalLm) -> Names:
    """Our parameter names to HF's, as patterns over `{layer}` and `{expert}`."""
    weights = _FAMILIES[module.config.family].weights
    return weights.names(module) if hasattr(weights, "names") else weights.NAMES


def ignored_hf_names(model: Model) -> tuple[str, ...]:
    """Regular expressions of tensors that a checkpoint may hold and the network does not need."""
    patterns = getattr(_FAMILIES[model.family].weights, "IGNORED", ())
    return tuple(pattern.replace("{num_layers}", str(model.num_layers)) for pattern in patterns)


def fsdp_units(module: CausalLm) -> list[list[nn.Module]]:
    """The modules of each `fully_shard` call, in order; the root's own call comes last and is not in the list."""
    sharding = _FAMILIES[module.config.family].sharding
    units = []
    for names in sharding.TIED_FSDP_UNITS if module.config.tie_embeddings else sharding.FSDP_UNITS:
        if names == ("layers.*",):
            units += [[layer] for layer in module.layers]
        else:
            units.append([module.get_submodule(name) for name in names])
    return units


def fsdp_methods(module: CausalLm) -> tuple[str, ...]:
    """Methods besides `forward` to hand to `register_fsdp_forward_method`."""
    return _FAMILIES[module.config.family].sharding.FSDP_METHODS


def expert_modules(module: CausalLm) -> list[nn.Module]:
    """The modules all of whose parameters have the expert as dimension 0: FSDP units of their own under expert parallel."""
    patterns = _FAMILIES[module.config.family].sharding.EXPERT_MODULES
    return [one for name, one in module.named_modules() if any(fnmatchcase(name, pattern) for pattern in patterns)]
