"""Define the trainer's fields."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from orrery.manifest.schema.model import (
    MAX_S,
    Bound,
    Count,
    Decay,
    DType,
    Model,
    NonNegativeInt,
    PositiveInt,
    Probability,
    Record,
    Size,
    Steps,
)

Seconds = Annotated[float, Field(gt=0.0, le=MAX_S)]
# Host bytes of float32 values per trained parameter in elastic training
OUTER_BYTES = 8  # weight at the start of a round (see `Elastic`), and outer momentum
HOST_BYTES = 12  # OUTER_BYTES, and the weight's change Δ
FEEDBACK_BYTES = 8  # codec errors of the last and current exchange


class Mesh(Record):
    """The trainer's device mesh of dp_replicate · dp_shard · cp ranks.

    - dp_shard · cp ranks shard the weights. A context-parallel (cp) group shards each document.
    - `ep`: ranks that share the experts. It divides dp_shard · cp.
    - `cp_style` "ulysses": an all-to-all exchanges tokens for heads. "ring": keys and values pass
      around a ring. "dsa": ranks gather latent attention's keys (`model.mla`). "ring" and "dsa"
      assign tokens to ranks in zig-zag order.
    - `ep_chunks`: number of chunks of a rank's tokens. With ep_backend "torch", ranks exchange a
      chunk while the experts compute another.
    - `deepep_num_sms`: streaming multiprocessors for DeepEP. Null: DeepEP's default.
    - `deepep_token_chunk_size`: maximum tokens of a rank per exchange. Null: all.
    """

    dp_replicate: Count
    dp_shard: Count
    cp: Count
    ep: Count
    cp_style: Literal["ulysses", "ring", "dsa"]
    ep_backend: Literal["torch", "deepep"]
    ep_chunks: Count
    deepep_num_sms: PositiveInt | None
    deepep_token_chunk_size: PositiveInt | None

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp

    @property
    def num_data_ranks(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def has_exchange(self) -> bool:
        return self.cp * self.ep > 1

    @property
    def sample_multiple(self) -> int:
        """Return n, if samples are padded to multiples of n tokens."""
        return 2 * self.cp if self.cp > 1 and self.cp_style != "ulysses" else 1

    def data_rank(self, rank: int) -> int:
        return rank // self.cp


class Fsdp(Record):
    """FSDP2's options.

    `reshard_after_forward`: free gathered weights until the backward pass.

    `reduce_gradients` "step": accumulate unsharded gradients, and reduce them once a step.
    "micro_batch": reduce gradients into shards after each micro-batch.

    `cpu_offload`: keep weights, gradients and optimizer state in host memory, and run the optimizer
    on the CPU.
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
    """Muon (Jordan et al. 2024) for matrices of transformer blocks, `rest` for other weights.

    Updates are scaled to the RMS of AdamW updates (arXiv 2502.16982), so one `lr` suits both.
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
    kind: Literal["linear"]
    warmup_steps: NonNegativeInt
    final_fraction: Probability


class CosineSchedule(Record):
    kind: Literal["cosine"]
    warmup_steps: NonNegativeInt
    final_fraction: Probability


class WsdSchedule(Record):
    """Warm-up, a constant rate, then linear decay over the last `decay_steps`."""

    kind: Literal["wsd"]
    warmup_steps: NonNegativeInt
    decay_steps: NonNegativeInt
    final_fraction: Probability


Schedule = Annotated[
    ConstantSchedule | LinearSchedule | CosineSchedule | WsdSchedule, Field(discriminator="kind")
]


class DppoLoss(Record):
    """DPPO's binary total-variation mask and a squared-log-ratio penalty (`trainer/loss.py`)."""

    kind: Literal["dppo"]
    mask_low: Probability
    mask_high: Probability
    penalty: NonNegativeFloat


class Mismatch(Record):
    """Bounds on differences between engine and trainer log-probs. Null: no bound.

    A run logs a warning above `warn_*`, and ends above `stop_*` or `canary_*`.

    - `*_kl`: KL(engine || trainer) over a batch's trained tokens, including stale tokens.
    - `*_logprob_difference`: mean |Δ log-prob| over these tokens, per engine.
    - `canary_logprob_difference`: this mean on a fixed prompt (the canary) after each weight
      update. Null: no canary.
    """

    warn_kl: Bound
    stop_kl: Bound
    warn_logprob_difference: Bound
    stop_logprob_difference: Bound
    canary_logprob_difference: Bound


class NoCheckpointing(Record):
    """Keep all activations. With `trainer.compile`, torch still recomputes cheap activations."""

    kind: Literal["none"]


class FullCheckpointing(Record):
    """Keep only each block's input."""

    kind: Literal["full"]


class SelectiveCheckpointing(Record):
    """Keep each block's input and the outputs that `keep` names."""

    kind: Literal["selective"]
    keep: Annotated[
        tuple[Literal["attention", "projections", "experts"], ...],
        Field(min_length=1, strict=False),
    ]


RecomputedModule = Literal["norms", "attention_projections", "router", "experts_activation"]


class ModuleCheckpointing(Record):
    """Recompute `modules` in the backward pass. Keep all other activations.

    "attention_projections": queries, keys and values, with their norms and rotary embedding.
    "router": logits and scores of experts. "experts_activation": SwiGLU of routed experts.
    """

    kind: Literal["modules"]
    modules: Annotated[tuple[RecomputedModule, ...], Field(min_length=1, strict=False)]


class Memory(Record):
    """Options that save device memory, but cost computation or host memory.

    - `activation_checkpointing_every` n: recompute only in blocks 0, n, 2·n, …
    - `activation_offload`: keep activations in pinned host memory until the backward pass.
    - `activation_offload_max_in_flight`: maximum blocks with unfinished copies to the host.
    - `optimizer_offload`: keep optimizer state in pinned host memory, except a share
      `optimizer_offload_resident`.
    - `lm_head_chunk_tokens`: maximum tokens with logits in memory.
    - `lm_head_keeps_logits`: keep a micro-batch's float32 logits for the backward pass.
    """

    activation_checkpointing: Annotated[
        NoCheckpointing | FullCheckpointing | SelectiveCheckpointing | ModuleCheckpointing,
        Field(discriminator="kind"),
    ]
    activation_checkpointing_every: PositiveInt
    activation_offload: bool
    activation_offload_max_in_flight: PositiveInt
    optimizer_offload: bool
    optimizer_offload_resident: Probability
    lm_head_chunk_tokens: PositiveInt | Literal["auto"]
    lm_head_keeps_logits: bool
    max_tokens_per_micro_batch: PositiveInt

    @property
    def recomputes_blocks(self) -> bool:
        return self.activation_checkpointing.kind in ("full", "selective")

    def checkpoints(self, block: int) -> bool:
        return self.recomputes_blocks and block % self.activation_checkpointing_every == 0

    def recomputed_modules(self, block: int) -> tuple[str, ...]:
        is_on = block % self.activation_checkpointing_every == 0
        return getattr(self.activation_checkpointing, "modules", ()) if is_on else ()


class Lora(Record):
    """Low-rank adapters (arXiv 2106.09685): W + alpha / rank · B A, with frozen W.

    `targets`: adapted projections. "feed_forward" includes shared experts. "experts" has a pair
    A, B per routed expert.
    """

    rank: PositiveInt
    alpha: PositiveFloat
    targets: Annotated[
        tuple[Literal["attention", "feed_forward", "experts"], ...],
        Field(min_length=1, strict=False),
    ]
    seed: NonNegativeInt


class Checkpoint(Record):
    """Save a checkpoint every `interval_steps`, and keep the newest `keep`.

    After its last step, RL saves a checkpoint, and SFT writes `weights/sft`.
    """

    interval_steps: PositiveInt
    keep: PositiveInt


class OuterSgd(Record):
    """The outer optimizer: SGD with the sites' mean Δ (see `Elastic`) as gradient.

    DiLoCo (arXiv 2311.08105) uses lr 0.7, momentum 0.9 and Nesterov momentum.
    """

    lr: PositiveFloat
    momentum: Decay
    nesterov: bool


class Snapshots(Record):
    """Copies of a site's state in shared memory, from which other sites recover.

    `block_bytes`: size of a hashed block.
    """

    keep: Count
    block_bytes: Size


class Elastic(Record):
    """Training of one model at several sites, each with this manifest's mesh.

    - Training starts once `min_sites` have joined.
    - A round has `inner_steps` optimizer steps. Then sites exchange Δ = weights at the round's
      start − current weights, encoded by `codec`. `error_feedback` adds codec errors to the next Δ.
    - `weights` "tokens": weight Δ by the site's tokens since the last exchange.
    - `admission` "closed": sites join only before the first round.
    - An exchange starts when all live sites have arrived, or `grace_s` after `quorum` sites have.
      A late site adds its Δ to the next round.
    - A site sends a heartbeat every `heartbeat_s` / 2. It is dead after `dead_after_s` without one.
    - `voters`: maximum sites that run etcd, which stores the log of rounds.
    - `fragments` F: layer i is in fragment i mod F. Sites exchange the next fragment every
      `inner_steps` / F steps (Streaming DiLoCo, arXiv 2501.18512).
    - `delay_steps`: training steps during an exchange. Then the fragment's weights become
      `delay_merge` · local + (1 − `delay_merge`) · common weights.
    """

    min_sites: Count
    max_sites: Count
    inner_steps: Steps
    fragments: Count
    delay_steps: NonNegativeInt
    delay_merge: Decay
    outer: OuterSgd
    codec: Literal["float32", "int8_block", "int8_codebook", "int4_block", "top_k_2bit"]
    error_feedback: bool
    topology: Literal["ring", "all_to_all"]
    weights: Literal["tokens", "equal"]
    admission: Literal["open", "closed"]
    quorum: Count
    voters: Count
    grace_s: Seconds
    heartbeat_s: Seconds
    dead_after_s: Seconds
    store_timeout_s: Seconds
    exchange_timeout_s: Seconds
    snapshots: Snapshots


def host_bytes(elastic: Elastic, num_parameters: int, inner_bytes: int) -> int:
    """Return a rank's host bytes for rounds and snapshots of `num_parameters` trained weights."""
    sent = 4 * num_parameters // elastic.fragments if elastic.delay_steps else 0
    held = HOST_BYTES + FEEDBACK_BYTES * elastic.error_feedback
    snapshots = (elastic.snapshots.keep + 1) * snapshot_bytes(num_parameters, inner_bytes)
    return held * num_parameters + sent + snapshots


def snapshot_bytes(num_parameters: int, inner_bytes: int) -> int:
    return OUTER_BYTES * num_parameters + inner_bytes


Attention = Literal["auto", "fa2", "fa3", "fa4", "cudnn", "plain"]


class Trainer(Record):
    """The RL trainer. SFT has the same mesh, precisions and memory.

    - `attention` "auto": the fastest kernel for the device and the tensors.
    - `indexer` "train": sparse attention's indexers learn to predict their layer's attention
      (`kernels/sparse_index_loss.py`).
    - `indexer_choice` "own": attend to keys that the trainer's indexers choose. "replay": attend to
      the engines' choice. "compare": as "own", and count differences from the engines' choice.
    - `expert_bias_rate`: step size of router biases towards an equal load of experts
      (`trainer/learner.py`). Null: frozen biases.
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
    indexer: Literal["frozen", "train"]
    indexer_choice: Literal["own", "compare", "replay"]
    expert_bias_rate: PositiveFloat | None
    optimizer: Optimizer
    schedule: Schedule
    max_grad_norm: PositiveFloat
    loss: DppoLoss
    mismatch: Mismatch
    checkpoint: Checkpoint
    elastic: Elastic | None

    @property
    def needs_fsdp(self) -> bool:
        by_unit = self.param_dtype != self.compute_dtype and self.fsdp.reshard_after_forward
        return self.mesh.world_size > 1 or by_unit or self.fsdp.cpu_offload

    @property
    def has_compute_copies(self) -> bool:
        return not self.needs_fsdp and self.param_dtype != self.compute_dtype

    def is_one_graph(self, model: Model) -> bool:
        return self.compile and not self.mesh.has_exchange and model.family != "hugging_face"

    @property
    def kept(self) -> tuple[str, ...]:
        return tuple(getattr(self.memory.activation_checkpointing, "keep", ()))
