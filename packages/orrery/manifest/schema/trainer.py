"""The trainer: mesh, memory, optimizer, schedule and loss."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from orrery.manifest.schema.model import (
    Bound,
    Count,
    Decay,
    DType,
    NonNegativeInt,
    PositiveInt,
    Probability,
    Record,
)


class Mesh(Record):
    """Ranks = dp_replicate · dp_shard · cp. Expert parallelism divides dp_shard · cp.

    - Weights are sharded over dp_shard · cp ranks. The ranks of one cp group share their documents.
    - `cp_style`: "ulysses" exchanges sequence for heads in an all-to-all. "ring" passes keys and
      values around in zig-zag order.
    - `ep_backend`: "torch" is an all-to-all of torch.distributed, "deepep" the library DeepEP.
    """

    dp_replicate: Count
    dp_shard: Count
    cp: Count
    ep: Count
    cp_style: Literal["ulysses", "ring"]
    ep_backend: Literal["torch", "deepep"]

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp

    @property
    def num_data_ranks(self) -> int:
        return self.dp_replicate * self.dp_shard

    def data_rank(self, rank: int) -> int:
        """Return a trainer rank's data group. The ranks of a cp group are neighbours."""
        return rank // self.cp


class Fsdp(Record):
    """FSDP2.

    - `reshard_after_forward`: free whole weights after forward, and gather them for backward.
    - `reduce_gradients`: "step" keeps whole gradients of all micro-batches. "micro_batch" reduces
      and shards them after each.
    - `cpu_offload`: weights, gradients, optimizer state and step are on the host.
    """

    reshard_after_forward: bool
    reduce_gradients: Literal["step", "micro_batch"]
    cpu_offload: bool


class AdamW(Record):
    kind: Literal["adamw"]
    lr: PositiveFloat
    beta1: Decay
    beta2: Decay
    eps: PositiveFloat
    weight_decay: NonNegativeFloat


class Muon(Record):
    """Muon for the matrices of the blocks (Jordan et al. 2024), `rest` for all other weights.

    Updates have AdamW's root mean square (arXiv 2502.16982), so one learning rate suits both.
    """

    kind: Literal["muon"]
    lr: PositiveFloat
    momentum: Decay
    nesterov: bool
    weight_decay: NonNegativeFloat
    num_newton_schulz_steps: PositiveInt
    rest: AdamW


class Sgd(Record):
    kind: Literal["sgd"]
    lr: PositiveFloat
    momentum: Decay
    weight_decay: NonNegativeFloat


class SignSgd(Record):
    """w ← w − lr · sign(gradient), without state."""

    kind: Literal["sign_sgd"]
    lr: PositiveFloat
    weight_decay: NonNegativeFloat


Optimizer = Annotated[AdamW | Muon | Sgd | SignSgd, Field(discriminator="kind")]


def has_state(optimizer: Optimizer) -> bool:
    return optimizer.kind != "sign_sgd" and not (
        optimizer.kind == "sgd" and optimizer.momentum == 0
    )


class ConstantSchedule(Record):
    kind: Literal["constant"]
    warmup_steps: NonNegativeInt


class LinearSchedule(Record):
    """Warm-up, then linear to `final_fraction` of the rate at the last step."""

    kind: Literal["linear"]
    warmup_steps: NonNegativeInt
    final_fraction: Probability


class CosineSchedule(Record):
    kind: Literal["cosine"]
    warmup_steps: NonNegativeInt
    final_fraction: Probability


class WsdSchedule(Record):
    """Warm-up, stable, then linear decay over the last `decay_steps`."""

    kind: Literal["wsd"]
    warmup_steps: NonNegativeInt
    decay_steps: NonNegativeInt
    final_fraction: Probability


Schedule = Annotated[
    ConstantSchedule | LinearSchedule | CosineSchedule | WsdSchedule, Field(discriminator="kind")
]


class DppoLoss(Record):
    """DPPO binary-TV mask with a squared-log-ratio penalty (`orrery.trainer.loss`)."""

    kind: Literal["dppo"]
    mask_low: Probability
    mask_high: Probability
    penalty: NonNegativeFloat


class Mismatch(Record):
    """Bounds on the difference between engines and trainer. Null: no bound.

    Beyond `warn_*` the run logs a warning. Beyond `stop_*` it ends.

    - `*_kl`: KL(engine || trainer) over a batch's trained tokens, stale tokens too (`mismatch_kl`).
    - `*_logprob_difference`: mean |difference of log-probs| over the same tokens of one engine.
    - `canary_logprob_difference`: the same over a fixed prompt, computed by every engine and the
      trainer after each update. Beyond the bound the run ends. Null: no canary.
    """

    warn_kl: Bound
    stop_kl: Bound
    warn_logprob_difference: Bound
    stop_logprob_difference: Bound
    canary_logprob_difference: Bound


class NoCheckpointing(Record):
    """Keep all activations. With `compile` cheap activations are recomputed nevertheless."""

    kind: Literal["none"]


class FullCheckpointing(Record):
    """Keep each block's input only. The block runs again in the backward pass."""

    kind: Literal["full"]


class SelectiveCheckpointing(Record):
    """Keep each block's input and the outputs in `keep`."""

    kind: Literal["selective"]
    keep: Annotated[
        tuple[Literal["attention", "projections", "experts"], ...],
        Field(min_length=1, strict=False),
    ]


class Memory(Record):
    """Trade compute or host memory for device memory in the trainer.

    - `activation_offload`: activations wait for the backward pass in pinned host memory.
    - `optimizer_offload`: optimizer state is in pinned host memory, and on the device for the step.
    - `lm_head_chunk_tokens`: rows of logits in memory. "auto" follows vocabulary and device.
    - `lm_head_keeps_logits`: keep a micro-batch's float32 logits for the backward pass.
    """

    activation_checkpointing: Annotated[
        NoCheckpointing | FullCheckpointing | SelectiveCheckpointing, Field(discriminator="kind")
    ]
    activation_offload: bool
    optimizer_offload: bool
    lm_head_chunk_tokens: PositiveInt | Literal["auto"]
    lm_head_keeps_logits: bool
    max_tokens_per_micro_batch: PositiveInt


class Lora(Record):
    """Low-rank adapters (arXiv 2106.09685): W + alpha / rank · B A, with W frozen.

    `targets`: projections of attention, dense feed-forwards (shared experts too), and routed
    experts (one pair each). The model must have them.
    """

    rank: PositiveInt
    alpha: PositiveFloat
    targets: Annotated[
        tuple[Literal["attention", "feed_forward", "experts"], ...],
        Field(min_length=1, strict=False),
    ]
    seed: NonNegativeInt


class Checkpoint(Record):
    """A checkpoint every `interval_steps`, in RL also at the end. The newest `keep` are kept.

    SFT ends with `weights/sft` instead.
    """

    interval_steps: PositiveInt
    keep: PositiveInt


Attention = Literal["auto", "fa2", "fa3", "fa4", "cudnn", "plain"]


class Trainer(Record):
    """The RL trainer. SFT shares mesh, precision and memory.

    `attention`: the kernel to prefer. `auto` takes the fastest that the device and the layout have.
    """

    mesh: Mesh
    fsdp: Fsdp
    param_dtype: DType
    compute_dtype: DType
    reduce_dtype: DType
    compile: bool
    attention: Attention
    memory: Memory
    lora: Lora | None
    optimizer: Optimizer
    schedule: Schedule
    max_grad_norm: PositiveFloat
    loss: DppoLoss
    mismatch: Mismatch
    checkpoint: Checkpoint

    @property
    def kept(self) -> tuple[str, ...]:
        return tuple(
            name
            for name in getattr(self.memory.activation_checkpointing, "keep", ())
            if name not in self.unseen
        )

    @property
    def unseen(self) -> tuple[str, ...]:
        """Return the outputs recomputed whatever `keep` says.

        Parts around an exchange between ranks are compiled. Compiled products have no names, unlike
        this project's operators for attention and experts.
        """
        return ("projections",) if self.compile and self.mesh.cp * self.mesh.ep > 1 else ()
