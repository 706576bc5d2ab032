"""Read and write Hugging Face folders: safetensors files, an index and `config.json`.

`config.json` marks a complete folder: it is removed first and written last. FP8 matrices
(e4m3) have one scale per 128 × 128 block. Multi-token-prediction layers (MTP,
https://arxiv.org/abs/2412.19437, section 2.2) are copied, not trained.
"""

import copy
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from orrery.manifest.errors import OrreryError
from orrery.manifest.json_file import read_object
from orrery.manifest.publish import publish_file, sha256_of, write_atomic
from orrery.manifest.schema import Model
from orrery.manifest.schema.model import FP8_BLOCK
from orrery.manifest.schema.trainer_constraints import MTP_FAMILIES
from orrery.models.families import LLAMA3_FIELDS, YARN_FIELDS, hf_config
from orrery.models.placement import Box, slices
from orrery.wire.weight_wire.fp8_blocks import SCALE

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
TIED_HEAD = "lm_head.weight"
FP8 = "F8_E4M3"  # dtype name in safetensors


@dataclass(frozen=True)
class HfTensor:
    """A checkpoint tensor. `box` holds its index ranges in our parameter.

    An expert's tensor lacks the expert dimension. MTP tensors have an empty `parameter_name`.
    """

    name: str
    parameter_name: str
    box: Box
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def expert(self) -> int | None:
        return self.box[0][0] if len(self.shape) < len(self.box) else None

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def view_of(self, whole: Tensor) -> Tensor:
        part = whole[slices(self.box)]
        return part if self.expert is None else part[0]


@contextmanager
def open_tensors(
    directory: Path,
    wanted: Sequence[HfTensor],
    is_expected: Callable[[str], bool] = lambda name: False,
    tied: bool = False,
) -> Iterator[dict[str, Any]]:
    """Check the folder's tensors, and yield {tensor name: open file} for `read`.

    Raise OrreryError if a `wanted` tensor is missing or has a wrong shape, or another tensor is
    neither an FP8 scale nor `is_expected`. With `tied` embeddings, ignore the LM head.
    """
    with ExitStack() as stack:
        found = _open_files(stack, directory)
        if tied:
            found.pop(TIED_HEAD, None)
        names = {hf.name for hf in wanted}
        _refuse(directory, "has no tensor", [hf.name for hf in wanted if hf.name not in found])
        quantized = {name for name in found if _slice(found, name).get_dtype() == FP8}
        scales = {name + SCALE for name in quantized}
        _refuse(
            directory,
            "has a tensor in FP8, but not its scales",
            [name for name in sorted(scales) if name not in found],
        )
        odd = [name for name in found if not (name in names | scales or is_expected(name))]
        _refuse(directory, "has a tensor that this model lacks:", odd)
        for hf in wanted:
            _check_shape(directory, found, hf.name, hf.shape)
        for name in sorted(quantized):
            shape = _slice(found, name).get_shape()
            blocks = tuple(-(-size // FP8_BLOCK) for size in shape)
            _check_shape(directory, found, name + SCALE, blocks)
        yield found


def _open_files(stack: ExitStack, directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in weight_files(directory):
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise OrreryError(
                f"{path}: not a readable safetensors file ({error}). Copy the directory again"
            ) from error
        found.update(dict.fromkeys(file.keys(), file))
    return found


def tensor_names(directory: Path) -> list[str]:
    with ExitStack() as stack:
        return sorted(_open_files(stack, directory))


def read(files: dict[str, Any], hf: HfTensor, box: Box | None = None) -> Tensor:
    """Return a tensor or its part `box`. Dequantize FP8 to float32."""
    file = files[hf.name]
    value = file.get_slice(hf.name)[slices(box)] if box else file.get_tensor(hf.name)
    if value.dtype != torch.float8_e4m3fn:
        return value
    scale = files[hf.name + SCALE].get_tensor(hf.name + SCALE).float()
    for dim, (start, stop) in enumerate(box or [(0, size) for size in hf.shape]):
        scale = scale.index_select(dim, torch.arange(start, stop) // FP8_BLOCK)
    return value.float() * scale


def _slice(files: dict[str, Any], name: str) -> Any:
    return files[name].get_slice(name)


def _check_shape(
    directory: Path, files: dict[str, Any], name: str, wanted: tuple[int, ...]
) -> None:
    if (shape := tuple(_slice(files, name).get_shape())) != wanted:
        raise OrreryError(
            f"{directory}: tensor {name} is {list(shape)}, but the manifest's model needs "
            f"{list(wanted)}"
        )


def _refuse(directory: Path, problem: str, names: list[str]) -> None:
    if names:
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise OrreryError(
            f"{directory}: {problem} {names[0]}{more}. "
            "Is it the directory of this manifest's model?"
        )


def weight_files(directory: Path) -> list[Path]:
    """Return the folder's safetensors files. Raise OrreryError if it is incomplete."""
    if not (directory / CONFIG_FILE).exists():
        raise OrreryError(
            f"{directory}: no {CONFIG_FILE}, so this Hugging Face directory is unfinished. "
            "Rerun the stage that writes it"
        )
    if (directory / SINGLE_FILE).exists():
        return [directory / SINGLE_FILE]
    index = directory / INDEX_FILE
    if not index.exists():
        raise OrreryError(
            f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE} found. "
            "Name a Hugging Face directory"
        )
    try:
        names = sorted(set(read_object(index, "copy the directory again")["weight_map"].values()))
        return [directory / name for name in names]
    except (KeyError, AttributeError, TypeError) as error:
        raise OrreryError(
            f"{index}: not a safetensors index ({error!r}). Copy the directory again"
        ) from error


def check_digest(directory: Path, expected: str) -> None:
    if (found := sha256_of(weight_files(directory))) != expected:
        raise OrreryError(
            f"model.init.sha256 {expected}: the weights in {directory} have digest {found}. Write "
            "this digest if they are right, or fetch the manifest's revision again"
        )


def assign_files(tensors: Sequence[HfTensor], max_file_bytes: int) -> dict[str, list[HfTensor]]:
    """Return {file name: tensors}. A tensor larger than `max_file_bytes` gets its own file."""
    groups: list[list[HfTensor]] = [[]]
    used = 0
    for hf in tensors:
        if groups[-1] and used + hf.num_bytes > max_file_bytes:
            groups.append([])
            used = 0
        groups[-1].append(hf)
        used += hf.num_bytes
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    count = len(groups)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": g for i, g in enumerate(groups, start=1)}


def remove_weights(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_FILE).unlink(missing_ok=True)
    for stale in directory.glob("model*.safetensors*"):
        stale.unlink()


def write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
        temporary.chmod(0o666 & ~_umask())  # safetensors sets mode 0600
        publish_file(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def finish(directory: Path, files: dict[str, list[HfTensor]], config: dict[str, Any]) -> None:
    if len(files) > 1:
        total = sum(hf.num_bytes for group in files.values() for hf in group)
        weight_map = {hf.name: file for file, group in files.items() for hf in group}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _publish_json(directory / INDEX_FILE, index)
    _publish_json(directory / CONFIG_FILE, config)


def _umask() -> int:
    now = os.umask(0o022)
    os.umask(now)
    return now


def _publish_json(path: Path, content: dict) -> None:
    write_atomic(path, (json.dumps(content, indent=2) + "\n").encode())


JOIN = "eh_proj.weight"  # occurs once per MTP layer
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def is_mtp_name(model: Model, name: str) -> bool:
    found = LAYER.fullmatch(name)
    return model.family in MTP_FAMILIES and found is not None and int(found[1]) >= model.num_layers


def num_mtp_layers(names: Any, num_layers: int) -> int:
    found = [LAYER.fullmatch(name) for name in names]
    indices = [int(one[1]) for one in found if one is not None and one[2] == JOIN]
    return max([index + 1 - num_layers for index in indices if index >= num_layers], default=0)


def check_layers(model: Model, directory: Path, names: Any) -> None:
    if model.family not in MTP_FAMILIES:
        return
    if (found := num_mtp_layers(names, model.num_layers)) != model.num_mtp_layers:
        raise OrreryError(
            f"model.num_mtp_layers {model.num_mtp_layers}: {directory} has {found} layers for "
            f"multi-token prediction. Write model.num_mtp_layers: {found}"
        )


def mtp_tensors(model: Model, files: dict[str, Any], dtype: torch.dtype) -> list[HfTensor]:
    """Return the MTP tensors in `files`. FP8 tensors get `dtype`, because `read` dequantizes them.

    Raise OrreryError for dtypes other than FP8 and `DTYPES`.
    """
    tensors = []
    for name in sorted(name for name in files if is_mtp_name(model, name)):
        if name.endswith(SCALE) and name.removesuffix(SCALE) in files:
            continue
        part = files[name].get_slice(name)
        kept = dtype if (kind := part.get_dtype()) == FP8 else DTYPES.get(kind)
        if kept is None:
            raise OrreryError(
                f"model.num_mtp_layers {model.num_mtp_layers}: tensor {name} is in {kind}; convert "
                f"it to one of {', '.join(DTYPES)}, or remove its layer from the checkpoint"
            )
        shape = tuple(part.get_shape())
        tensors.append(HfTensor(name, "", tuple((0, size) for size in shape), shape, kept))
    return tensors


# `config.json` field → our field
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
SAME_CONFIG = {"kimi_k2": "deepseek_v3"}  # type that transformers lacks → type with equal config
_POSITIONS = ("model_type", "max_position_embeddings", "n_positions")
_ROTATION = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
COMPARED_SEPARATELY = _POSITIONS + _ROTATION


def read_config(directory: Path, remedy: str) -> dict[str, Any]:
    """Return `config.json`, with infinities as {"__float__": "Infinity"}.

    Manifests hold only finite numbers.
    """
    return read_object(directory / CONFIG_FILE, remedy, lambda name: {"__float__": name})


def check_config(model: Model, directory: Path) -> None:
    file, wanted = directory / CONFIG_FILE, hf_config(model)
    if not file.exists():
        raise OrreryError(
            f"model.init.path: {directory} has no {file.name}. Name a Hugging Face directory"
        )
    content = read_config(directory, "copy the directory again")
    is_ours = model.family != "hugging_face"
    model_type = wanted.get("model_type")
    if (found := content.get("model_type", model_type)) != model_type:
        if not is_ours:
            raise _mismatch(model, "hf_config.model_type", model_type, file, "model_type", found)
        raise OrreryError(
            f"model.family {_json(model.family)}: needs model_type {_json(model_type)}, but {file} "
            f"has {_json(found)}. Choose the family of {_json(found)}, or 'hugging_face'"
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
            f"Family {_json(model.family)} does not compute this scaling: choose 'hugging_face', "
            "with that file's content as hf_config"
        )
    said = model.rope_scaling and model.rope_scaling.model_dump()
    raise OrreryError(
        f"model.rope_scaling {_json(said)}: {file} says rope_scaling {_json(scaling or None)}. "
        f"{remedy}"
    )


def rotation(settings: Any) -> dict[str, Any]:
    rope = dict(getattr(settings, "rope_parameters", None) or {})
    # A nested dict holds a layer type's settings.
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
            f"but this family supports only {_json(said)}. Choose 'hugging_face', "
            "with that file's content as hf_config"
        )
    return OrreryError(
        f"model.{field} {_json(said)}: {file} says {key} {_json(found)}. "
        f"Write model.{field}: {_json(found)}"
    )


def parse_config(content: dict[str, Any], source: str) -> Any:
    try:
        from transformers import AutoConfig

        from orrery.models.hugging_face import check_layers, decode_floats
    except ImportError as error:
        raise OrreryError(
            "model.init.kind 'pretrained': reading config.json needs the package transformers. "
            "Install it"
        ) from error
    try:
        content = decode_floats(copy.deepcopy(content))  # transformers would modify the original
        kind = content.pop("model_type", None)
        config = AutoConfig.for_model(SAME_CONFIG.get(kind, kind), **content)
        check_layers(config, source)
        num_heads = getattr(config, "num_attention_heads", None)
        if getattr(config, "head_dim", None) is None and num_heads:
            config.head_dim = config.hidden_size // num_heads  # some config classes lack `head_dim`
        return config
    except OrreryError:
        raise
    except Exception as error:
        raise OrreryError(
            f"{source}: transformers refuses the config ({' '.join(str(error).split())}). "
            "Correct the named field"
        ) from error


def _json(value: Any) -> str:
    return json.dumps(value, default=str)
