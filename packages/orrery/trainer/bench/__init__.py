"""`orrery bench trainer`: measure a trainer's speed and memory on synthetic batches."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from orrery.manifest.budget.trainer_memory import Workload
from orrery.manifest.check import check
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import id12
from orrery.manifest.schema import (
    Fsdp,
    Manifest,
    Memory,
    Mesh,
    Model,
    Record,
    Trainer,
    context_misfits,
    trainer_misfits,
)
from orrery.wire.columns import Columns
from orrery.wire.packing import is_padded
from orrery.wire.routed_experts import route_shape

SFT = {"loss": "sft"}
ROWS: dict[str, dict[str, Any]] = {
    "qwen3_30b_a3b_16k": SFT,
    "qwen3_30b_a3b_16k_offload": {"micro_batches": 8, "steps": 3, "warmup": 2},
    "qwen3_30b_a3b_32k": SFT,
    "qwen3_30b_a3b_64k": SFT,
    "qwen3_8b_8k": SFT,
    "qwen3_4b_16k": SFT,
    "qwen3_0_6b_16k": SFT,
}


@dataclass(frozen=True)
class Options:
    device: Literal["cpu"] | None = None
    devices: int | None = None
    steps: int = 8
    warmup: int = 3
    lengths: Literal["fixed", "variable"] = "fixed"
    routing: Literal["natural", "balanced"] = "natural"
    loss: Literal["sft", "rl"] = "rl"
    micro_batches: int = 1
    tokens_per_micro_batch: int | None = None
    document_tokens: int | None = None
    layers: int | None = None
    memory: str | None = None
    fsdp: str | None = None
    mesh: str | None = None
    trainer: str | None = None
    compile: bool | None = None


@dataclass(frozen=True)
class BenchRequest:
    name: str
    id12: str
    accelerator: str
    model: Model
    trainer: Trainer
    seed: int
    options: Options
    document_tokens: int
    overrides: dict[str, list[Any]]  # field → [value in the manifest, value in the benchmark]

    @property
    def num_devices(self) -> int:
        return self.trainer.mesh.world_size

    @property
    def tokens_per_micro_batch(self) -> int:
        return self.trainer.memory.max_tokens_per_micro_batch

    @property
    def load(self) -> Workload:
        num_tokens, count = self.tokens_per_micro_batch, self.options.micro_batches
        return Workload(num_tokens, self.document_tokens, count)

    def write(self, path: Path) -> None:
        records = {
            name: getattr(self, name).model_dump(mode="json") for name in ("model", "trainer")
        }
        path.write_text(json.dumps(self.__dict__ | records | {"options": asdict(self.options)}))

    @classmethod
    def read(cls, path: Path) -> "BenchRequest":
        fields = json.loads(path.read_text())
        fields["model"] = Model.model_validate(fields["model"])
        fields["trainer"] = Trainer.model_validate(fields["trainer"])
        fields["options"] = Options(**fields["options"])
        return cls(**fields)


def make_request(manifest: Manifest, options: Options) -> BenchRequest:
    model = _fit_layers(manifest.model, options)
    base = _stage_trainer(manifest, options)
    trainer = _merge_options(manifest, base, model, options)
    accelerator = options.device or manifest.hardware.accelerator
    devices = options.devices or manifest.trainer.mesh.world_size
    if misfits := list(trainer_misfits(trainer, model, accelerator, devices)):
        raise OrreryError("; ".join(misfits))
    tokens = options.tokens_per_micro_batch or trainer.memory.max_tokens_per_micro_batch
    memory = trainer.memory.model_copy(update={"max_tokens_per_micro_batch": tokens})
    trainer = trainer.model_copy(update={"memory": memory})
    longest = manifest.inference.max_model_len_tokens
    document = min(tokens, options.document_tokens or longest)
    if document < 2:
        raise OrreryError(
            f"--document-tokens: a document of {document} token has none to train; give at least 2"
        )
    if document > model.max_positions:
        raise OrreryError(
            f"--document-tokens: {document} exceed model.max_positions {model.max_positions}"
        )
    fields: dict[str, tuple[Any, Any]] = {}
    fields["model.num_layers"] = manifest.model.num_layers, model.num_layers
    for field in Trainer.model_fields:
        fields[f"trainer.{field}"] = getattr(base, field), getattr(trainer, field)
    fields["hardware.accelerator"] = manifest.hardware.accelerator, accelerator
    old_document = min(base.memory.max_tokens_per_micro_batch, longest)
    fields["inference.max_model_len_tokens"] = old_document, document
    return BenchRequest(
        name=manifest.name,
        id12=id12(manifest),
        accelerator=accelerator,
        model=model,
        trainer=trainer,
        seed=manifest.seed,
        options=options,
        document_tokens=document,
        overrides=_differences(fields),
    )


def given_options(options: Options) -> dict[str, Any]:
    return {name: value for name, value in asdict(options).items() if value is not None}


def _fit_layers(model: Model, options: Options) -> Model:
    if options.layers is None:
        return model
    if options.layers > model.num_layers:
        raise OrreryError(
            f"--layers: the model has {model.num_layers} layers, not {options.layers}"
        )
    return model.model_copy(update={"num_layers": options.layers})


def _stage_trainer(manifest: Manifest, options: Options) -> Trainer:
    sft = manifest.stages.sft
    if options.loss != "sft" or sft is None:
        return manifest.trainer
    changes = {"optimizer": sft.optimizer, "max_grad_norm": sft.max_grad_norm}
    return manifest.trainer.model_copy(update=changes)


def _merge_options(manifest: Manifest, trainer: Trainer, model: Model, options: Options) -> Trainer:
    given_mesh: dict[str, Any] = {}
    for section in ("memory", "fsdp", "mesh", "trainer"):
        if (text := getattr(options, section)) is not None:
            new = _parse(section, text)
            trainer = _merge(manifest, trainer, section, new)
            given_mesh |= {"mesh": new, "trainer": new.get("mesh", {})}.get(section, {})
    if options.compile is not None:
        trainer = trainer.model_copy(update={"compile": options.compile})
    devices = options.devices or manifest.trainer.mesh.world_size
    if misfits := list(context_misfits(trainer.mesh, model, devices)):
        raise OrreryError(misfits[0])
    if options.devices is not None:
        mesh = _fit_mesh(trainer.mesh, options.devices, given_mesh)
        trainer = trainer.model_copy(update={"mesh": mesh})
    if options.device == "cpu":
        dtypes = ("compute_dtype", "reduce_dtype", "param_dtype")
        trainer = trainer.model_copy(update=dict.fromkeys(dtypes, "float32"))
    return trainer


def _parse(section: str, text: str) -> dict[str, Any]:
    try:
        new = json.loads(text)
        if not isinstance(new, dict):
            raise ValueError(f'{text} is no JSON object; write it as {{"field": value}}')
    except ValueError as error:
        raise OrreryError(f"--{section}: {error}") from None
    return new


def _merge(manifest: Manifest, trainer: Trainer, section: str, new: dict[str, Any]) -> Trainer:
    whole = trainer.model_dump(mode="json")
    fields = {**whole, **(new if section == "trainer" else {section: {**whole[section], **new}})}
    try:
        return Trainer.model_validate(fields)
    except ValueError:
        check({**manifest.model_dump(mode="json"), "trainer": fields}, f"--{section}")
        raise


def _fit_mesh(mesh: Mesh, devices: int, given: dict[str, Any]) -> Mesh:
    """Fit dp_shard to `devices`. Unless `given` has ep, reduce ep to a divisor of dp_shard · cp."""
    others = mesh.dp_replicate * mesh.cp
    if devices < 1 or devices % others:
        fits = ", ".join(str(others * n) for n in (1, 2, 4, 8))
        raise OrreryError(
            f"--devices: {devices} is no multiple of dp_replicate·cp = {others}; choose from {fits}"
        )
    dp_shard = devices // others
    if given.get("dp_shard", dp_shard) != dp_shard:
        raise OrreryError(
            f"trainer.mesh.dp_shard {mesh.dp_shard}: --devices {devices} needs {dp_shard}; "
            "leave out dp_shard, or --devices"
        )
    ep = mesh.ep if "ep" in given else math.gcd(mesh.ep, dp_shard * mesh.cp)
    return mesh.model_copy(update={"dp_shard": dp_shard, "ep": ep})


def _differences(fields: dict[str, tuple[Any, Any]]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for name, (old, new) in fields.items():
        if isinstance(new, Memory | Fsdp | Mesh):
            inner = type(new).model_fields
            found |= _differences(
                {f"{name}.{one}": (getattr(old, one), getattr(new, one)) for one in inner}
            )
        elif old != new:
            found[name] = [
                value.model_dump(mode="json") if isinstance(value, Record) else value
                for value in (old, new)
            ]
    return found


def micro_batches(request: BenchRequest, step: int, data_rank: int) -> list[Columns]:
    rng = np.random.default_rng([request.seed, step, data_rank])
    return [
        _columns(request, _document_lengths(request, rng), rng)
        for _ in range(request.options.micro_batches)
    ]


def _document_lengths(request: BenchRequest, rng: np.random.Generator) -> np.ndarray:
    """Return document lengths that fill one micro-batch, including padding.

    Variable lengths are log-uniform in [longest / 16, longest].
    """
    longest, left = request.document_tokens, request.tokens_per_micro_batch
    shortest = min(max(longest / 16, 2), longest)
    lengths: list[int] = []
    while left:
        length = longest
        if request.options.lengths == "variable":
            length = round(float(np.exp(rng.uniform(np.log(shortest), np.log(longest)))))
        length = min(length, left)
        padded = (len(lengths) + 1) * max([*lengths, length])
        if is_padded(request.model) and padded > request.tokens_per_micro_batch:
            break
        lengths.append(length)
        left -= length
    return np.array(lengths, dtype=np.int64)


def _columns(request: BenchRequest, lengths: np.ndarray, rng: np.random.Generator) -> Columns:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(offsets[-1])
    trained = np.ones(total, dtype=bool)
    trained[offsets[:-1]] = False
    one = np.ones(total, dtype=np.float32)
    token = {
        "token_id": rng.integers(0, request.model.vocab_size, total, dtype=np.int32),
        "trained": trained,
        "rl_weight": one if request.options.loss == "rl" else 0 * one,
        "cross_entropy_weight": one,
    }
    if request.options.loss == "rl":
        # Resemble a random network's log-probs, so that importance ratios stay finite.
        uniform = -np.log(request.model.vocab_size)
        token |= {
            "logprob": rng.normal(uniform, 0.1, total).astype(np.float32),
            "reference_logprob": rng.normal(uniform, 0.1, total).astype(np.float32),
            "advantage": np.repeat(rng.normal(0, 1, len(lengths)), lengths).astype(np.float32),
            "reference_kl_weight": one,
            "version": np.zeros(total, dtype=np.int32),
        }
    if request.options.routing == "balanced" and request.model.moe is not None:
        token["routed_experts"] = balanced_experts(request.model, total)
    sample = {
        "temperature": np.ones(len(lengths), dtype=np.float32),
        "dispatch_version": np.full(len(lengths), -1, dtype=np.int32),
    }
    return Columns(offsets, token, sample)


def balanced_experts(model: Model, num_tokens: int) -> np.ndarray:
    """Return round-robin expert ids [tokens, layers, experts per token]."""
    shape = route_shape(model)
    assert shape is not None
    experts = np.arange(num_tokens * shape.top_k) % shape.num_experts
    routes = experts.reshape(num_tokens, 1, shape.top_k)
    return np.broadcast_to(routes, (num_tokens, shape.num_layers, shape.top_k)).astype(shape.dtype)
