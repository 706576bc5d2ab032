"""A pretrained folder's `config.json` against the manifest's model: what a network computes with is in both, and must be the same.

- Tensors' names and shapes say nothing of rotations, epsilons or how experts are chosen; with others the network computes, wrongly, and
  the engine the same, since its `config.json` is made of the manifest.
- Compared is what `hf_config(model)` says (of `hugging_face` what the file says too), by transformers' own config classes: they know the
  defaults of what a file leaves out, and the two ways in which rotations are written.
- A manifest may have fewer positions than the folder.
"""

import copy
import json
import re
from pathlib import Path
from typing import Any

from orrery.manifest.errors import OrreryError
from orrery.manifest.json_file import read_object
from orrery.manifest.schema import Model
from orrery.models.families import hf_config
from orrery.models.hf_folder import CONFIG_FILE

FIELDS = {  # of `config.json`, and what the manifest's model calls them; what is not here is the same in all networks of a family
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
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
LLAMA3 = {  # of transformers' rope_type "llama3", and what `model.rope_scaling` calls them
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_max_positions",
}
NOT_COMPUTED_WITH = re.compile(
    r"architectures|(torch_)?dtype|transformers_version|_name_or_path|use_cache|initializer_range|num_nextn_predict_layers"
    r"|output_(attentions|hidden_states|router_logits)|.*_token_id|.*(dropout|pdrop)|.*aux_loss_coef|pretraining_tp"
)
COMPARED_APART = (
    "model_type",
    "max_position_embeddings",
    "n_positions",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
)


def check_config(model: Model, directory: Path) -> None:
    """Raises OrreryError, one sentence with what to type, at the first field in which `config.json` and the manifest's model differ."""
    file, wanted = directory / CONFIG_FILE, hf_config(model)
    content = _content(file)
    model_type = wanted.get("model_type")
    if (found := content.get("model_type", model_type)) != model_type:
        if model.family == "hugging_face":
            raise _differ(model, "hf_config.model_type", model_type, file, "model_type", found)
        raise OrreryError(
            f"model.family {_json(model.family)}: {file} says model_type {_json(found)}, which is not its {_json(model_type)}; "
            "choose the family of that type, or 'hugging_face'"
        )
    ours, theirs = (
        _settings(wanted, "the manifest's model"),
        _settings({**content, "model_type": model_type}, str(file)),
    )
    for key in wanted if model.family != "hugging_face" else {**wanted, **content}:
        if (
            key in COMPARED_APART
            or NOT_COMPUTED_WITH.fullmatch(key)
            or not (hasattr(ours, key) and hasattr(theirs, key))
        ):
            continue
        if (said := getattr(ours, key)) != (found := getattr(theirs, key)):
            raise _differ(model, _field(model, key), said, file, key, found)
    _check_rotation(model, _rotation(ours), _rotation(theirs), file)
    most = getattr(theirs, "max_position_embeddings", None)
    if most is not None and model.max_positions > most:
        raise OrreryError(
            f"model.max_positions {model.max_positions}: {file} says max_position_embeddings {most}; write {most}, or less"
        )


def _check_rotation(model: Model, ours: dict[str, Any], theirs: dict[str, Any], file: Path) -> None:
    if ours == theirs:
        return
    if model.family == "hugging_face":
        raise _differ(model, "hf_config.rope_parameters", ours, file, "rope_parameters", theirs)
    for key, field in (("rope_theta", "rope_theta"), ("partial_rotary_factor", "rotary_fraction")):
        if ours.get(key) != theirs.get(key):
            raise _differ(model, field, ours.get(key), file, key, theirs.get(key))
    scaling = {
        key: value
        for key, value in theirs.items()
        if key not in ("rope_theta", "partial_rotary_factor")
    }
    if not scaling:
        told = "write model.rope_scaling: null"
    elif (
        model.family == "llama"
        and scaling.keys() == {"rope_type", *LLAMA3}
        and scaling["rope_type"] == "llama3"
    ):
        told = f"write model.rope_scaling: {_json({'kind': 'llama3', **{LLAMA3[key]: scaling[key] for key in LLAMA3}})}"
    else:
        told = f"family {_json(model.family)} does not compute that: choose 'hugging_face', with hf_config the content of that file"
    said = model.rope_scaling and model.rope_scaling.model_dump()
    raise OrreryError(
        f"model.rope_scaling {_json(said)}: {file} says rope_scaling {_json(scaling or None)}; {told}"
    )


def _rotation(settings: Any) -> dict[str, Any]:
    """`rope_theta`, `partial_rotary_factor`, and of a rotation that is scaled how; {} of a network without one."""
    rope = dict(getattr(settings, "rope_parameters", None) or {})
    if not rope or any(
        isinstance(one, dict) for one in rope.values()
    ):  # or one rotation for each type of layers
        return rope
    rope.pop("type", None)  # the older name of rope_type, which stands beside it
    plain = {
        "rope_theta": rope.pop("rope_theta", None),
        "partial_rotary_factor": rope.pop("partial_rotary_factor", 1.0),
    }
    return plain if rope.get("rope_type", "default") == "default" else {**plain, **rope}


def _field(model: Model, key: str) -> str | None:
    return f"hf_config.{key}" if model.family == "hugging_face" else FIELDS.get(key)


def _differ(
    model: Model, field: str | None, said: Any, file: Path, key: str, found: Any
) -> OrreryError:
    if field is None:
        return OrreryError(
            f"model.family {_json(model.family)}: {file} says {key} {_json(found)}, and this family computes with {_json(said)} only; "
            "choose 'hugging_face', with hf_config the content of that file"
        )
    return OrreryError(
        f"model.{field} {_json(said)}: {file} says {key} {_json(found)}; write model.{field}: {_json(found)}"
    )


def _content(file: Path) -> dict[str, Any]:
    if not file.exists():
        raise OrreryError(
            f"model.init.path: {file.parent} holds no {file.name}; name a Hugging Face directory"
        )
    return read_object(file, "copy the directory again")


def _settings(content: dict[str, Any], whose: str) -> Any:
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise OrreryError(
            "model.init.kind 'pretrained': transformers is not installed here, which knows the config; install it"
        ) from error
    try:
        settings = AutoConfig.for_model(
            **copy.deepcopy(content)
        )  # which writes into the dicts that it is given
        if getattr(settings, "head_dim", None) is None and getattr(
            settings, "num_attention_heads", None
        ):
            settings.head_dim = (
                settings.hidden_size // settings.num_attention_heads
            )  # not every class fills it in
        return settings
    except Exception as error:  # of many kinds
        raise OrreryError(
            f"{whose}: transformers refuses the config ({' '.join(str(error).split())}); mend the field that it names"
        ) from error


def _json(value: Any) -> str:
    return json.dumps(value, default=str)
