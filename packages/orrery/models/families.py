"""Model families as data: Hugging Face's parameter names and config fields."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from orrery.manifest.budget import parameters
from orrery.manifest.budget.parameters import ParameterCounts, UnitParameters
from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Indexer, Lora, Model
from orrery.manifest.schema.model import EXPERT_GROUPS
from orrery.models import lora
from orrery.models.causal_lm import CausalLm, Decoder, Names

# Our parameter name → Hugging Face's. Other parameters get the prefix "model.".
_NAMES: Names = {
    "lm_head.weight": "lm_head.weight",
    "layers.{layer}.mlp.gate.expert_bias": "model.layers.{layer}.mlp.gate.e_score_correction_bias",
    "layers.{layer}.mlp.experts.gate_up_proj": (
        "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
        "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
    ),
    "layers.{layer}.mlp.experts.down_proj": (
        "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"
    ),
}
# transformers' fields → `Llama3RopeScaling`'s
LLAMA3_FIELDS = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_max_positions",
}


_GLM4_ONLY = ("partial_rotary_factor", "use_qk_norm")


# transformers' fields → `YarnRopeScaling`'s
YARN_FIELDS = {
    "factor": "factor",
    "beta_fast": "fast_turns",
    "beta_slow": "slow_turns",
    "mscale": "angle_scale",
    "mscale_all_dim": "score_scale",
    "original_max_position_embeddings": "original_max_positions",
}
_DEEPSEEK = {
    "deepseek_v3": ("DeepseekV3ForCausalLM", "deepseek_v3"),
    "deepseek_v32": ("DeepseekV32ForCausalLM", "deepseek_v32"),
    "kimi_k2": ("DeepseekV3ForCausalLM", "kimi_k2"),
}


def llama_config(config: Model) -> dict[str, Any]:
    scaling = config.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_decoder_config(config),
        "mlp_bias": False,
        "rope_scaling": scaling
        and {"rope_type": "llama3", **{k: getattr(scaling, v) for k, v in LLAMA3_FIELDS.items()}},
    }


def qwen3_config(config: Model) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **_decoder_config(config),
        "use_sliding_window": False,
    }


def qwen3_moe_config(config: Model) -> dict[str, Any]:
    moe = config.moe
    assert moe is not None
    return {
        **qwen3_config(config),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        "moe_intermediate_size": moe.expert_intermediate_size,
        "norm_topk_prob": moe.normalize_top_k,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
    }


def glm4_moe_config(config: Model) -> dict[str, Any]:
    moe = config.moe
    assert moe is not None
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **_decoder_config(config),
        "partial_rotary_factor": config.rotary_fraction,
        "use_qk_norm": config.qk_norm,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        "moe_intermediate_size": moe.expert_intermediate_size,
        "n_shared_experts": moe.num_shared_experts,
        "first_k_dense_replace": moe.num_dense_layers,
        "norm_topk_prob": moe.normalize_top_k,
        "routed_scaling_factor": moe.routed_scale,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": config.num_mtp_layers,
    }


def glm5_config(config: Model) -> dict[str, Any]:
    mla = config.latent
    return {
        **{k: v for k, v in glm4_moe_config(config).items() if k not in _GLM4_ONLY},
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.nope_head_dim,
        "qk_rope_head_dim": mla.rope_head_dim,
        "qk_head_dim": config.head_dim,
        "v_head_dim": mla.value_head_dim,
        "head_dim": mla.rope_head_dim,  # transformers' name of RoPE's width
        "rope_interleave": True,
        # vLLM chooses the experts' router by these two fields.
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        **_indexer_config(mla.indexer, config.num_layers),
    }


def _indexer_config(indexer: Indexer | None, num_layers: int) -> dict[str, Any]:
    if indexer is None:
        return {}
    pattern = "".join(kind[0].upper() for kind in indexer.types or ())
    return {
        **({"index_topk_pattern": pattern} if pattern else {}),  # read by vLLM
        "indexer_rope_interleave": True,
        "index_n_heads": indexer.num_heads,
        "index_head_dim": indexer.head_dim,
        "index_topk": indexer.top_k,
        "indexer_types": indexer.types or ["full"] * num_layers,
    }


def deepseek_config(config: Model) -> dict[str, Any]:
    architecture, model_type = _DEEPSEEK[config.family]
    theirs = {k: v for k, v in glm5_config(config).items() if not k.startswith("indexer_")}
    num_groups, num_kept = EXPERT_GROUPS.get(config.family, (1, 1))
    scaling = config.rope_scaling
    return {
        **theirs,
        "architectures": [architecture],
        "model_type": model_type,
        "n_group": num_groups,
        "topk_group": num_kept,
        "moe_layer_freq": 1,
        "rope_scaling": scaling
        and {
            "type": "yarn",
            "rope_type": "yarn",
            **{theirs: getattr(scaling, ours) for theirs, ours in YARN_FIELDS.items()},
        },
    }


def hugging_face_config(config: Model) -> dict[str, Any]:
    assert config.hf_config is not None
    dtypes = ("dtype", "torch_dtype")
    return {name: value for name, value in config.hf_config.items() if name not in dtypes}


def _decoder_config(config: Model) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": True,
    }


@dataclass(frozen=True)
class ModelFamily:
    """Names and module groups of a model family.

    - `ignored`: patterns of Hugging Face tensor names that loading skips.
    - `fsdp_units`: groups of modules in `fully_shard` order. `layers.*` means one group per layer.
      FSDP must not cast inputs, because the head gets float32 temperatures.
    - `expert_modules`: name patterns of modules whose parameters have experts in dimension 0.
    """

    hf_config: Callable[[Model], dict[str, Any]]
    ignored: tuple[str, ...] = ()
    fsdp_units: tuple[tuple[str, ...], ...] = (
        ("embed_tokens",),
        ("layers.*",),
        ("norm", "lm_head"),
    )
    expert_modules: tuple[str, ...] = ()


# The root FSDP unit owns tied embeddings, because embedding and head read them.
TIED_FSDP_UNITS = (("layers.*",),)
_EXPERT_MODULES = ("layers.*.mlp.experts",)
# Rotary frequencies, stored in old checkpoints
_ROTARY = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)

FAMILIES = {
    "qwen3": ModelFamily(qwen3_config),
    "qwen3_moe": ModelFamily(qwen3_moe_config, expert_modules=_EXPERT_MODULES),
    "llama": ModelFamily(llama_config, _ROTARY),
    "glm4_moe": ModelFamily(glm4_moe_config, expert_modules=_EXPERT_MODULES),
    "glm5": ModelFamily(glm5_config, expert_modules=_EXPERT_MODULES),
    "deepseek_v3": ModelFamily(deepseek_config, expert_modules=_EXPERT_MODULES),
    "deepseek_v32": ModelFamily(deepseek_config, expert_modules=_EXPERT_MODULES),
    "kimi_k2": ModelFamily(deepseek_config, expert_modules=_EXPERT_MODULES),
    "hugging_face": ModelFamily(hugging_face_config, fsdp_units=TIED_FSDP_UNITS),
}


def build(
    model: Model, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> CausalLm:
    """Return the manifest's network with NaN parameters, or without storage on "meta".

    Raise OrreryError for unsupported models, or if transformers is missing.
    """
    with torch.device("meta"):
        module = _network(model)
    for parameter in module.parameters():
        # `module.to` would also cast buffers.
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
                f"model.family {model.family!r}: the package transformers is missing. "
                "Install it, or choose another family"
            ) from error
        return HuggingFaceLm(model, hf_config(model))
    if model.family == "glm4_moe" or model.mla is not None:
        _check_shared_experts(model)
    return Decoder(model)


def _check_shared_experts(model: Model) -> None:
    moe = model.moe
    assert moe is not None
    if moe.score != "sigmoid":
        raise OrreryError(
            f"model.moe.score {moe.score!r}: family {model.family!r} supports only 'sigmoid'. "
            "Set model.moe.score to 'sigmoid'"
        )
    if not moe.num_shared_experts:
        raise OrreryError(
            f"model.moe.num_shared_experts 0: engines support {model.family!r} only with "
            "shared experts. Set model.moe.num_shared_experts to 1 or more"
        )


def hf_config(model: Model) -> dict[str, Any]:
    """Return the model's `config.json` without the dtype."""
    return FAMILIES[model.family].hf_config(model)


def hf_names(module: CausalLm, name: str) -> tuple[str, ...]:
    names = _NAMES.get(name, f"model.{name}") if module.names is None else module.names[name]
    return (names,) if isinstance(names, str) else names


def is_ignored(model: Model, hf_name: str) -> bool:
    return any(re.fullmatch(pattern, hf_name) for pattern in FAMILIES[model.family].ignored)


def fsdp_units(module: CausalLm) -> list[list[nn.Module]]:
    config, units = module.config, []
    for names in TIED_FSDP_UNITS if config.tie_embeddings else FAMILIES[config.family].fsdp_units:
        if names == ("layers.*",):
            units += [[layer] for layer in module.layers]
        else:
            units.append([module.get_submodule(name) for name in names])
    return units


def expert_modules(module: CausalLm) -> list[nn.Module]:
    patterns = FAMILIES[module.config.family].expert_modules
    named = module.named_modules()
    return [one for name, one in named if any(fnmatchcase(name, p) for p in patterns)]


def count_parameters(model: Model, adapters: Lora | None) -> ParameterCounts:
    if model.family != "hugging_face":
        return parameters.count_parameters(model, adapters)
    return count_built(model, adapters)


def count_built(model: Model, adapters: Lora | None) -> ParameterCounts:
    network = build(model, torch.float32, "meta")
    if adapters is not None:
        lora.adapt(network, adapters, torch.float32)
    experts = {id(weight) for module in expert_modules(network) for weight in module.parameters()}
    adapted = {id(network.get_parameter(name)) for name, _ in lora.adapters(network)}
    counted: set[int] = set()

    def count(modules: list[nn.Module]) -> UnitParameters:
        found = {"trained": 0, "frozen": 0, "trained_experts": 0, "frozen_experts": 0, "adapted": 0}
        for weight in (weight for module in modules for weight in module.parameters()):
            if id(weight) in counted:
                continue
            counted.add(id(weight))
            kind = "trained" if weight.requires_grad else "frozen"
            found[kind] += weight.numel()
            found[f"{kind}_experts"] += weight.numel() if id(weight) in experts else 0
            found["adapted"] += weight.numel() if id(weight) in adapted else 0
        return UnitParameters(**found)

    layers = list(network.layers)
    groups = fsdp_units(network)
    first = next(index for index, unit in enumerate(groups) if unit[0] is layers[0])
    before = count([module for unit in groups[:first] for module in unit])
    middle = tuple(count(groups[first + index]) for index in range(len(layers)))
    after = count([module for unit in groups[first + len(layers) :] for module in unit])
    in_layers = (weight for layer in layers for weight in layer.parameters())
    largest = max((weight.numel() for weight in in_layers if weight.requires_grad), default=0)
    return ParameterCounts(before, middle, after, count([network]), largest)
