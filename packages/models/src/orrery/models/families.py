"""The families of networks: which module, placements and names belong to `model.family` of a manifest."""

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from orrery.manifest.schema import Model
from orrery.models.causal_lm import CausalLm
from orrery.models.qwen3 import sharding as qwen3_sharding
from orrery.models.qwen3 import weights as qwen3_weights
from orrery.models.qwen3.model import Qwen3
from orrery.models.qwen3_moe import sharding as qwen3_moe_sharding
from orrery.models.qwen3_moe import weights as qwen3_moe_weights
from orrery.models.qwen3_moe.model import Qwen3Moe

_NETWORKS = {"qwen3": Qwen3, "qwen3_moe": Qwen3Moe}
_WEIGHTS = {"qwen3": qwen3_weights, "qwen3_moe": qwen3_moe_weights}
_SHARDING = {"qwen3": qwen3_sharding, "qwen3_moe": qwen3_moe_sharding}


def build(model: Model, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> CausalLm:
    """The manifest's network with unset parameters: NaN, or no storage at all on the device "meta".

    Call `orrery.models.weights.initialize` or `.load` next, on the module as it is or after sharding it.
    """
    with torch.device("meta"):
        module = _NETWORKS[model.family](model)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)  # and not `module.to`: buffers keep the dtype that they were made with
    if torch.device(device).type != "meta":
        module = module.to_empty(device=device)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(torch.nan)
    return module


def hf_config(model: Model) -> dict[str, Any]:
    """The content of a Hugging Face `config.json` for this model, as transformers and vLLM read it."""
    return _WEIGHTS[model.family].hf_config(model)


def hf_names(model: Model) -> dict[str, str | tuple[str, ...]]:
    """Our parameter names to HF's, as patterns over `{layer}` and `{expert}`."""
    return _WEIGHTS[model.family].NAMES


def fsdp_units(module: CausalLm) -> list[list[nn.Module]]:
    """The modules of each `fully_shard` call, in order; the root's own call comes last and is not in the list."""
    sharding = _SHARDING[module.config.family]
    units = []
    for names in sharding.TIED_FSDP_UNITS if module.config.tie_embeddings else sharding.FSDP_UNITS:
        if names == ("layers.*",):
            units += [[layer] for layer in module.layers]
        else:
            units.append([module.get_submodule(name) for name in names])
    return units


def fsdp_methods(module: CausalLm) -> tuple[str, ...]:
    """Methods besides `forward` to hand to `register_fsdp_forward_method`."""
    return _SHARDING[module.config.family].FSDP_METHODS


def expert_modules(module: CausalLm) -> list[nn.Module]:
    """The modules all of whose parameters have the expert as dimension 0: FSDP units of their own under expert parallel."""
    patterns = _SHARDING[module.config.family].EXPERT_MODULES
    return [one for name, one in module.named_modules() if any(fnmatchcase(name, pattern) for pattern in patterns)]
