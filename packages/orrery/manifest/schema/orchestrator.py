"""The orchestrator, tasks, algorithms, transport, and the stages of the pipeline."""

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from orrery.manifest.schema.model import (
    MAX_S,
    Count,
    NonNegativeInt,
    PositiveInt,
    Record,
    Sha256,
    Size,
    Steps,
)
from orrery.manifest.schema.trainer import Optimizer, Schedule


class TaskUse(Record):
    """A task of `kind` with its `args`.

    The task's share of the trained groups is `weight` divided by the sum of all tasks' weights.
    """

    name: str
    kind: str
    args: dict[str, Any]
    weight: PositiveFloat
    seed: NonNegativeInt
    max_turns: PositiveInt


class Grpo(Record):
    """Advantage A = R − mean(R), where R are the rewards of a group.

    `normalize_std` divides A by the group's standard deviation.
    """

    kind: Literal["grpo"]
    group_size: Annotated[int, Field(ge=2)]
    normalize_std: bool


class MaxRl(Record):
    """Advantage A = (R − mean(R)) / mean(R) for rewards R of a group, 0 if mean(R) ≤ 0."""

    kind: Literal["max_rl"]
    group_size: Annotated[int, Field(ge=2)]


Algorithm = Annotated[Grpo | MaxRl, Field(discriminator="kind")]


class Sampling(Record):
    temperature: PositiveFloat
    max_tokens_per_turn: PositiveInt


class FixedAdmission(Record):
    """A constant limit on rollouts in flight."""

    kind: Literal["fixed"]
    max_in_flight: PositiveInt


class AdaptiveAdmission(Record):
    """A limit that follows the engines' cache use, waiting requests and preemptions."""

    kind: Literal["adaptive"]
    min_in_flight: PositiveInt
    max_in_flight: PositiveInt


Admission = Annotated[FixedAdmission | AdaptiveAdmission, Field(discriminator="kind")]


class Evaluation(Record):
    """Evaluate held-out problems during RL, each time on one policy version.

    RL ends successfully once the mean held-out reward reaches `stop_at`. Null: no such end.
    """

    interval_steps: PositiveInt
    num_problems: PositiveInt
    rollouts_per_problem: PositiveInt
    stop_at: float | None


class GuestEngines(Record):
    """Engines of other sites, which come and go (`orrery lend`).

    - At most `max_sites` sites lend engines at a time. A site is lost after `lease_s` without a
      request.
    - Guest engines sample with policy versions at most `max_versions_behind` behind the newest.
    - The trainer's site recomputes log-probs of `verified_share` of each other site's rollouts. The
      other site is refused if a rollout's mean |difference of log-probs| exceeds both
      `min_logprob_difference` and `tolerance` times the 90th percentile of this mean over rollouts
      of the trainer's own engines.
    - `block_bytes`: size of the hashed blocks in which weights travel.
    """

    max_sites: Count
    lease_s: Annotated[float, Field(gt=0.0, le=MAX_S)]
    max_versions_behind: NonNegativeInt
    verified_share: Annotated[float, Field(gt=0.0, le=1.0)]
    tolerance: Annotated[float, Field(ge=1.0, le=1000.0)]
    min_logprob_difference: PositiveFloat
    block_bytes: Size


class Orchestrator(Record):
    """Sampling of rollouts, and the selection of rollouts to train on.

    - `drop_zero_advantage_groups`: leave out groups with equal rewards. Once `max_sampled_ratio`
      times the batch has been sampled, such groups fill the batch.
    - `on_timeout`, after `rollout_timeout_s`: "failure" drops and counts the rollout, "zero" gives
      it the reward 0 in evaluations and in its group's baseline. A timed-out rollout is never
      trained.
    - `keep_batches`: the number of newest batches that stay on disk (tokens, log-probs, routes).
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
    """The transport of batches to the trainer, and of weights to the engines.

    - `weights` "files": files in shared memory or the run's folder. "nccl": trainer ranks send each
      engine its slices (CUDA IPC within a host). "nixl": engines read the same slices by RDMA.
      "adapters": files of the adapters (`trainer.lora`) only. Engines keep the initial weights.
    - `routed_experts`: batches contain the experts that the engines chose, and the trainer replays
      this choice (R3).
    """

    rollouts: Literal["zmq"]
    weights: Literal["files", "adapters", "nccl", "nixl"]
    routed_experts: bool


class Demonstrations(Record):
    """SFT data from a task's own demonstrations: problems `0..num_problems` of `task`."""

    kind: Literal["demonstrations"]
    task: TaskUse
    num_problems: PositiveInt


class ChatFile(Record):
    """SFT data from JSONL, with one `{"messages": [...]}` per line."""

    kind: Literal["chat_file"]
    path: str
    sha256: Sha256


class ChatDataset(Record):
    """SFT data from a Hugging Face dataset on disk (`save_to_disk`).

    `column` holds the messages. `fingerprint` is the fingerprint that the dataset stores.
    """

    kind: Literal["dataset"]
    path: str
    split: str | None
    column: str
    fingerprint: str


class TextData(Record):
    """SFT data of plain text: the `column` of JSONL or Parquet rows, every token trained.

    - `path` is a file, or a folder whose files begin with `split` (`orrery fetch dataset`).
    - Document i is in shard i mod num_shards. With `shard_by` "file", instead file i of the split
      is in shard i mod num_shards, and a site needs only the files of its shard
      (`orrery fetch dataset NAME --shard K/N`).
    - A site trains one shard, and its data ranks share the documents of each batch. Without
      `trainer.elastic` all shards are trained.
    - `sha256`: hash of the file, or hash of the folder as `orrery fetch dataset` prints it.
    """

    kind: Literal["text"]
    path: str
    split: str | None
    column: str
    sha256: Sha256
    num_shards: Count
    # This field is not written if None, so that manifests without it keep their id.
    shard_by: Literal["file"] | None = Field(default=None, exclude_if=lambda found: found is None)


SftData = Annotated[Demonstrations | ChatFile | ChatDataset | TextData, Field(discriminator="kind")]


class Validation(Record):
    """The loss on untrained examples, at the first and last step and every `interval_steps`."""

    interval_steps: PositiveInt
    num_examples: PositiveInt
    data: SftData


class Sft(Record):
    """Supervised fine-tuning on the messages whose role is in `trained_roles`."""

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
    """The evaluation of the weights before and after RL, on held-out problems."""

    num_problems: PositiveInt
    rollouts_per_problem: PositiveInt


class Stages(Record):
    """The pipeline init → sft → rl → evaluate → report. `sft` may be null."""

    sft: Sft | None
    rl: Rl
    evaluate: Evaluate
