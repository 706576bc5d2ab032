"""Compare a pretrained folder's `config.json` with the manifest's model.

Tensor shapes do not show rotations, epsilons or routing, and the engine's `config.json` also comes
from the manifest. transformers fills in defaults. A manifest may have fewer positions.
"""

import copy
import json
import re
from pathlib import Path
from typing import Any

from orrery.manifest.errors import OrreryError
from orrery.manifest.json_file import read_object
from orrery.manifest.schema import Model
from orrery.models.families import LLAMA3_FIELDS, YARN_FIELDS, hf_config
from orrery.models.hf_folder import CONFIG_FILE

# The manifest's model field for each field of `config.json`. A family fixes the other fields.
FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "q_lora_rank": "mla.q_lora_rank",
    "kv_lora_rank": "mla.kv_lora_rank",
    "qk_nope_head_dim": "mla.nope_head_dim",
    "qk_rope_head_dim": "mla.rope_head_dim",
    "v_head_dim": "mla.value_head_dim",
    "index_n_heads": "mla.indexer.num_heads",
    "index_head_dim": "mla.indexer.head_dim",
    "index_topk": "mla.indexer.top_k",
    "indexer_types": "mla.indexer.types",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "attention_bias": "attention_bias",
    "use_qk_norm": "qk_norm",
    "tie_word_embeddings": "tie_embeddings",
    "num_experts": "moe.num_experts",
    "n_routed_experts": "moe.num_experts",
    "num_experts_per_tok": "moe.num_experts_per_token",
    "moe_intermediate_size": "moe.expert_intermediate_size",
    "norm_topk_prob": "moe.normalize_top_k",
    "n_shared_experts": "moe.num_shared_experts",
    "first_k_dense_replace": "moe.num_dense_layers",
    "routed_scaling_factor": "moe.routed_scale",
}
NOT_COMPARED = re.compile(
    r"architectures|(torch_)?dtype|transformers_version|_name_or_path|use_cache|initializer_range"
    r"|num_nextn_predict_layers|output_(attentions|hidden_states|router_logits)|.*_token_id"
    r"|.*(dropout|pdrop)|.*aux_loss_coef|pretraining_tp"
)
YARN_FAMILIES = ("deepseek_v3", "deepseek_v32", "kimi_k2")
SAME_CONFIG = {"kimi_k2": "deepseek_v3"}  # types that transformers lacks
_POSITIONS = ("model_type", "max_position_embeddings", "n_positions")
_ROTATION = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
COMPARED_SEPARATELY = _POSITIONS + _ROTATION


def check_config(model: Model, directory: Path) -> None:
    """Raise OrreryError at the first difference between `config.json` and the manifest."""
    file, wanted = directory / CONFIG_FILE, hf_config(model)
    if not file.exists():
        raise OrreryError(
            f"model.init.path: {directory} holds no {file.name}. Name a Hugging Face directory"
        )
    content = read_object(file, "copy the directory again")
    is_ours = model.family != "hugging_face"
    model_type = wanted.get("model_type")
    if (found := content.get("model_type", model_type)) != model_type:
        if not is_ours:
            raise _mismatch(model, "hf_config.model_type", model_type, file, "model_type", found)
        raise OrreryError(
            f"model.family {_json(model.family)}: {file} says model_type {_json(found)}, which is "
            f"not its {_json(model_type)}. Choose the family of that type, or 'hugging_face'"
        )
    ours = parse_config(wanted, "the manifest's model")
    theirs = parse_config({**content, "model_type": model_type}, str(file))
    for key in wanted if is_ours else {**wanted, **content}:
        if key in COMPARED_SEPARATELY or NOT_COMPARED.fullmatch(key):
            continue
        if not (hasattr(ours, key) and hasattr(theirs, key)):
            continue
        if (said := getattr(ours, key)) != (found := getattr(theirs, key)):
            field = FIELDS.get(key) if is_ours else f"hf_config.{key}"
            raise _mismatch(model, field, said, file, key, found)
    _check_rotation(model, rotation(ours), rotation(theirs), file)
    most = getattr(theirs, "max_position_embeddings", None)
    if most is not None and model.max_positions > most:
        raise OrreryError(
            f"model.max_positions {model.max_positions}: {file} says max_position_embeddings "
            f"{most}. Write {most}, or less"
        )


def _check_rotation(model: Model, ours: dict[str, Any], theirs: dict[str, Any], file: Path) -> None:
    if ours == theirs:
        return
    if model.family == "hugging_face":
        raise _mismatch(model, "hf_config.rope_parameters", ours, file, "rope_parameters", theirs)
    base = {"rope_theta": "rope_theta", "partial_rotary_factor": "rotary_fraction"}
    for key, field in base.items():
        if ours.get(key) != theirs.get(key):
            raise _mismatch(model, field, ours.get(key), file, key, theirs.get(key))
    scaling = {key: value for key, value in theirs.items() if key not in base}
    is_llama3 = scaling.keys() == {"rope_type", *LLAMA3_FIELDS} and scaling["rope_type"] == "llama3"
    if not scaling:
        remedy = "Write model.rope_scaling: null"
    elif model.family == "llama" and is_llama3:
        fields = {ours: scaling[theirs] for theirs, ours in LLAMA3_FIELDS.items()}
        remedy = f"Write model.rope_scaling: {_json({'kind': 'llama3', **fields})}"
    elif model.family in YARN_FAMILIES and scaling.keys() == {"rope_type", *YARN_FIELDS}:
        fields = {ours: scaling[theirs] for theirs, ours in YARN_FIELDS.items()}
        remedy = f"Write model.rope_scaling: {_json({'kind': 'yarn', **fields})}"
    else:
        remedy = (
            f"Family {_json(model.family)} does not compute that: choose 'hugging_face', "
            "with hf_config the content of that file"
        )
    said = model.rope_scaling and model.rope_scaling.model_dump()
    raise OrreryError(
        f"model.rope_scaling {_json(said)}: {file} says rope_scaling {_json(scaling or None)}. "
        f"{remedy}"
    )


def rotation(settings: Any) -> dict[str, Any]:
    rope = dict(getattr(settings, "rope_parameters", None) or {})
    # each layer type has its own rotation
    if not rope or any(isinstance(one, dict) for one in rope.values()):
        return rope
    rope.pop("type", None)  # older name of rope_type
    base = {
        "rope_theta": rope.pop("rope_theta", None),
        "partial_rotary_factor": rope.pop("partial_rotary_factor", 1.0),
    }
    return base if rope.get("rope_type", "default") == "default" else {**base, **rope}


def _mismatch(
    model: Model, field: str | None, said: Any, file: Path, key: str, found: Any
) -> OrreryError:
    if field is None:
        return OrreryError(
            f"model.family {_json(model.family)}: {file} says {key} {_json(found)}, "
            f"and this family computes with {_json(said)} only. Choose 'hugging_face', "
            "with hf_config the content of that file"
        )
    return OrreryError(
        f"model.{field} {_json(said)}: {file} says {key} {_json(found)}. "
        f"Write model.{field}: {_json(found)}"
    )


def parse_config(content: dict[str, Any], source: str) -> Any:
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise OrreryError(
            "model.init.kind 'pretrained': transformers is not installed here, "
            "which knows the config. Install it"
        ) from error
    try:
        content = copy.deepcopy(content)  # transformers modifies its arguments
        kind = content.pop("model_type", None)
        config = AutoConfig.for_model(SAME_CONFIG.get(kind, kind), **content)
        num_heads = getattr(config, "num_attention_heads", None)
        if getattr(config, "head_dim", None) is None and num_heads:
            config.head_dim = config.hidden_size // num_heads  # some classes lack it
        return config
    except Exception as error:
        raise OrreryError(
            f"{source}: transformers refuses the config ({' '.join(str(error).split())}). "
            "Mend the field that it names"
        ) from error


def _json(value: Any) -> str:
    return json.dumps(value, default=str)
