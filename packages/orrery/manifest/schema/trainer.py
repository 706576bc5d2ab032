"""The trainer: mesh, memory, optimizer, schedule and loss."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from orrery.manifest.schema.model import Model, head_divisors
from orrery.manifest.schema.record import (
    MAX_COUNT,
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

    @model_validator(mode="after")
    def ranks_can_be_planned(self) -> "Mesh":
        if self.world_size > MAX_COUNT:
            raise ValueError(
                f"dp_replicate·dp_shard·cp = {self.world_size}: a trainer has at most {MAX_COUNT} "
                "ranks; set them to less"
            )
        return self

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

    @model_validator(mode="after")
    def warnings_come_first(self) -> "Mismatch":
        for name in ("kl", "logprob_difference"):
            warn, stop = getattr(self, f"warn_{name}"), getattr(self, f"stop_{name}")
            if warn is not None and stop is not None and warn > stop:
                raise ValueError(
                    f"warn_{name} {warn:g} exceeds stop_{name} {stop:g}: the run would end before "
                    "it warns; set it to at most that"
                )
        return self


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


class Trainer(Record):
    """The RL trainer. SFT shares mesh, precision and memory."""

    mesh: Mesh
    fsdp: Fsdp
    param_dtype: DType
    compute_dtype: DType
    reduce_dtype: DType
    compile: bool
    memory: Memory
    lora: Lora | None
    optimizer: Optimizer
    schedule: Schedule
    max_grad_norm: PositiveFloat
    loss: DppoLoss
    mismatch: Mismatch
    checkpoint: Checkpoint

    @model_validator(mode="after")
    def weights_take_in_small_steps(self) -> "Trainer":
        if self.param_dtype == "bfloat16":
            raise ValueError(
                "param_dtype 'bfloat16': a step below 1/512 of a weight is rounded away, and at a "
                "learning rate of 1e-6 no weight moves; set trainer.param_dtype to 'float32' "
                "(frozen weights beside trainer.lora are held in trainer.compute_dtype)"
            )
        return self

    @model_validator(mode="after")
    def optimizer_state_is_moved_once(self) -> "Trainer":
        if self.memory.optimizer_offload and self.fsdp.cpu_offload:
            raise ValueError(
                "memory.optimizer_offload with fsdp.cpu_offload: the state lives in host memory "
                "already; set trainer.memory.optimizer_offload to false"
            )
        return self

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


def _fit_adapters(lora: Lora | None, model: Model) -> None:
    if lora is None:
        return
    if model.family == "hugging_face":
        raise ValueError(
            "trainer.lora: adapters need a network of this project's own; set trainer.lora to "
            "null, or choose another model.family"
        )
    moe = model.moe
    parts = {
        "attention": True,
        "feed_forward": moe is None or moe.num_dense_layers > 0 or moe.num_shared_experts > 0,
        "experts": moe is not None and moe.num_dense_layers < model.num_layers,
    }
    has = [part for part, is_there in parts.items() if is_there]
    if lacking := [target for target in lora.targets if target not in has]:
        raise ValueError(
            f"trainer.lora.targets {lacking}: family {model.family!r} with these layers has none; "
            f"choose from {has}"
        )


def context_misfits(mesh: Mesh, model: Model, devices: int) -> Iterator[str]:
    """Yield why the mesh cannot divide one context, with possible cp·dp_shard."""
    sharded = (
        mesh.dp_shard * mesh.cp if devices % mesh.dp_replicate else devices // mesh.dp_replicate
    )
    if mesh.cp > 1 and model.family == "hugging_face":
        yield (
            f"trainer.mesh.cp {mesh.cp}: attention of family 'hugging_face' cannot be spread; "
            f"set trainer.mesh.cp to 1 and dp_shard to {sharded}"
        )
    elif (
        mesh.cp > 1
        and mesh.cp_style == "ulysses"
        and mesh.cp not in (heads := head_divisors(model))
    ):
        fits = ", ".join(f"{cp}·{sharded // cp}" for cp in heads if sharded % cp == 0)
        yield (
            f"trainer.mesh.cp {mesh.cp}: {model.num_heads} query heads and {model.num_kv_heads} "
            f"key heads do not divide among as many ranks; choose cp·dp_shard from {fits}"
            + ("" if sharded % mesh.cp else ", or set trainer.mesh.cp_style to 'ring'")
        )


def _experts_misfits(trainer: Trainer, model: Model, accelerator: str) -> Iterator[str]:
    mesh = trainer.mesh
    if mesh.ep == 1:
        return
    if model.moe is None:
        yield (
            f"trainer.mesh.ep {mesh.ep}: family {model.family!r} has no experts to spread; "
            "set trainer.mesh.ep to 1"
        )
        return
    sharded, experts = mesh.dp_shard * mesh.cp, model.moe.num_experts
    fits = [n for n in range(1, sharded + 1) if sharded % n == 0 and experts % n == 0]
    if mesh.ep not in fits:
        whole = f"dp_shard·cp = {sharded}" if sharded % mesh.ep else f"{experts} experts"
        yield f"trainer.mesh.ep {mesh.ep} does not divide {whole}; choose from {fits}"
    if mesh.ep_backend == "deepep" and (
        accelerator == "cpu" or trainer.compute_dtype != "bfloat16"
    ):
        yield (
            "trainer.mesh.ep_backend 'deepep' moves bfloat16 between GPUs and nothing else; "
            "set trainer.mesh.ep_backend to 'torch', or trainer.compute_dtype to 'bfloat16' on GPUs"
        )


def fit_model(trainer: Trainer, model: Model, accelerator: str, devices: int) -> None:
    """Raise ValueError, with fitting meshes, if the model misfits `trainer`."""
    _fit_adapters(trainer.lora, model)
    if misfits := [
        *context_misfits(trainer.mesh, model, devices),
        *_experts_misfits(trainer, model, accelerator),
    ]:
        raise ValueError("; ".join(misfits))
