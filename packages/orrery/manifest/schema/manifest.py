"""Define the manifest and its smaller sections."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveFloat, model_validator

from orrery.manifest.devices import DEVICES, find_device
from orrery.manifest.errors import OrreryError
from orrery.manifest.schema.constraints import misfits
from orrery.manifest.schema.inference import Inference
from orrery.manifest.schema.model import (
    MAX_S,
    Count,
    Model,
    NonNegativeInt,
    PositiveInt,
    Record,
    Sha256,
    Size,
    Steps,
)
from orrery.manifest.schema.trainer import Optimizer, Schedule, Trainer

SCHEMA_VERSION = 3
SAMPLED_KEYS = 4  # per token and indexer, if `trainer.indexer_choice` is "compare"


class TaskUse(Record):
    """A task. Its share of training groups is proportional to `weight`."""

    name: str
    kind: str
    args: dict[str, Any]
    weight: PositiveFloat
    seed: NonNegativeInt
    max_turns: PositiveInt


class Grpo(Record):
    """Advantage A = R − mean(R), for a group's rewards R.

    `normalize_std`: divide A by R's standard deviation.
    """

    kind: Literal["grpo"]
    group_size: Annotated[int, Field(ge=2)]
    normalize_std: bool


class MaxRl(Record):
    """Advantage A = (R − mean(R)) / mean(R), for a group's rewards R. A = 0 if mean(R) ≤ 0."""

    kind: Literal["max_rl"]
    group_size: Annotated[int, Field(ge=2)]


Algorithm = Annotated[Grpo | MaxRl, Field(discriminator="kind")]


class Sampling(Record):
    temperature: PositiveFloat
    max_tokens_per_turn: PositiveInt


class FixedAdmission(Record):
    kind: Literal["fixed"]
    max_in_flight: PositiveInt


class AdaptiveAdmission(Record):
    """Adapt the limit on rollouts in flight to engines' cache use, queues and preemptions."""

    kind: Literal["adaptive"]
    min_in_flight: PositiveInt
    max_in_flight: PositiveInt


Admission = Annotated[FixedAdmission | AdaptiveAdmission, Field(discriminator="kind")]


class Evaluation(Record):
    """Evaluations on held-out problems during RL, each with one policy version.

    `stop_at`: mean reward at which RL ends successfully.
    """

    interval_steps: PositiveInt
    num_problems: PositiveInt
    rollouts_per_problem: PositiveInt
    stop_at: float | None


class GuestEngines(Record):
    """Engines that other sites lend (`orrery lend`).

    Engines lag at most `max_versions_behind` policy versions. A site that sends no request for
    `lease_s` counts as failed.

    The trainer's site recomputes log-probs of a share `verified_share` of each site's rollouts. It
    refuses a site if a rollout's mean |Δ log-prob| exceeds both `min_logprob_difference` and
    `tolerance` · the 90th percentile of the run's own rollouts, or if another test in
    `orchestrator/guests/sites.py` fails.
    """

    max_sites: Count
    lease_s: Annotated[float, Field(gt=0.0, le=MAX_S)]
    max_versions_behind: NonNegativeInt
    verified_share: Annotated[float, Field(gt=0.0, le=1.0)]
    tolerance: Annotated[float, Field(ge=1.0, le=1000.0)]
    min_logprob_difference: PositiveFloat
    block_bytes: Size


class Orchestrator(Record):
    """Sampling of rollouts, and their selection for training.

    `drop_zero_advantage_groups`: leave out groups whose advantages are all 0. They fill the batch
    only once `max_sampled_ratio` · `rollouts_per_batch` rollouts are sampled.

    `on_timeout` "failure": drop and count rollouts that exceed `rollout_timeout_s`. "zero": give
    them reward 0 in evaluations and in the group's mean, but never train them.
    """

    algorithm: Algorithm
    rollouts_per_batch: PositiveInt
    drop_zero_advantage_groups: bool
    max_sampled_ratio: Annotated[float, Field(ge=1.0, le=1000.0)]
    max_off_policy_steps: NonNegativeInt
    max_batches_ahead: NonNegativeInt
    admission: Admission
    sampling: Sampling
    rollout_timeout_s: Annotated[float, Field(gt=0.0, le=MAX_S)]
    on_timeout: Literal["failure", "zero"]
    keep_batches: PositiveInt
    evaluation: Evaluation
    guests: GuestEngines | None


class Tasks(Record):
    train: Annotated[tuple[TaskUse, ...], Field(min_length=1, strict=False)]
    evaluation: Annotated[tuple[TaskUse, ...], Field(min_length=1, strict=False)]


DIRECT_KINDS = ("nccl", "nixl")  # values of `Transport.weights` that write no files


class Transport(Record):
    """Transport of batches to the trainer and of weights to the engines.

    `weights` "files": files in shared memory or the run's folder. "nccl": trainer ranks send each
    engine its slices (CUDA IPC within a host). "nixl": engines read their slices by RDMA.
    "adapters": files with only `trainer.lora`'s adapters, added to the initial weights.

    `routed_experts`: the trainer uses the engines' choice of experts (router replay, R3).
    """

    rollouts: Literal["zmq"]
    weights: Literal["files", "adapters", "nccl", "nixl"]
    routed_experts: bool


class Demonstrations(Record):
    """Demonstrations of the first `num_problems` problems of `task`."""

    kind: Literal["demonstrations"]
    task: TaskUse
    num_problems: PositiveInt


class ChatFile(Record):
    """A JSONL file with one `{"messages": [...]}` per line."""

    kind: Literal["chat_file"]
    path: str
    sha256: Sha256


class ChatDataset(Record):
    """A Hugging Face dataset on disk (`save_to_disk`), with messages in `column`."""

    kind: Literal["dataset"]
    path: str
    split: str | None
    column: str
    fingerprint: str


class TextData(Record):
    """Plain text in `column` of JSONL or Parquet rows. SFT trains every token.

    - `path`: a file, or a folder whose file names begin with `split` (`orrery fetch dataset`).
    - `num_shards`: document i is in shard i mod num_shards. With `trainer.elastic`, a site trains
      only its shard.
    - `shard_by` "file": file i of the split is in shard i mod num_shards, so a site needs only its
      shard's files (`orrery fetch dataset NAME --shard K/N`).
    - `sha256`: the file's hash or, for folders, the hash that `orrery fetch dataset` prints.
    """

    kind: Literal["text"]
    path: str
    split: str | None
    column: str
    sha256: Sha256
    num_shards: Count
    # JSON omits None, so that older manifests keep their ids.
    shard_by: Literal["file"] | None = Field(default=None, exclude_if=lambda found: found is None)


SftData = Annotated[Demonstrations | ChatFile | ChatDataset | TextData, Field(discriminator="kind")]


class Validation(Record):
    """Loss on untrained examples at the first and last step, and every `interval_steps`."""

    interval_steps: PositiveInt
    num_examples: PositiveInt
    data: SftData


class Sft(Record):
    """Supervised fine-tuning on messages whose role is in `trained_roles`."""

    num_steps: Steps
    examples_per_batch: PositiveInt
    optimizer: Optimizer
    schedule: Schedule
    max_grad_norm: PositiveFloat
    trained_roles: Annotated[
        tuple[Literal["system", "user", "assistant", "tool"], ...],
        Field(min_length=1, strict=False),
    ]
    data: SftData
    validation: Validation | None


class Rl(Record):
    num_steps: Steps


class Evaluate(Record):
    """Evaluation on held-out problems before and after RL."""

    num_problems: PositiveInt
    rollouts_per_problem: PositiveInt


class Stages(Record):
    """The pipeline: init, sft (unless null), rl, evaluate, report."""

    sft: Sft | None
    rl: Rl
    evaluate: Evaluate


def _known(accelerator: str) -> str:
    if accelerator != "cpu" and find_device(accelerator) is None:
        raise ValueError(
            f"{accelerator!r} is unknown. Choose from {', '.join(['cpu', *DEVICES])}, or type "
            "`orrery hardware` for this machine's name"
        )
    return accelerator


class Hardware(Record):
    """The machine. Its shape sets the order of reductions, which affects results.

    `accelerator`: "cpu", a key of `devices.DEVICES` or a name from `orrery hardware`.
    `shared_devices`: trainer and engines share the GPUs of one node.
    """

    accelerator: Annotated[str, AfterValidator(_known)]
    num_nodes: Count
    devices_per_node: Count
    shared_devices: bool


class Manifest(Record):
    """All settings of a run.

    `python_lock_sha256`: hash of `locks/cpu.txt` or, on GPUs, `locks/cuda.txt`.
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
        """Return each node group's number of devices, in node order."""
        inference = self.inference
        prefill = inference.prefill_replicas * inference.of_engine(0).devices_per_replica
        rest = inference.num_devices - prefill
        engines = {"prefill": prefill, "decode": rest} if prefill else {"inference": rest}
        return {**engines, "trainer": self.trainer.mesh.world_size}

    @property
    def choice_bytes(self) -> int:
        """Return bytes per token of the engines' choice of keys ("replay": a bit per key)."""
        each = {
            "own": 0,
            "compare": 4 * SAMPLED_KEYS,
            "replay": -(-self.inference.max_model_len_tokens // 8),
        }
        return self.model.num_indexers * each[self.trainer.indexer_choice]

    @property
    def max_text_tokens(self) -> int:
        """Return the maximum tokens of an SFT example cut from `TextData`."""
        limit = self.trainer.memory.max_tokens_per_micro_batch
        return min(limit, self.model.max_positions)

    @property
    def route_bytes(self) -> int:
        """Return bytes per token of the engines' choice of experts and keys."""
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
