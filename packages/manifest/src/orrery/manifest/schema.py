"""The manifest: everything that determines a run's result, and nothing else.

- Every field is required and no field has a default: a default here would be a value that nobody reviewed.
- Frozen, and extra fields are errors: a misspelt field never passes.
- Laws between fields that Jsonnet also asserts are checked again here, since a manifest may reach us from any hand.
- Placement (hosts, partitions, mounts, ports, log levels) belongs to a site, not to a manifest.

Quantities carry their unit in the name: `_s`, `_bytes`, `_tokens`, `_steps`, `num_`.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, model_validator

SCHEMA_VERSION = 2
FP8_BLOCK = 128  # rows, and columns, of weights in FP8 that have one scale
DISK_PAGE_BYTES = 4096
SEGMENT_BYTES = 16 << 20  # the least that Mooncake takes of a worker
KV_BLOCK_TOKENS = {
    "cpu": 32,
    "h200": 16,
}  # vLLM's attention takes blocks of cache of a multiple of that
TARGETS = (
    "init",
    "sft",
    "rl",
    "evaluate",
    "report",
    "all",
)  # rules of the pipeline, which share one namespace with runs

MAX_INT = 2**53  # beyond that Jsonnet's numbers are no longer exact
MAX_COUNT = 2**16  # of ranks and devices (a plan has a process for each), layers, heads and experts
MAX_STEPS = 10**9
MAX_S = 365 * 86_400  # the longest deadline: clocks and sockets overflow after some years
MAX_SIZE = 2**24  # the largest width or length in a network

PositiveInt = Annotated[int, Field(gt=0, le=MAX_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_INT)]
Count = Annotated[int, Field(gt=0, le=MAX_COUNT)]
Steps = Annotated[int, Field(gt=0, le=MAX_STEPS)]
Size = Annotated[int, Field(gt=0, le=MAX_SIZE)]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Bound = PositiveFloat | None
Decay = Annotated[
    float, Field(ge=0.0, lt=1.0)
]  # of a moving average, which at 1 takes in nothing new
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
DType = Literal["float32", "bfloat16"]
ATTENTION: dict[str, dict[str, tuple[Any, ...]]] = {  # what a family's attention can be
    "qwen3": {
        "rotary_fraction": (1.0,),
        "rope_scaling": (None,),
        "attention_bias": (False,),
        "qk_norm": (True,),
    },
    "qwen3_moe": {
        "rotary_fraction": (1.0,),
        "rope_scaling": (None,),
        "attention_bias": (False,),
        "qk_norm": (True,),
    },
    "llama": {"rotary_fraction": (1.0,), "attention_bias": (False,), "qk_norm": (False,)},
    "glm4_moe": {"rope_scaling": (None,)},
}
QWEN3_MOE = {
    "num_dense_layers": 0,
    "num_shared_experts": 0,
    "score": "softmax",
    "routed_scale": 1.0,
}  # its only experts


class Record(BaseModel):
    """A manifest object: frozen, strict about types, closed to unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


# Model --------------------------------------------------------------------------------------------------------------


class RandomInit(Record):
    """Weights drawn at `init`: normal with `std`, norms one."""

    kind: Literal["random"]
    seed: NonNegativeInt
    std: PositiveFloat


class PretrainedInit(Record):
    """Weights of a Hugging Face checkpoint on disk.

    `sha256` is that of `model.safetensors`; of weights in several files, the ones that the index lists, it is what
    `sha256sum model-*.safetensors | sha256sum` gives.
    """

    kind: Literal["pretrained"]
    path: str
    revision: str
    sha256: Sha256


class CharacterTokenizer(Record):
    """One token a character of `alphabet`, after the special tokens of the chat format."""

    kind: Literal["characters"]
    alphabet: str


class PretrainedTokenizer(Record):
    """The tokenizer files that stand beside the pretrained weights.

    `sha256` is what `sha256sum` of `chat_template.jinja`, `generation_config.json`, `special_tokens_map.json`, `tokenizer.json` and
    `tokenizer_config.json`, in this order and as far as they are there, gives through another `sha256sum`.
    """

    kind: Literal["pretrained"]
    path: str
    sha256: Sha256


class MoE(Record):
    """Mixture-of-experts feed-forward of every layer but the first `num_dense_layers`.

    - `score` turns router logits into weights of experts; with "sigmoid" a bias of each expert takes part in the choice, not in the weight.
    - `routed_scale` multiplies what the routed experts add; the shared experts serve every token, unscaled.
    """

    num_experts: Count
    num_experts_per_token: Count
    expert_intermediate_size: Size
    normalize_top_k: bool
    num_dense_layers: NonNegativeInt
    num_shared_experts: NonNegativeInt
    score: Literal["softmax", "sigmoid"]
    routed_scale: PositiveFloat

    @model_validator(mode="after")
    def a_token_has_its_experts(self) -> "MoE":
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"num_experts_per_token {self.num_experts_per_token} exceeds num_experts {self.num_experts}; set it to at most that"
            )
        return self


class Llama3RopeScaling(Record):
    """Llama 3.1's stretching of slow rotary frequencies (Grattafiori et al. 2024, arXiv 2407.21783; transformers' rope_type "llama3")."""

    kind: Literal["llama3"]
    factor: PositiveFloat
    low_frequency_factor: PositiveFloat
    high_frequency_factor: PositiveFloat
    original_max_positions: PositiveInt


class Indexer(Record):
    """DeepSeek sparse attention (DSA): the indexer scores earlier tokens, and a query attends to the `top_k` best of them."""

    num_heads: PositiveInt
    head_dim: PositiveInt
    top_k: PositiveInt


class MLA(Record):
    """Multi-head latent attention: queries, and keys with values, go through low ranks; `rope_head_dim` of a head turn with position."""

    q_lora_rank: PositiveInt
    kv_lora_rank: PositiveInt
    nope_head_dim: PositiveInt
    rope_head_dim: PositiveInt
    value_head_dim: PositiveInt
    indexer: Indexer


class Model(Record):
    """Architecture in this project's names; `orrery.models` maps it to and from a Hugging Face `config.json`.

    - `head_dim` is that of queries and keys; `rotary_fraction` of it turns with position.
    - `glm5` is GLM-5, which transformers calls `glm_moe_dsa`; `glm4_moe` is GLM-4.5.
    - `hugging_face` is any causal language model of transformers, built from `hf_config`, the content of its `config.json`.
    """

    family: Literal["qwen3", "qwen3_moe", "llama", "glm4_moe", "glm5", "hugging_face"]
    init: Annotated[RandomInit | PretrainedInit, Field(discriminator="kind")]
    tokenizer: Annotated[CharacterTokenizer | PretrainedTokenizer, Field(discriminator="kind")]
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_layers: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Size
    max_positions: Size
    rope_theta: PositiveFloat
    rotary_fraction: Annotated[float, Field(gt=0.0, le=1.0)]
    rope_scaling: Llama3RopeScaling | None
    rms_norm_eps: PositiveFloat
    attention_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    moe: MoE | None
    mla: MLA | None
    hf_config: dict[str, Any] | None

    @model_validator(mode="after")
    def heads_divide_and_turn(self) -> "Model":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if (mla := self.mla) is not None and self.head_dim != mla.nope_head_dim + mla.rope_head_dim:
            raise ValueError(
                f"head_dim {self.head_dim} is not mla.nope_head_dim {mla.nope_head_dim} + mla.rope_head_dim {mla.rope_head_dim}"
            )
        if self.family == "hugging_face":
            return self
        field, turning = "head_dim · rotary_fraction", int(self.head_dim * self.rotary_fraction)
        if mla is not None:
            field, turning = "mla.rope_head_dim", mla.rope_head_dim
        if turning % 2:
            raise ValueError(
                f"{field} {turning} is odd, and numbers turn with position in pairs; try {turning + 1}"
            )
        return self

    @model_validator(mode="after")
    def family_has_its_parts(self) -> "Model":
        has = {
            "moe": ("qwen3_moe", "glm4_moe", "glm5"),
            "mla": ("glm5",),
            "hf_config": ("hugging_face",),
        }
        for part, families in has.items():
            value = getattr(self, part)
            if (value is not None) != (self.family in families):
                raise ValueError(
                    f"family {self.family!r} and {part} {'null' if value is None else 'set'} do not go together"
                )
        for field, only in ATTENTION.get(self.family, {}).items():
            if (value := getattr(self, field)) not in only:
                raise ValueError(
                    f"{field} {value!r}: family {self.family!r} has {' or '.join(map(repr, only))} only"
                )
        if self.family == "qwen3_moe" and self.moe is not None:
            for field, fixed in QWEN3_MOE.items():
                if (value := getattr(self.moe, field)) != fixed:
                    raise ValueError(
                        f"moe.{field} {value!r}: family 'qwen3_moe' has {fixed!r} only"
                    )
        return self


# Hardware -----------------------------------------------------------------------------------------------------------


class Hardware(Record):
    """The shape of the machine: it changes results (reduction orders), so it is part of the identity."""

    accelerator: Literal["cpu", "h200"]
    num_nodes: Count
    devices_per_node: Count


# Trainer ------------------------------------------------------------------------------------------------------------


class Mesh(Record):
    """Ranks = dp_replicate · dp_shard · cp; expert parallel borrows from dp_shard · cp.

    - Weights are sharded over dp_shard · cp ranks and repeated over dp_replicate. The ranks of one cp group share their documents.
    - `cp_style`: "ulysses" trades sequence for heads in an all-to-all, "ring" passes keys and values around in zig-zag order.
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
                f"dp_replicate·dp_shard·cp = {self.world_size}: a trainer has at most {MAX_COUNT} ranks; set them to less"
            )
        return self

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp

    @property
    def num_data_ranks(self) -> int:
        """Groups of ranks that have documents of their own."""
        return self.dp_replicate * self.dp_shard

    def data_rank(self, rank: int) -> int:
        """The group of trainer rank `rank`: the ranks of one cp group are neighbours."""
        return rank // self.cp


def _heads_divide_among(model: Model) -> list[int]:
    """Numbers of ranks, each with as many query heads and with key heads of its own or one that it shares."""
    heads, groups = model.num_heads, model.num_kv_heads
    return [
        n for n in range(1, heads + 1) if heads % n == 0 and (groups % n == 0 or n % groups == 0)
    ]


class Fsdp(Record):
    """FSDP2.

    - `reshard_after_forward`: whole weights are freed between forward and backward, and gathered again.
    - `reduce_gradients`: "step" once a step, which keeps whole gradients of all micro-batches; "micro_batch" after each, sharded.
    - `cpu_offload`: weights, gradients and optimizer state live in host memory, and the optimizer steps there.
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
    """Muon for the matrices of the blocks (Jordan et al. 2024), `rest` for all else.

    An update is scaled to the root mean square of AdamW's, as in arXiv 2502.16982, so that one learning rate suits both.
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
    """w ← w − lr · sign(gradient): no state at all."""

    kind: Literal["sign_sgd"]
    lr: PositiveFloat
    weight_decay: NonNegativeFloat


Optimizer = Annotated[AdamW | Muon | Sgd | SignSgd, Field(discriminator="kind")]


def _has_state(optimizer: Optimizer) -> bool:
    """Whether it keeps anything from step to step."""
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
    """DPPO binary-TV mask with a squared-log-ratio penalty; `orrery.trainer.loss` has the formula."""

    kind: Literal["dppo"]
    mask_low: Probability
    mask_high: Probability
    penalty: NonNegativeFloat


class Mismatch(Record):
    """Bounds on the difference of engines and trainer. Null: no bound.

    Beyond `warn_*` the run logs a warning; beyond `stop_*` it ends.

    - `*_kl`: KL(engine || trainer) over a batch's trained tokens, stale ones too (`mismatch_kl` of a step's row).
    - `*_logprob_difference`: mean |difference of log-probs| over the trained tokens of one engine
      in a batch, stale ones too.
    - `canary_logprob_difference`: the same over a fixed prompt. After each update every engine
      computes it, and the trainer with the same weights (`orrery.orchestrator.engines.update`). Beyond the
      bound the run ends. Null: engines are not asked.
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
                    f"warn_{name} {warn:g} exceeds stop_{name} {stop:g}: the run would end before it warns; set it to at most that"
                )
        return self


class NoCheckpointing(Record):
    """Whatever the backward pass needs stays; with `compile` what is cheap is made again all the same."""

    kind: Literal["none"]


class FullCheckpointing(Record):
    """Only each block's input stays; the block runs again in the backward pass."""

    kind: Literal["full"]


class SelectiveCheckpointing(Record):
    """Each block's input stays and what `keep` names: outputs of attention, of dense projections, of grouped expert products."""

    kind: Literal["selective"]
    keep: Annotated[
        tuple[Literal["attention", "projections", "experts"], ...],
        Field(min_length=1, strict=False),
    ]


class Memory(Record):
    """What trades compute or host memory for device memory in the trainer.

    - `activation_offload`: what blocks keep for the backward pass waits in pinned host memory.
    - `optimizer_offload`: optimizer state lives in pinned host memory and visits the device during the step.
    - `lm_head_chunk_tokens`: rows of logits that exist at a time; "auto" follows vocabulary and device. `lm_head_keeps_logits`: float32
      logits of a whole micro-batch stay for the backward pass, which else makes them again.
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
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): W + alpha / rank · B A; the weights themselves are frozen.

    `targets`: projections of attention, dense feed-forwards (shared experts too), routed experts (a pair an expert); the model has each.
    """

    rank: PositiveInt
    alpha: PositiveFloat
    targets: Annotated[
        tuple[Literal["attention", "feed_forward", "experts"], ...],
        Field(min_length=1, strict=False),
    ]
    seed: NonNegativeInt


class Checkpoint(Record):
    """A checkpoint every `interval_steps`, and in RL at the end too; the newest `keep` stay. SFT ends with `weights/sft` instead."""

    interval_steps: PositiveInt
    keep: PositiveInt


class Trainer(Record):
    """How batches become the next weights in the RL stage; SFT shares mesh, precision and memory."""

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
                "param_dtype 'bfloat16': a step below 1/512 of a weight is rounded away, and at a learning rate of 1e-6 no weight "
                "moves; set trainer.param_dtype to 'float32' (frozen weights beside trainer.lora are held in trainer.compute_dtype)"
            )
        return self

    @model_validator(mode="after")
    def optimizer_state_is_moved_once(self) -> "Trainer":
        if self.memory.optimizer_offload and self.fsdp.cpu_offload:
            raise ValueError(
                "memory.optimizer_offload with fsdp.cpu_offload: the state lives in host memory already; "
                "set trainer.memory.optimizer_offload to false"
            )
        return self

    @property
    def kept(self) -> tuple[str, ...]:
        """What stays of a block, beside its input, of what selective checkpointing is to keep."""
        return tuple(
            name
            for name in getattr(self.memory.activation_checkpointing, "keep", ())
            if name not in self.unseen
        )

    @property
    def unseen(self) -> tuple[str, ...]:
        """What checkpointing cannot name, and so makes again whatever `keep` says.

        Where ranks exchange inside a block, what stands around the exchange is compiled, and the products that the compiler calls by
        itself have no names. Attention and experts are our own operators, which it calls by name.
        """
        return ("projections",) if self.compile and self.mesh.cp * self.mesh.ep > 1 else ()


def _fit_adapters(lora: Lora | None, model: Model) -> None:
    if lora is None:
        return
    if model.family == "hugging_face":
        raise ValueError(
            "trainer.lora: adapters need a network of this project's own; set trainer.lora to null, or choose another model.family"
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
            f"trainer.lora.targets {lacking}: family {model.family!r} with these layers has none; choose from {has}"
        )


def context_misfits(mesh: Mesh, model: Model, devices: int) -> Iterator[str]:
    """Why one context cannot be divided as `mesh` says, with each cp, and its dp_shard, that can be had of the trainer's `devices`."""
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
        and mesh.cp not in (heads := _heads_divide_among(model))
    ):
        fits = ", ".join(f"{cp}·{sharded // cp}" for cp in heads if sharded % cp == 0)
        yield (
            f"trainer.mesh.cp {mesh.cp}: {model.num_heads} query heads and {model.num_kv_heads} key heads do not divide among as many "
            f"ranks; choose cp·dp_shard from {fits}"
            + ("" if sharded % mesh.cp else ", or set trainer.mesh.cp_style to 'ring'")
        )


def _experts_misfits(trainer: Trainer, model: Model, accelerator: str) -> Iterator[str]:
    mesh = trainer.mesh
    if mesh.ep == 1:
        return
    if model.moe is None:
        yield f"trainer.mesh.ep {mesh.ep}: family {model.family!r} has no experts to spread; set trainer.mesh.ep to 1"
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
    """Raises `ValueError` where the network has not what is to be adapted, or cannot be divided as `trainer.mesh` says on the trainer's
    `devices`, naming what can."""
    _fit_adapters(trainer.lora, model)
    if misfits := [
        *context_misfits(trainer.mesh, model, devices),
        *_experts_misfits(trainer, model, accelerator),
    ]:
        raise ValueError("; ".join(misfits))


# Inference ----------------------------------------------------------------------------------------------------------


class NoRouter(Record):
    """The orchestrator speaks to the one engine itself."""

    kind: Literal["none"]


class VllmRouter(Record):
    """`vllm-router` before the replicas; thresholds are its cache-aware policy's, and null with any other.

    "consistent_hash" and "sticky_least_loaded" keep a rollout's turns on one engine by its name; "cache_aware" by what they share.
    """

    kind: Literal["vllm_router"]
    policy: Literal[
        "cache_aware", "power_of_two", "round_robin", "consistent_hash", "sticky_least_loaded"
    ]
    balance_abs_threshold: PositiveInt | None
    balance_rel_threshold: Annotated[float, Field(ge=1.0)] | None

    @model_validator(mode="after")
    def thresholds_are_read(self) -> "VllmRouter":
        for name in ("balance_abs_threshold", "balance_rel_threshold"):
            value = getattr(self, name)
            if self.policy == "cache_aware" and value is None:
                raise ValueError(
                    f"{name} is null: policy 'cache_aware' reads it; set it to a number"
                )
            if self.policy != "cache_aware" and value is not None:
                raise ValueError(
                    f"{name} {value}: policy '{self.policy}' reads none; set it to null, or policy to 'cache_aware'"
                )
        return self


class NoKvTransfer(Record):
    """Every engine serves whole requests."""

    kind: Literal["none"]


class NixlKvTransfer(Record):
    """Prefill engines hand caches to decode engines through NIXL (UCX: RDMA, shared memory or TCP, whichever there is)."""

    kind: Literal["nixl"]


class MooncakeKvTransfer(Record):
    """Prefill engines hand caches to decode engines through Mooncake's transfer engine."""

    kind: Literal["mooncake"]
    protocol: Literal["tcp", "rdma"]


KvTransfer = Annotated[
    NoKvTransfer | NixlKvTransfer | MooncakeKvTransfer, Field(discriminator="kind")
]


class NoKvOffload(Record):
    """Blocks of cache that leave the device are gone."""

    kind: Literal["none"]


class TieredKvOffload(Record):
    """Blocks go on in host memory, `host_bytes` for each of an engine's data-parallel ranks (of all its tensor-parallel devices together),
    and in files on the node's scratch disk, `disk_bytes` for each rank too, which a restarted engine finds again; with 0 in none."""

    kind: Literal["tiers"]
    host_bytes: PositiveInt
    disk_bytes: NonNegativeInt


class MooncakeKvOffload(Record):
    """Blocks go into a Mooncake Store that all engines share: `segment_bytes` of host memory of every engine, which its devices divide
    evenly, and besides a buffer of a gigabyte at most a device; one master a stage."""

    kind: Literal["mooncake"]
    protocol: Literal["tcp", "rdma"]
    segment_bytes: PositiveInt


KvOffload = Annotated[
    NoKvOffload | TieredKvOffload | MooncakeKvOffload, Field(discriminator="kind")
]


class Inference(Record):
    """The engines: `num_replicas` independent vLLM servers, of which the first `prefill_replicas` prefill and the others decode.

    - With 0 prefill replicas every engine serves whole requests.
    - A replica is `data_parallel` · `tensor_parallel` devices: attention is spread over requests and over heads. With `expert_parallel`
      whole experts are spread over all of them, else every expert is cut over all of them.
    - `quantization` "fp8": engines hold weights of dense layers and experts in FP8, made from what the trainer publishes.
    - `max_restarts`: an engine that ends is started again, and updated before it serves, so often within a day; one more ends the stage.
    """

    num_replicas: Count
    prefill_replicas: NonNegativeInt
    tensor_parallel: Count
    data_parallel: Count
    expert_parallel: bool
    dtype: DType
    quantization: Literal["none", "fp8"]
    max_model_len_tokens: PositiveInt
    kv_block_tokens: PositiveInt
    kv_cache_bytes: PositiveInt
    max_num_sequences: PositiveInt
    max_batched_tokens: PositiveInt
    enforce_eager: bool
    kv_transfer: KvTransfer
    kv_offload: KvOffload
    max_restarts: NonNegativeInt
    router: Annotated[NoRouter | VllmRouter, Field(discriminator="kind")]

    @property
    def devices_per_replica(self) -> int:
        return self.data_parallel * self.tensor_parallel

    @model_validator(mode="after")
    def engines_can_be_planned(self) -> "Inference":
        if (devices := self.num_replicas * self.devices_per_replica) > MAX_COUNT:
            raise ValueError(
                f"num_replicas·data_parallel·tensor_parallel = {devices}: engines have at most {MAX_COUNT} devices together; "
                f"set them to less"
            )
        return self

    @model_validator(mode="after")
    def replicas_have_a_router(self) -> "Inference":
        if self.num_replicas > 1 and self.router.kind == "none" and not self.prefill_replicas:
            raise ValueError(
                f"num_replicas {self.num_replicas} needs a router; set inference.router.kind to 'vllm_router'"
            )
        return self

    @model_validator(mode="after")
    def one_decides_where_a_request_goes(self) -> "Inference":
        if self.prefill_replicas and self.router.kind != "none":
            raise ValueError(
                f"router {self.router.kind!r} with prefill_replicas {self.prefill_replicas}: where prefill is apart the orchestrator takes "
                f"each request to its two engines itself; set inference.router.kind to 'none', or inference.prefill_replicas to 0"
            )
        return self

    @model_validator(mode="after")
    def somebody_decodes(self) -> "Inference":
        if self.prefill_replicas >= self.num_replicas:
            raise ValueError(
                f"prefill_replicas {self.prefill_replicas} of num_replicas {self.num_replicas} leave none to decode; "
                f"choose from 0 to {self.num_replicas - 1}"
            )
        return self

    @model_validator(mode="after")
    def caches_travel_where_prefill_is_apart(self) -> "Inference":
        if self.prefill_replicas and self.kv_transfer.kind == "none":
            raise ValueError(
                f"prefill_replicas {self.prefill_replicas} need caches to travel; set inference.kv_transfer.kind to 'nixl' or 'mooncake', "
                f"or inference.prefill_replicas to 0"
            )
        if not self.prefill_replicas and self.kv_transfer.kind != "none":
            raise ValueError(
                f"kv_transfer {self.kv_transfer.kind!r} without engines that only prefill; set inference.prefill_replicas, "
                f"or inference.kv_transfer.kind to 'none'"
            )
        return self


def _cache_block_bytes(model: Model, inference: Inference) -> int:
    """One block of cache on one device."""
    if (
        (mla := model.mla) is None
    ):  # keys and values of the device's heads, else a latent, its turning part and the indexer's key
        numbers = 2 * max(1, model.num_kv_heads // inference.tensor_parallel) * model.head_dim
    else:
        numbers = mla.kv_lora_rank + mla.rope_head_dim + mla.indexer.head_dim
    return (
        inference.kv_block_tokens
        * model.num_layers
        * numbers
        * {"float32": 4, "bfloat16": 2}[inference.dtype]
    )


def _longest_cache_blocks(inference: Inference) -> int:
    """Whole blocks of one sequence of `max_model_len_tokens`."""
    return -(-inference.max_model_len_tokens // inference.kv_block_tokens)


def _longest_cache_bytes(model: Model, inference: Inference) -> int:
    """Cache of one sequence of `max_model_len_tokens` on one device: whole blocks, and the one that vLLM keeps back."""
    return (1 + _longest_cache_blocks(inference)) * _cache_block_bytes(model, inference)


def _longest_host_bytes(model: Model, inference: Inference) -> int:
    """The same in host memory, where a rank keeps what all its devices hold; of a latent, which all hold alike, one copy may do."""
    copies = 1 if model.mla is not None else inference.tensor_parallel
    return copies * _longest_cache_blocks(inference) * _cache_block_bytes(model, inference)


def on_disk_bytes(num_bytes: int) -> int:
    """What a file of so many bytes takes on a disk: whole pages."""
    return -(-num_bytes // DISK_PAGE_BYTES) * DISK_PAGE_BYTES


def disk_block_bytes(model: Model, inference: Inference, routed_experts: bool) -> tuple[int, int]:
    """What one block takes on disk: its cache, as in host memory, and its routes, whose room is twice what they need: each of the two
    forgets by itself what was not used for long, and a cache without its routes is of no use."""
    cache = on_disk_bytes(_longest_host_bytes(model, inference) // _longest_cache_blocks(inference))
    if not routed_experts or (moe := model.moe) is None:
        return cache, 0
    number = 1 if moe.num_experts <= 256 else 2
    return cache, 2 * on_disk_bytes(
        inference.kv_block_tokens * model.num_layers * moe.num_experts_per_token * number
    )


def _cut_widths(model: Model, inference: Inference) -> list[tuple[str, int, str, int]]:
    """Widths that an engine's devices share: field, value, what divides it, and by how much."""
    moe, tensor = model.moe, ("tensor_parallel", inference.tensor_parallel)
    widths = []
    if model.family != "hugging_face" and (moe is None or moe.num_dense_layers):
        widths.append(("model.intermediate_size", model.intermediate_size, *tensor))
    if moe is not None and not inference.expert_parallel:
        devices = inference.devices_per_replica
        widths.append(
            (
                "model.moe.expert_intermediate_size",
                moe.expert_intermediate_size,
                "data_parallel·tensor_parallel",
                devices,
            )
        )
    if moe is not None and moe.num_shared_experts:
        shared = moe.num_shared_experts * moe.expert_intermediate_size
        widths.append(("model.moe.num_shared_experts·expert_intermediate_size", shared, *tensor))
    return widths


# Tasks and algorithms -----------------------------------------------------------------------------------------------


class TaskUse(Record):
    """One source of problems: `kind` names a task, `args` are that task's own.

    `weight` is its share of the groups that train; evaluations ask every task alike, and demonstrations are of one task.
    """

    name: str
    kind: str
    args: dict[str, Any]
    weight: PositiveFloat
    seed: NonNegativeInt
    max_turns: PositiveInt


class Grpo(Record):
    """A = R − mean(R) over the group, divided by the group's standard deviation only if asked (Dr. GRPO's choice is not to)."""

    kind: Literal["grpo"]
    group_size: Annotated[int, Field(ge=2)]
    normalize_std: bool


class MaxRl(Record):
    """A = (R − mean(R)) / mean(R), zero where the mean is not positive."""

    kind: Literal["max_rl"]
    group_size: Annotated[int, Field(ge=2)]


Algorithm = Annotated[Grpo | MaxRl, Field(discriminator="kind")]


class Sampling(Record):
    temperature: PositiveFloat
    max_tokens_per_turn: PositiveInt


class FixedAdmission(Record):
    """As many rollouts in flight as the manifest says, whatever the engines say."""

    kind: Literal["fixed"]
    max_in_flight: PositiveInt


class AdaptiveAdmission(Record):
    """Rollouts in flight follow the engines' load (use of cache, waiting requests, preemptions) between two bounds."""

    kind: Literal["adaptive"]
    min_in_flight: PositiveInt
    max_in_flight: PositiveInt

    @model_validator(mode="after")
    def bounds_are_in_order(self) -> "AdaptiveAdmission":
        if self.min_in_flight > self.max_in_flight:
            raise ValueError(
                f"min_in_flight {self.min_in_flight} exceeds max_in_flight {self.max_in_flight}; set it to at most that"
            )
        return self


Admission = Annotated[FixedAdmission | AdaptiveAdmission, Field(discriminator="kind")]


class Evaluation(Record):
    """Held-out problems during RL, on one pinned policy version, beside training.

    - `stop_at`: RL ends early, as a success, once the mean held-out reward reaches it. Null: never.
    """

    interval_steps: PositiveInt
    num_problems: PositiveInt
    rollouts_per_problem: PositiveInt
    stop_at: float | None


class Orchestrator(Record):
    """How rollouts are made and which of them may train.

    - `drop_zero_advantage_groups`: leave out groups of equal rewards, as `max_sampled_ratio`
      allows.
    - `max_sampled_ratio`: once that many times the batch has been sampled, such groups fill the
      batch.
    - `on_timeout`: a rollout that takes longer than `rollout_timeout_s` is dropped and counted, or
      has the reward 0 in evaluations and in its group's baseline. It is never trained.
    - `keep_batches`: of trained batches, the newest whose tokens, log-probs and routes stay in the run's folder.
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

    @model_validator(mode="after")
    def a_group_can_be_in_flight(self) -> "Orchestrator":
        group, most = self.algorithm.group_size, self.admission.max_in_flight
        if most < group:
            raise ValueError(
                f"admission.max_in_flight {most} cannot hold one group of algorithm.group_size {group}; set it to at least that"
            )
        return self

    @model_validator(mode="after")
    def batches_ahead_have_tokens(self) -> "Orchestrator":
        ahead, bound = self.max_batches_ahead, self.max_off_policy_steps
        if ahead > bound:
            raise ValueError(
                f"max_batches_ahead {ahead} exceeds max_off_policy_steps {bound}: no token is new enough for a batch further ahead than "
                f"that; set it to at most {bound}"
            )
        return self

    @model_validator(mode="after")
    def batch_is_whole_groups(self) -> "Orchestrator":
        group, batch = self.algorithm.group_size, self.rollouts_per_batch
        if batch % group:
            raise ValueError(
                f"rollouts_per_batch {batch} is not a multiple of algorithm.group_size {group}; try {batch // group * group or group}"
            )
        return self


class Tasks(Record):
    train: Annotated[tuple[TaskUse, ...], Field(min_length=1, strict=False)]
    evaluation: Annotated[tuple[TaskUse, ...], Field(min_length=1, strict=False)]

    @model_validator(mode="after")
    def names_differ(self) -> "Tasks":
        for part in ("train", "evaluation"):
            names = [task.name for task in getattr(self, part)]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(
                    f"{part}: {twice} name more than one task each; give every task a name of its own"
                )
        return self


# Wires and stages ---------------------------------------------------------------------------------------------------


class Transport(Record):
    """How batches reach the trainer and weights reach the engines.

    - `weights`: "files" in shared memory or the run's folder; "nccl" from the trainer's ranks to the engines' (CUDA IPC within a host),
      each receiving only its slices; "nixl" the same slices, read by the engines (RDMA). "adapters": files of the adapters alone
      (`trainer.lora`), which engines put beside the weights that they started with.
    - `routed_experts`: the engines' choices of experts travel with the tokens, and the trainer's layers replay them (R3).
    """

    rollouts: Literal["zmq", "files"]
    weights: Literal["files", "adapters", "nccl", "nixl"]
    routed_experts: bool


class Demonstrations(Record):
    """SFT data from a task's own demonstrations: problems `0..num_problems` of `task`."""

    kind: Literal["demonstrations"]
    task: TaskUse
    num_problems: PositiveInt


class ChatFile(Record):
    """SFT data from JSONL: one `{"messages": [...]}` a line."""

    kind: Literal["chat_file"]
    path: str
    sha256: Sha256


class ChatDataset(Record):
    """SFT data from a Hugging Face dataset on disk (`save_to_disk`): `column` holds the messages; `fingerprint` is the dataset's own."""

    kind: Literal["dataset"]
    path: str
    split: str | None
    column: str
    fingerprint: str


SftData = Annotated[Demonstrations | ChatFile | ChatDataset, Field(discriminator="kind")]


class Validation(Record):
    """The loss on examples of `data` that are never trained: every `interval_steps` steps, and before the first and after the last."""

    interval_steps: PositiveInt
    num_examples: PositiveInt
    data: SftData


class Sft(Record):
    """Supervised warm start before RL. Trained are the tokens of messages whose role is in `trained_roles`."""

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
    """The last word: held-out problems on the policy before and after RL."""

    num_problems: PositiveInt
    rollouts_per_problem: PositiveInt


class Stages(Record):
    """The pipeline init → sft → rl → evaluate → report; `sft: null` leaves the warm start out."""

    sft: Sft | None
    rl: Rl
    evaluate: Evaluate


class Manifest(Record):
    """One run, whole. Its id is the sha256 of its canonical JSON (`identity.py`).

    `python_lock_sha256` is that of `locks/cpu.txt`; on GPUs what `cat locks/orchestrator.txt locks/trainer.cuda.txt
    locks/inference.cuda.txt | sha256sum` gives.
    """

    schema_version: Literal[2]
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
    def group_devices(self) -> dict[str, int]:
        """Devices of every group of nodes, in the order of the nodes."""
        inference = self.inference
        prefill = inference.prefill_replicas * inference.devices_per_replica
        rest = inference.num_replicas * inference.devices_per_replica - prefill
        engines = {"prefill": prefill, "decode": rest} if prefill else {"inference": rest}
        return {**engines, "trainer": self.trainer.mesh.world_size}

    @model_validator(mode="after")
    def name_is_free(self) -> "Manifest":
        if self.name in TARGETS:
            raise ValueError(
                f"name: no run is called {self.name!r}, for the pipeline has a rule of that name; try {'my_' + self.name!r}"
            )
        return self

    @model_validator(mode="after")
    def mesh_fits_hardware(self) -> "Manifest":
        mesh, model = self.trainer.mesh, self.model
        if self.hardware.accelerator != "cpu" and self.hardware.num_nodes == 1:
            devices, inference = self.hardware.devices_per_node, self.inference
            used = mesh.world_size + inference.num_replicas * inference.devices_per_replica
            if used > devices:
                ranks = devices - used + mesh.world_size
                replicas = (devices - mesh.world_size) // inference.devices_per_replica
                fits = (
                    [f"trainer.mesh's dp_replicate·dp_shard·cp to at most {ranks}"]
                    if ranks > 0
                    else []
                )
                fits += (
                    [f"inference.num_replicas to at most {replicas}"]
                    if replicas > inference.prefill_replicas
                    else []
                )
                raise ValueError(
                    f"trainer {mesh.world_size} + inference {used - mesh.world_size} devices do not fit {devices}; "
                    f"set {', or '.join([*fits, f'hardware.devices_per_node to {used}'])}"
                )
        if self.inference.max_model_len_tokens > model.max_positions:
            raise ValueError(
                f"inference.max_model_len_tokens {self.inference.max_model_len_tokens} exceeds model.max_positions {model.max_positions}"
            )
        if (turn := self.orchestrator.sampling.max_tokens_per_turn) >= (
            longest := self.inference.max_model_len_tokens
        ):
            raise ValueError(
                f"orchestrator.sampling.max_tokens_per_turn {turn} leave no room for a prompt in inference.max_model_len_tokens {longest}; "
                f"set it to less"
            )
        if self.trainer.memory.max_tokens_per_micro_batch < self.inference.max_model_len_tokens:
            raise ValueError(
                f"trainer.memory.max_tokens_per_micro_batch {self.trainer.memory.max_tokens_per_micro_batch} cannot hold one rollout of "
                f"inference.max_model_len_tokens {self.inference.max_model_len_tokens}"
            )
        return self

    @model_validator(mode="after")
    def experts_are_there(self) -> "Manifest":
        if self.model.moe is None:
            if self.transport.routed_experts:
                raise ValueError(
                    f"transport.routed_experts: family {self.model.family!r} has no experts to choose; "
                    f"set transport.routed_experts to false"
                )
            if self.inference.expert_parallel:
                raise ValueError(
                    f"inference.expert_parallel: family {self.model.family!r} has no experts to spread; "
                    f"set inference.expert_parallel to false"
                )
        elif self.inference.expert_parallel and self.inference.devices_per_replica == 1:
            raise ValueError(
                "inference.expert_parallel: the one device of an engine has all experts; set inference.expert_parallel to false, or "
                "data_parallel or tensor_parallel to more"
            )
        elif self.inference.expert_parallel and self.model.moe.num_experts % (
            devices := self.inference.devices_per_replica
        ):
            fits = [n for n in range(1, devices + 1) if self.model.moe.num_experts % n == 0]
            raise ValueError(
                f"inference.expert_parallel: {devices} devices of a replica do not divide {self.model.moe.num_experts} experts; "
                f"choose data_parallel·tensor_parallel from {fits}, or set inference.expert_parallel to false"
            )
        return self

    @model_validator(mode="after")
    def engines_fit(self) -> "Manifest":
        inference, accelerator = self.inference, self.hardware.accelerator
        if inference.tensor_parallel not in (heads := _heads_divide_among(self.model)):
            raise ValueError(
                f"inference.tensor_parallel {inference.tensor_parallel}: {self.model.num_heads} query heads and {self.model.num_kv_heads} "
                f"key heads do not divide among as many devices; choose from {heads}"
            )
        for field, width, by, devices in _cut_widths(self.model, inference):
            if width % devices:
                fits = [
                    n
                    for n in range(1, devices + 1)
                    if width % n == 0 and (by != "tensor_parallel" or n in heads)
                ]
                raise ValueError(
                    f"inference.{by} {devices}: {field} {width} does not divide among as many devices; choose {by} from {fits}"
                    + (
                        ", or set inference.expert_parallel to true"
                        if by != "tensor_parallel"
                        else ""
                    )
                )
        if inference.kv_block_tokens % (least := KV_BLOCK_TOKENS[accelerator]):
            raise ValueError(
                f"inference.kv_block_tokens {inference.kv_block_tokens}: attention on {accelerator} reads blocks of a multiple of {least} "
                f"tokens; try {-(-inference.kv_block_tokens // least) * least}"
            )
        if inference.max_batched_tokens < inference.max_num_sequences:
            raise ValueError(
                f"inference.max_batched_tokens {inference.max_batched_tokens} cannot hold one token of each of "
                f"inference.max_num_sequences {inference.max_num_sequences}; set it to at least that"
            )
        if inference.kv_cache_bytes < (needed := _longest_cache_bytes(self.model, inference)):
            raise ValueError(
                f"inference.kv_cache_bytes {inference.kv_cache_bytes} cannot hold one rollout of inference.max_model_len_tokens "
                f"{inference.max_model_len_tokens}, which needs {needed}; set it to at least that"
            )
        offload = inference.kv_offload
        if offload.kind == "tiers" and offload.host_bytes < (
            needed := _longest_host_bytes(self.model, inference)
        ):
            raise ValueError(
                f"inference.kv_offload.host_bytes {offload.host_bytes} cannot hold one rollout of inference.max_model_len_tokens "
                f"{inference.max_model_len_tokens}, which needs {needed}; set it to at least that, or inference.kv_offload.kind to 'none'"
            )
        if offload.kind == "mooncake":
            devices, longest = (
                inference.devices_per_replica,
                _longest_host_bytes(self.model, inference),
            )
            if offload.segment_bytes < (needed := max(SEGMENT_BYTES * devices, longest)):
                raise ValueError(
                    f"inference.kv_offload.segment_bytes {offload.segment_bytes}: Mooncake takes at least {SEGMENT_BYTES} of each of an "
                    f"engine's {devices} devices, and one rollout of inference.max_model_len_tokens {inference.max_model_len_tokens} needs "
                    f"{longest}; set it to at least {needed}, or inference.kv_offload.kind to 'none'"
                )
        if offload.kind == "tiers" and offload.disk_bytes:
            needed = _longest_cache_blocks(inference) * sum(
                disk_block_bytes(self.model, inference, self.transport.routed_experts)
            )
            if offload.disk_bytes < needed:
                raise ValueError(
                    f"inference.kv_offload.disk_bytes {offload.disk_bytes} cannot hold one rollout of inference.max_model_len_tokens "
                    f"{inference.max_model_len_tokens}, which needs {needed}; set it to at least that, or to 0 for no files"
                )
        if inference.quantization == "fp8" and (
            accelerator == "cpu" or inference.dtype != "bfloat16"
        ):
            raise ValueError(
                f"inference.quantization 'fp8' with dtype {inference.dtype!r} on {accelerator}: vLLM makes FP8 weights from bfloat16, and "
                f"multiplies them on GPUs alone; set inference.quantization to 'none'"
            )
        return self

    @model_validator(mode="after")
    def fp8_experts_are_whole_blocks(self) -> "Manifest":
        """vLLM pads experts to whole blocks of FP8, and no update brings what is padding."""
        moe, inference = self.model.moe, self.inference
        if inference.quantization != "fp8" or moe is None:
            return self
        for field, size in (
            ("model.hidden_size", self.model.hidden_size),
            ("model.moe.expert_intermediate_size", moe.expert_intermediate_size),
        ):
            if size % FP8_BLOCK:
                raise ValueError(
                    f"inference.quantization 'fp8' with {field} {size}: experts in FP8 are blocks of {FP8_BLOCK} × {FP8_BLOCK}, and "
                    f"{size} is no multiple of {FP8_BLOCK}; set inference.quantization to 'none'"
                )
        devices = 1 if inference.expert_parallel else inference.devices_per_replica
        if moe.expert_intermediate_size % (FP8_BLOCK * devices):
            raise ValueError(
                f"inference.quantization 'fp8' with inference.expert_parallel false: model.moe.expert_intermediate_size "
                f"{moe.expert_intermediate_size} over data_parallel·tensor_parallel = {devices} devices is no multiple of {FP8_BLOCK}, the "
                f"width of a block in FP8; set inference.expert_parallel to true"
            )
        return self

    @model_validator(mode="after")
    def fp8_inputs_are_whole_blocks(self) -> "Manifest":
        """A dense layer of vLLM in FP8 asks that its inputs on a device are."""
        model, inference = self.model, self.inference
        if inference.quantization != "fp8":
            return self
        widths = [("model.hidden_size", model.hidden_size, 1)]
        if model.family != "hugging_face":
            field, size = (
                ("head_dim", model.head_dim)
                if model.mla is None
                else ("mla.value_head_dim", model.mla.value_head_dim)
            )
            widths.append(
                (f"model.num_heads·{field}", model.num_heads * size, inference.tensor_parallel)
            )
        widths += [
            (field, width, devices)
            for field, width, by, devices in _cut_widths(model, inference)
            if by == "tensor_parallel"
        ]
        for field, width, devices in widths:
            if width % (FP8_BLOCK * devices):
                over = f" over inference.tensor_parallel {devices}" if devices > 1 else ""
                raise ValueError(
                    f"inference.quantization 'fp8' with {field} {width}{over}: a layer in FP8 takes inputs of a multiple of {FP8_BLOCK} on "
                    f"each device; set inference.quantization to 'none'"
                    + (", or inference.tensor_parallel to less" if over else "")
                )
        return self

    @model_validator(mode="after")
    def nixl_and_mooncake_are_apart(self) -> "Manifest":
        """Refuse both in one engine: their two copies of rdma-core would crash it at exit."""
        kinds = {
            "transport.weights": self.transport.weights,
            "inference.kv_transfer.kind": self.inference.kv_transfer.kind,
            "inference.kv_offload.kind": self.inference.kv_offload.kind,
        }
        nixl, mooncake = (
            [field for field, kind in kinds.items() if kind == library]
            for library in ("nixl", "mooncake")
        )
        if nixl and mooncake:
            raise ValueError(
                f"{nixl[0]} 'nixl' with {mooncake[0]} 'mooncake': no engine can load both, for each brings its own rdma-core; "
                f"set one of them to another kind"
            )
        return self

    @model_validator(mode="after")
    def adapters_are_there(self) -> "Manifest":
        if self.transport.weights == "adapters" and self.trainer.lora is None:
            raise ValueError(
                "transport.weights 'adapters': there are none; set trainer.lora, or transport.weights to 'files'"
            )
        return self

    @model_validator(mode="after")
    def there_is_state_to_offload(self) -> "Manifest":
        used = [
            self.trainer.optimizer,
            *([] if self.stages.sft is None else [self.stages.sft.optimizer]),
        ]
        if self.trainer.memory.optimizer_offload and not any(_has_state(one) for one in used):
            raise ValueError(
                f"trainer.memory.optimizer_offload: {' and '.join(sorted({one.kind for one in used}))} as written here keep no state; "
                f"set trainer.memory.optimizer_offload to false"
            )
        return self

    @model_validator(mode="after")
    def groups_fill_nodes(self) -> "Manifest":
        num_nodes, per_node = self.hardware.num_nodes, self.hardware.devices_per_node
        if num_nodes == 1:
            return self
        if per_node % (devices := self.inference.devices_per_replica):
            fits = [n for n in range(1, per_node + 1) if per_node % n == 0]
            raise ValueError(
                f"inference.data_parallel·tensor_parallel = {devices} does not divide hardware.devices_per_node {per_node}, "
                f"and no engine spans nodes; choose from {fits}"
            )
        groups = self.group_devices
        left = num_nodes * per_node - sum(
            devices for name, devices in groups.items() if name != "trainer"
        )
        for name, devices in groups.items():
            if devices % per_node:
                whole = (
                    left
                    if name == "trainer" and left > 0
                    else devices // per_node * per_node or per_node
                )
                raise ValueError(
                    f"hardware.devices_per_node {per_node}: {name} has {devices} devices, which fill no whole number of nodes; try {whole}"
                )
        nodes = {name: devices // per_node for name, devices in groups.items()}
        if (needed := sum(nodes.values())) != num_nodes:
            shares = " + ".join(f"{name} {count}" for name, count in nodes.items())
            raise ValueError(
                f"hardware.num_nodes {num_nodes}: {shares} nodes are {needed}; set hardware.num_nodes to {needed}"
                + (f", or trainer.mesh's dp_replicate·dp_shard·cp to {left}" if left > 0 else "")
            )
        return self

    @model_validator(mode="after")
    def trainer_fits_model(self) -> "Manifest":
        fit_model(self.trainer, self.model, self.hardware.accelerator, self.trainer.mesh.world_size)
        return self
