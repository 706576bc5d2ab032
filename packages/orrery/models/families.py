"""Families of networks as data.

- `qwen3`, `qwen3_moe`: Qwen3 (https://arxiv.org/abs/2505.09388).
- `llama`: Llama 2 to 3.3 and SmolLM2 (https://arxiv.org/abs/2407.21783).
- `glm4_moe`: GLM-4.5 (https://arxiv.org/abs/2508.06471): dense blocks, then mixtures with shared
  experts and biased sigmoid scores.
- `hugging_face`: any causal language model of transformers, built from `hf_config`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Model
from orrery.models import hf_names as hf
from orrery.models.causal_lm import CausalLm, Decoder
from orrery.models.hf_names import Names


@dataclass(frozen=True)
class ModelFamily:
    """A family of our own networks, or any network of transformers.

    - `ignored`: regular expressions of further tensors that a checkpoint may hold.
    - `fsdp_units`: one `fully_shard` call each, in order, before the root's. `layers.*` means a
      unit per layer. `trainer/parallel` disables `cast_forward_inputs`: temperatures stay float32.
    - `expert_modules`: patterns of modules whose parameters have the expert as dimension 0.
    """

    hf_config: Callable[[Model], dict[str, Any]]
    names: Names
    ignored: tuple[str, ...] = ()
    fsdp_units: tuple[tuple[str, ...], ...] = (
        ("embed_tokens",),
        ("layers.*",),
        ("norm", "lm_head"),
    )
    expert_modules: tuple[str, ...] = ()


# Both ends of the network read tied embeddings, so the root's unit has them.
TIED_FSDP_UNITS = (("layers.*",),)
_EXPERTS = ("layers.*.mlp.experts",)
# Old checkpoints store rotary frequencies.
_ROTARY = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
# Multi-token prediction (MTP) layers after the last layer, for speculative decoding.
_MTP = (r"model\.layers\.{num_layers}\..*",)

FAMILIES = {
    "qwen3": ModelFamily(hf.qwen3_config, hf.QWEN3),
    "qwen3_moe": ModelFamily(hf.qwen3_moe_config, hf.QWEN3_MOE, expert_modules=_EXPERTS),
    "llama": ModelFamily(hf.llama_config, hf.LLAMA, _ROTARY),
    "glm4_moe": ModelFamily(hf.glm4_moe_config, hf.GLM4_MOE, _MTP, expert_modules=_EXPERTS),
    "hugging_face": ModelFamily(hf.hugging_face_config, {}, fsdp_units=TIED_FSDP_UNITS),
}


def build(
    model: Model, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> CausalLm:
    """Return the manifest's network with NaN parameters, or without storage on "meta".

    Then call `orrery.models.weights.initialize` or `.load`. Raise OrreryError if transformers is
    missing or the model is not supported.
    """
    assert model.family in FAMILIES, f"{model.family} is planned and not built"
    with torch.device("meta"):
        module = _network(model)
    for parameter in module.parameters():
        # `module.to` would cast the buffers too.
        parameter.data = parameter.data.to(dtype)
    if torch.device(device).type != "meta":
        module = module.to_empty(device=device)
        module.compute_buffers()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(torch.nan)
    return module


def _network(model: Model) -> CausalLm:
    if model.family == "hugging_face":
        try:
            from orrery.models.hugging_face import HuggingFaceLm
        except ModuleNotFoundError as error:
            if error.name != "transformers":
                raise
            raise OrreryError(
                f"model.family {model.family!r}: transformers is not installed here; "
                "choose one of our own families"
            ) from error
        return HuggingFaceLm(model)
    if model.family == "glm4_moe":
        _check_glm4_moe(model)
    return Decoder(model)


def _check_glm4_moe(model: Model) -> None:
    moe = model.moe
    assert moe is not None  # the schema requires it for this family
    if moe.score != "sigmoid":
        raise OrreryError(
            f"model.moe.score {moe.score!r}: GLM-4.5 scores by sigmoids only; "
            "set model.moe.score to 'sigmoid'"
        )
    if not moe.num_shared_experts:
        raise OrreryError(
            "model.moe.num_shared_experts 0: engines read GLM-4.5 with a shared expert only; "
            "set it to 1 or more"
        )


def hf_config(model: Model) -> dict[str, Any]:
    """Return the content of `config.json`, without the dtype."""
    return FAMILIES[model.family].hf_config(model)


def hf_names(module: CausalLm) -> Names:
    """Map our parameter names to HF's, as patterns over `{layer}` and `{expert}`."""
    return getattr(module, "names", None) or FAMILIES[module.config.family].names


def ignored_hf_names(model: Model) -> tuple[str, ...]:
    patterns = FAMILIES[model.family].ignored
    return tuple(pattern.replace("{num_layers}", str(model.num_layers)) for pattern in patterns)


def fsdp_units(module: CausalLm) -> list[list[nn.Module]]:
    """Return the modules of each `fully_shard` call in order, without the root's call."""
    config, units = module.config, []
    for names in TIED_FSDP_UNITS if config.tie_embeddings else FAMILIES[config.family].fsdp_units:
        if names == ("layers.*",):
            units += [[layer] for layer in module.layers]
        else:
            units.append([module.get_submodule(name) for name in names])
    return units


def expert_modules(module: CausalLm) -> list[nn.Module]:
    """Return the modules whose parameters have the expert as dimension 0."""
    patterns = FAMILIES[module.config.family].expert_modules
    named = module.named_modules()
    return [one for name, one in named if any(fnmatchcase(name, p) for p in patterns)]
