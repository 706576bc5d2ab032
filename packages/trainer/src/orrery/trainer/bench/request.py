"""What to measure: a manifest's model and trainer, fitted to the devices at hand; every change of the manifest has a name.

- `devices` other than the mesh's change `dp_shard`, and `ep` where it no longer divides the ranks. A mesh that was asked for is taken as
  it is, or refused.
- `layers` makes the model shallower, so that a model that needs eight devices can be measured on fewer.
- The SFT loss is measured with the optimizer and the clipping of the SFT stage, where the manifest has one.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
    fit_model,
)

if TYPE_CHECKING:
    from orrery.trainer.memory_plan.plan import Workload


@dataclass(frozen=True)
class Options:
    """What the command line or the run's row says; None: as the manifest has it."""

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
    memory: str | None = None  # JSON merged over trainer.memory
    fsdp: str | None = None  # the same over trainer.fsdp
    mesh: str | None = None  # the same over trainer.mesh
    trainer: str | None = (
        None  # the same over the trainer itself: its optimizer, its adapters, its dtypes
    )
    compile: bool | None = None


@dataclass(frozen=True)
class Request:
    """One measurement, whole: what a rank needs to know."""

    name: str
    id12: str
    accelerator: str
    model: Model
    trainer: Trainer
    seed: int
    steps: int
    warmup: int
    lengths: str
    routing: str
    loss: str
    micro_batches: int
    tokens_per_micro_batch: int
    document_tokens: int
    overrides: dict[str, list[Any]]  # field → [the manifest's value, the value measured]

    @property
    def num_devices(self) -> int:
        return self.trainer.mesh.world_size

    @property
    def load(self) -> "Workload":
        from orrery.trainer.memory_plan.plan import (
            Workload,
        )  # here: a misspelt option does not wait for torch

        return Workload(self.tokens_per_micro_batch, self.document_tokens, self.micro_batches)

    def write(self, path: Path) -> None:
        fields = {
            **self.__dict__,
            "model": self.model.model_dump(mode="json"),
            "trainer": self.trainer.model_dump(mode="json"),
        }
        path.write_text(json.dumps(fields))

    @classmethod
    def read(cls, path: Path) -> "Request":
        fields = json.loads(path.read_text())
        return cls(
            **{
                **fields,
                "model": Model.model_validate(fields["model"]),
                "trainer": Trainer.model_validate(fields["trainer"]),
            }
        )


def request(manifest: Manifest, options: Options) -> Request:
    """Raises `OrreryError` where the manifest cannot be fitted to what is asked for."""
    model, trainer = manifest.model, manifest.trainer
    if options.layers is not None:
        if options.layers > model.num_layers:
            raise OrreryError(f"--layers: the model has {model.num_layers}, not {options.layers}")
        model = model.model_copy(update={"num_layers": options.layers})
    if options.loss == "sft" and (sft := manifest.stages.sft) is not None:
        trainer = trainer.model_copy(
            update={"optimizer": sft.optimizer, "max_grad_norm": sft.max_grad_norm}
        )
    told = trainer
    asked_mesh: dict[str, Any] = {}
    for section in ("memory", "fsdp", "mesh", "trainer"):
        if (text := getattr(options, section)) is not None:
            new = parsed(section, text)
            trainer = merged(manifest, trainer, section, new)
            asked_mesh |= {"mesh": new, "trainer": new.get("mesh", {})}.get(section, {})
    if options.compile is not None:
        trainer = trainer.model_copy(update={"compile": options.compile})
    devices = options.devices or manifest.trainer.mesh.world_size
    if misfits := list(context_misfits(trainer.mesh, model, devices)):
        raise OrreryError(misfits[0])
    if options.devices is not None:
        trainer = trainer.model_copy(
            update={"mesh": fitted(trainer.mesh, options.devices, asked_mesh)}
        )
    if options.device == "cpu":
        trainer = trainer.model_copy(
            update={"compute_dtype": "float32", "reduce_dtype": "float32", "param_dtype": "float32"}
        )
    accelerator = options.device or manifest.hardware.accelerator
    try:
        fit_model(trainer, model, accelerator, devices)
    except ValueError as error:
        raise OrreryError(str(error)) from None
    tokens = options.tokens_per_micro_batch or trainer.memory.max_tokens_per_micro_batch
    trainer = trainer.model_copy(
        update={"memory": trainer.memory.model_copy(update={"max_tokens_per_micro_batch": tokens})}
    )
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
    return Request(
        name=manifest.name,
        id12=id12(manifest),
        accelerator=accelerator,
        model=model,
        trainer=trainer,
        seed=manifest.seed,
        steps=options.steps,
        warmup=options.warmup,
        lengths=options.lengths,
        routing=options.routing,
        loss=options.loss,
        micro_batches=options.micro_batches,
        tokens_per_micro_batch=tokens,
        document_tokens=document,
        overrides=differences(
            {
                "model.num_layers": (manifest.model.num_layers, model.num_layers),
                **{
                    f"trainer.{field}": (getattr(told, field), getattr(trainer, field))
                    for field in Trainer.model_fields
                },
                "hardware.accelerator": (manifest.hardware.accelerator, accelerator),
                "inference.max_model_len_tokens": (
                    min(told.memory.max_tokens_per_micro_batch, longest),
                    document,
                ),
            }
        ),
    )


def differences(fields: dict[str, tuple[Any, Any]]) -> dict[str, list[Any]]:
    """Of fields with two values each those whose values differ; of the trainer's sections their own fields."""
    found: dict[str, list[Any]] = {}
    for name, (old, new) in fields.items():
        if isinstance(new, Memory | Fsdp | Mesh):
            found |= differences(
                {
                    f"{name}.{field}": (getattr(old, field), getattr(new, field))
                    for field in type(new).model_fields
                }
            )
        elif old != new:
            found[name] = [
                value.model_dump(mode="json") if isinstance(value, Record) else value
                for value in (old, new)
            ]
    return found


def parsed(section: str, text: str) -> dict[str, Any]:
    try:
        new = json.loads(text)
        if not isinstance(new, dict):
            raise ValueError(f'{text} is no JSON object; write it as {{"field": value}}')
    except ValueError as error:
        raise OrreryError(f"--{section}: {error}") from None
    return new


def merged(manifest: Manifest, trainer: Trainer, section: str, new: dict[str, Any]) -> Trainer:
    """`trainer` with `new` over one of its sections, or over itself, checked by the schema."""
    whole = trainer.model_dump(mode="json")
    old = whole if section == "trainer" else whole[section]
    fields = {**whole, **new} if section == "trainer" else {**whole, section: {**old, **new}}
    try:
        return Trainer.model_validate(fields)
    except ValueError:
        check(
            {**manifest.model_dump(mode="json"), "trainer": fields}, f"--{section}"
        )  # says which field, as of any manifest
        raise


def fitted(mesh: Mesh, devices: int, asked: dict[str, Any]) -> Mesh:
    """`mesh` over so many devices: dp_shard takes what dp_replicate and cp leave, ep what still divides. What was `asked` for stays."""
    others = mesh.dp_replicate * mesh.cp
    if devices < 1 or devices % others:
        fits = ", ".join(str(others * n) for n in (1, 2, 4, 8))
        raise OrreryError(
            f"--devices: {devices} is no multiple of dp_replicate·cp = {others}; choose from {fits}"
        )
    dp_shard = devices // others
    if asked.get("dp_shard", dp_shard) != dp_shard:
        raise OrreryError(
            f"trainer.mesh.dp_shard {mesh.dp_shard}: --devices {devices} leaves it {dp_shard}; leave out dp_shard, or --devices"
        )
    ep = mesh.ep if "ep" in asked else math.gcd(mesh.ep, dp_shard * mesh.cp)
    return mesh.model_copy(update={"dp_shard": dp_shard, "ep": ep})


def described(options: Options) -> dict[str, Any]:
    """The options that say something, as a record keeps them."""
    return {name: value for name, value in asdict(options).items() if value is not None}
