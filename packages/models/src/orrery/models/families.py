"""The families of networks: which module, placements and names belong to `model.family` of a manifest."""

from fnmatch import fnmatchcase
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import nn

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Model
from orrery.models.causal_lm import CausalLm
from orrery.models.names import Names

_NETWORKS = {
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "llama": "Llama",
    "glm4_moe": "Glm4Moe",
    "hugging_face": "HuggingFaceLm",
}


def _part(model: Model, stem: str) -> ModuleType:
    """`model`, `sharding` or `weights` of the family; imported when asked for, since one of them imports transformers."""
    try:
        return import_module(f"orrery.models.{model.family}.{stem}")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise OrreryError(
            f"model.family {model.family!r}: transformers is not installed here; choose one of our own families"
        ) from error


def build(
    model: Model, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> CausalLm:
    """The manifest's network with unset parameters: NaN, or no storage at all on the device "meta".

    Call `orrery.models.weights.initialize` or `.load` next, on the module as it is or after sharding it.
    """
    with torch.device("meta"):
        module = getattr(_part(model, "model"), _NETWORKS[model.family])(model)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(
            dtype
        )  # and not `module.to`: buffers keep the dtype that they were made with
    if torch.device(device).type != "meta":
        module = module.to_empty(device=device)
        module.compute_buffers()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(torch.nan)
    return module


def hf_config(model: Model) -> dict[str, Any]:
    """The content of a Hugging Face `config.json` for this model, as transformers and vLLM read it."""
    return _part(model, "weights").hf_config(model)


def hf_names(module: CausalLm) -> Names:
    """Our parameter names to HF's, as patterns over `{layer}` and `{expert}`."""
    weights = _part(module.config, "weights")
    return weights.names(module) if hasattr(weights, "names") else weights.NAMES


def ignored_hf_names(model: Model) -> tuple[str, ...]:
    """Regular expressions of tensors that a checkpoint may hold and the network does not need."""
    patterns = getattr(_part(model, "weights"), "IGNORED", ())
    return tuple(pattern.replace("{num_layers}", str(model.num_layers)) for pattern in patterns)


def fsdp_units(module: CausalLm) -> list[list[nn.Module]]:
    """The modules of each `fully_shard` call, in order; the root's own call comes last and is not in the list."""
    sharding = _part(module.config, "sharding")
    units = []
    for names in sharding.TIED_FSDP_UNITS if module.config.tie_embeddings else sharding.FSDP_UNITS:
        if names == ("layers.*",):
            units += [[layer] for layer in module.layers]
        else:
            units.append([module.get_submodule(name) for name in names])
    return units


def expert_modules(module: CausalLm) -> list[nn.Module]:
    """The modules all of whose parameters have the expert as dimension 0: FSDP units of their own under expert parallel."""
    patterns = _part(module.config, "sharding").EXPERT_MODULES
    return [
        one
        for name, one in module.named_modules()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
