"""The manifest of a run."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from orrery.manifest.devices import DEVICES, find_device
from orrery.manifest.errors import OrreryError
from orrery.manifest.schema.constraints import misfits
from orrery.manifest.schema.inference import Inference
from orrery.manifest.schema.model import Count, Model, NonNegativeInt, Record, Sha256
from orrery.manifest.schema.orchestrator import Orchestrator, Sft, Stages, Tasks, Transport
from orrery.manifest.schema.trainer import Trainer

SCHEMA_VERSION = 3


def _known(accelerator: str) -> str:
    if accelerator != "cpu" and find_device(accelerator) is None:
        raise ValueError(
            f"{accelerator!r} is unknown. Choose from {', '.join(['cpu', *DEVICES])}, or type "
            "`orrery hardware`, which prints the name of this machine's"
        )
    return accelerator


class Hardware(Record):
    """The machine. Its shape affects results, because it changes the order of reductions.

    `accelerator`: "cpu", a key of `devices.DEVICES` or a name from `orrery hardware`.
    `shared_devices`: trainer and engines run on the same GPUs of one node.
    """

    accelerator: Annotated[str, AfterValidator(_known)]
    num_nodes: Count
    devices_per_node: Count
    shared_devices: bool


class Manifest(Record):
    """All settings of a run.

    `python_lock_sha256`: hash of `locks/cpu.txt`, or on GPUs of `locks/cuda.txt`.
    """

    schema_version: Literal[3]
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_]*$", max_length=100)]
    seed: NonNegativeInt
    python_lock_sha256: Sha256
    model: Model
    hardware: Hardware
    trainer: Trainer
    inference: Inference
    orchestrator: Orchestrator
    tasks: Tasks
    transport: Transport
    stages: Stages

    @property
    def sft(self) -> Sft:
        if self.stages.sft is None:
            raise OrreryError(f"stages.sft: null, so run {self.name} has no SFT stage. Set it")
        return self.stages.sft

    @property
    def stage_before_rl(self) -> Literal["init", "sft"]:
        return "init" if self.stages.sft is None else "sft"

    @property
    def group_devices(self) -> dict[str, int]:
        """Return {node group: number of devices} in node order."""
        inference = self.inference
        prefill = inference.prefill_replicas * inference.of_engine(0).devices_per_replica
        rest = inference.num_devices - prefill
        engines = {"prefill": prefill, "decode": rest} if prefill else {"inference": rest}
        return {**engines, "trainer": self.trainer.mesh.world_size}

    @property
    def choice_bytes(self) -> int:
        """Return bytes per token of the engines' choice of keys: a bit per key and indexer."""
        if self.trainer.indexer_choice == "own":
            return 0
        return self.model.num_indexers * -(-self.inference.max_model_len_tokens // 8)

    @property
    def max_text_tokens(self) -> int:
        """Return the maximum tokens per part of a text in SFT on `kind` "text"."""
        limit = self.trainer.memory.max_tokens_per_micro_batch
        return min(limit, self.model.max_positions)

    @property
    def route_bytes(self) -> int:
        """Return bytes per token of the experts and keys that engines chose."""
        moe = self.model.moe
        if moe is None or not self.transport.routed_experts:
            return 0
        number = 1 if moe.num_experts <= 256 else 2
        return self.model.num_layers * moe.num_experts_per_token * number + self.choice_bytes

    @model_validator(mode="after")
    def fields_fit(self) -> "Manifest":
        for sentence in misfits(self):
            raise ValueError(sentence)
        return self
