"""Describe a Hugging Face folder as a Jsonnet model axis: `python -m orrery.models.axis FOLDER …`.

The output is JSON: axis, family, number of parameters, vocabulary size, and a reason. The reason is
null, or says why the family is `hugging_face`: no network of Orrery fits `config.json`.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from orrery.manifest.errors import OrreryError
from orrery.manifest.publish import sha256_of
from orrery.manifest.schema import Model
from orrery.manifest.schema.model import FP8_BLOCK
from orrery.models import hf_folder, hugging_face
from orrery.models.families import YARN_FIELDS, build
from orrery.models.hf_folder import CONFIG_FILE, num_mtp_layers, tensor_names, weight_files
from orrery.models.weights import open_checkpoint

OWN_TYPES = {  # transformers' model type → our family
    **{family: family for family in ("qwen3", "qwen3_moe", "llama", "glm4_moe")},
    **{family: family for family in hf_folder.YARN_FAMILIES},
    "glm_moe_dsa": "glm5",
}
NO_DIGEST = "0" * 64
# Defaults of lib/run.libsonnet. An axis omits fields with these values.
DEFAULTS = {
    "rotary_fraction": 1.0,
    "rope_scaling": None,
    "attention_bias": False,
    "moe": None,
    "mla": None,
    "hf_config": None,
    "num_mtp_layers": 0,
}
LEFT_OUT = (
    "quantization_config",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "_name_or_path",
    "auto_map",
)
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
KEYWORDS = {
    *("assert", "else", "error", "false", "for", "function", "if", "import", "importbin"),
    *("importstr", "in", "local", "null", "self", "super", "tailstrict", "then", "true"),
}


def model_of(
    folder: Path, init: dict[str, Any], tokenizer: dict[str, Any]
) -> tuple[Model, str | None]:
    """Return the model, and the reason for family `hugging_face` or None.

    Raise OrreryError for types unknown to transformers, and for quantization except FP8 blocks.
    """
    content = hf_folder.read_config(folder, "fetch the model again")
    kind = content.get("model_type")
    if not _is_readable(content.get("quantization_config")):
        raise OrreryError(
            f"quantization_config: {folder.name} has quantized weights, which cannot be trained; "
            "choose the repository of its bfloat16 weights"
        )
    _check_type(kind, folder)
    config = hf_folder.parse_config(content, f"{folder.name}/{CONFIG_FILE}")
    inputs = {"init": init, "tokenizer": tokenizer}
    reason = f"model_type {kind!r} has no network of our own"
    if kind in OWN_TYPES:
        try:
            family = OWN_TYPES[kind]
            fields = _own_fields(family, config)
            fields["num_mtp_layers"] = _num_mtp_layers(folder, content)
            own = _checked({**inputs, "family": family, **fields})
            hf_folder.check_config(own, folder)
            return own, None
        except OrreryError as error:
            reason = str(error).replace(f"{folder}/", "").partition(". ")[0]
    hugging_face.check_type(config)
    generic = _checked({**inputs, "family": "hugging_face", **_generic_fields(config, content)})
    hf_folder.check_config(generic, folder)
    return generic, reason


def _num_mtp_layers(folder: Path, content: dict[str, Any]) -> int:
    """Count multi-token-prediction layers with weights. `config.json` may state more."""
    stated = content.get("num_nextn_predict_layers") or 0
    if not stated or not any(folder.glob("*.safetensors")):
        return stated
    return num_mtp_layers(tensor_names(folder), content["num_hidden_layers"])


def _is_readable(quantization: Any) -> bool:
    blocks = [FP8_BLOCK, FP8_BLOCK]
    return not quantization or (
        quantization.get("quant_method") == "fp8"
        and quantization.get("weight_block_size") == blocks
    )


def _check_type(kind: Any, folder: Path) -> None:
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    if not isinstance(kind, str):
        raise OrreryError(
            f"model_type: missing in {folder.name}/{CONFIG_FILE}; choose a repository of a causal "
            "language model"
        )
    kind = hf_folder.SAME_CONFIG.get(kind, kind)
    if kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    raise OrreryError(
        f"model_type {kind!r}: transformers has no causal language model of this type, and code "
        f"from a repository is never run; choose {', '.join(OWN_TYPES)} or another type of "
        "transformers"
    )


def _checked(fields: dict[str, Any]) -> Model:
    try:
        return Model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise OrreryError(
            f"model.{'.'.join(map(str, first['loc']))}: {first['input']!r} in {CONFIG_FILE} is "
            f"not supported ({first['msg']}); choose another model"
        ) from error


def _own_fields(family: str, config: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"attention_bias": False, "qk_norm": family.startswith("qwen3")}
    mla: dict[str, Any] = {}
    indexer: dict[str, Any] = {"types": None}
    moe = {"num_dense_layers": 0, "num_shared_experts": 0, "score": "softmax", "routed_scale": 1.0}
    parts = {"moe": moe, "mla": mla, "mla.indexer": indexer, "": fields}
    for theirs, ours in hf_folder.FIELDS.items():
        if (value := getattr(config, theirs, None)) is not None:
            part, _, name = ours.rpartition(".")
            parts[part][name] = value
    if mla or family == "glm4_moe":
        moe["score"] = "sigmoid"
    if mla:
        fields["head_dim"] = config.qk_head_dim
        if set(indexer["types"] or ["full"]) == {"full"}:
            indexer["types"] = None
        mla["indexer"] = indexer if "top_k" in indexer else None
    rope = hf_folder.rotation(config)
    scaling = None
    if rope.get("rope_type") == "llama3":
        scaling = {ours: rope[theirs] for theirs, ours in hf_folder.LLAMA3_FIELDS.items()}
        scaling["kind"] = "llama3"
    elif family in hf_folder.YARN_FAMILIES and YARN_FIELDS.keys() <= rope.keys():
        scaling = {ours: rope[theirs] for theirs, ours in YARN_FIELDS.items()}
        scaling["kind"] = "yarn"
    return {
        **fields,
        "max_positions": config.max_position_embeddings,
        "rope_theta": rope["rope_theta"],
        "rotary_fraction": rope["partial_rotary_factor"],
        "rope_scaling": scaling,
        "moe": moe if mla or family.endswith("moe") else None,
        "mla": mla or None,
        "hf_config": None,
        "fp8": None,
    }


def _generic_fields(config: Any, content: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for ours, names in hugging_face.FIELDS.items():
        if (theirs := hugging_face.find_field(config, names)) is not None:
            found[ours] = getattr(config, theirs)
    ropes = hugging_face.rotations(config)
    thetas = [one["rope_theta"] for one in ropes if "rope_theta" in one]
    positions = hugging_face.find_field(config, hugging_face.POSITIONS)
    most = getattr(config, positions) if positions else 0
    # Beyond the original positions, longrope's angles depend on the longest document.
    for rope in ropes:
        if rope.get("rope_type") == "longrope":
            most = rope.get("original_max_position_embeddings", most)
    heads, hidden_size = found.get("num_heads", 1), found.get("hidden_size", 1)
    return {
        "num_kv_heads": heads,
        "intermediate_size": 4 * hidden_size,
        "rms_norm_eps": 1e-5,
        **found,
        "head_dim": getattr(config, "head_dim", None) or hidden_size // heads,
        "max_positions": most if most > 0 else 2048,
        "rope_theta": thetas[0] if thetas else 10000.0,
        "rotary_fraction": 1.0,
        "rope_scaling": None,
        "attention_bias": False,
        "qk_norm": False,
        "moe": None,
        "mla": None,
        "num_mtp_layers": 0,
        "fp8": None,
        "hf_config": {key: one for key, one in content.items() if key not in LEFT_OUT},
    }


def axis_text(model: Model, title: str) -> str:
    fields = model.model_dump(mode="json")
    defaults = {**DEFAULTS, "qk_norm": model.family in ("qwen3", "qwen3_moe")}
    lines = [
        f"    {name}: {_jsonnet(value)},\n"
        for name, value in fields.items()
        if name not in defaults or value != defaults[name]
    ]
    return f"// {title}\n{{\n  model+: {{\n{''.join(lines)}  }},\n}}\n"


def _jsonnet(value: Any) -> str:
    if isinstance(value, dict):
        inside = ", ".join(f"{_key(name)}: {_jsonnet(one)}" for name, one in value.items())
        return f"{{ {inside} }}" if value else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(_jsonnet, value))}]"
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _key(name: str) -> str:
    return name if IDENTIFIER.fullmatch(name) and name not in KEYWORDS else _text(name)


def _text(value: str) -> str:
    inside = json.dumps(value)[1:-1].replace('\\"', '"')
    if "'" in inside:  # jsonnetfmt then keeps double quotes
        return json.dumps(value)
    return f"'{inside}'"


def examine(folder: Path, path: str, revision: str, tokenizer: str, title: str) -> dict[str, Any]:
    has_weights = any(folder.glob("*.safetensors"))
    digest = sha256_of(weight_files(folder)) if has_weights else NO_DIGEST
    init = {"kind": "pretrained", "path": path, "revision": revision, "sha256": digest}
    model, reason = model_of(
        folder, init, {"kind": "pretrained", "path": path, "sha256": tokenizer}
    )
    network = build(model, device="meta")
    if has_weights:
        with open_checkpoint(network, folder):
            pass
    return {
        "axis": axis_text(model, title),
        "family": model.family,
        "num_parameters": sum(one.numel() for one in network.parameters()),
        "vocab_size": model.vocab_size,
        "reason": reason,
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m orrery.models.axis", description=__doc__)
    parser.add_argument("folder", type=Path)
    for name in ("path", "revision", "title"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--tokenizer", default=NO_DIGEST, help="sha256 of the tokenizer's files")
    args = parser.parse_args(words)
    try:
        print(json.dumps(examine(**vars(args))))
    except OrreryError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
