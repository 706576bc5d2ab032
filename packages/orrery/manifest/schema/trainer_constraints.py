"""Check constraints of the model, the trainer and elastic training."""

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from orrery.manifest.devices import AMPERE, HOPPER, device_of
from orrery.manifest.schema.model import EXPERT_GROUPS, FP8_BLOCK, MAX_COUNT, MLA, Model
from orrery.manifest.schema.trainer import Lora, Mesh, RecomputedModule, Trainer

if TYPE_CHECKING:
    from orrery.manifest.schema.manifest import Manifest

_QWEN3 = {
    "rotary_fraction": (1.0,),
    "rope_scaling": (None,),
    "attention_bias": (False,),
    "qk_norm": (True,),
}
_QWEN3_MOE = {
    "moe.num_dense_layers": (0,),
    "moe.num_shared_experts": (0,),
    "moe.score": ("softmax",),
    "moe.routed_scale": (1.0,),
}
_LATENT = {
    "rotary_fraction": (1.0,),
    "attention_bias": (False,),
    "qk_norm": (False,),
    "moe.score": ("sigmoid",),
}
ONLY: dict[str, dict[str, tuple[Any, ...]]] = {  # family → field → supported values
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3 | _QWEN3_MOE,
    "llama": {"rotary_fraction": (1.0,), "attention_bias": (False,), "qk_norm": (False,)},
    "glm4_moe": {"rope_scaling": (None,)},
    "glm5": {"rope_scaling": (None,), **_LATENT},
    "deepseek_v3": {"mla.indexer": (None,), **_LATENT},
    "deepseek_v32": _LATENT,
    "kimi_k2": {"mla.indexer": (None,), **_LATENT},
}
_LATENT_FAMILIES = ("glm5", "deepseek_v3", "deepseek_v32", "kimi_k2")
MTP_FAMILIES = ("glm4_moe", *_LATENT_FAMILIES)  # families with multi-token prediction
PARTS = {  # optional field of `model` → families that need it
    "moe": ("qwen3_moe", "glm4_moe", *_LATENT_FAMILIES),
    "mla": _LATENT_FAMILIES,
    "hf_config": ("hugging_face",),
}


def model_misfits(model: Model) -> Iterator[str]:
    mla, moe = model.mla, model.moe
    if moe is not None and moe.num_experts_per_token > moe.num_experts:
        yield (
            f"model.moe.num_experts_per_token {moe.num_experts_per_token} exceeds num_experts "
            f"{moe.num_experts}; set it to at most that"
        )
    if moe is not None and moe.num_dense_layers > model.num_layers:
        yield (
            f"model.moe.num_dense_layers {moe.num_dense_layers} exceeds model.num_layers; set it "
            f"to at most {model.num_layers}"
        )
    if model.num_heads % model.num_kv_heads:
        yield (
            f"model.num_heads {model.num_heads} is not a multiple of num_kv_heads "
            f"{model.num_kv_heads}; choose num_kv_heads from {divisors(model.num_heads)}"
        )
    if mla is not None and model.head_dim != (width := mla.nope_head_dim + mla.rope_head_dim):
        yield (
            f"model.head_dim {model.head_dim} is not mla.nope_head_dim {mla.nope_head_dim} + "
            f"mla.rope_head_dim {mla.rope_head_dim}; set it to {width}"
        )
    field, turning = "head_dim · rotary_fraction", int(model.head_dim * model.rotary_fraction)
    if mla is not None:
        field, turning = "mla.rope_head_dim", mla.rope_head_dim
    if turning % 2 and model.family != "hugging_face":
        yield (
            f"model.{field} {turning} is odd, and rotary embeddings rotate pairs of numbers; try "
            f"{turning + 1}"
        )
    for part, families in PARTS.items():
        is_set = getattr(model, part) is not None
        if is_set != (model.family in families):
            remedy = f"set model.{part} to null" if is_set else f"write model.{part}"
            yield (
                f"model.family {model.family!r} and {part} {'set' if is_set else 'null'} do not "
                f"go together; {remedy}, or choose another family"
            )
    for field, only in ONLY.get(model.family, {}).items():
        value: Any = model
        for name in field.split("."):
            value = getattr(value, name)
        if value not in only:
            yield (
                f"model.{field} {value!r}: family {model.family!r} has "
                f"{' or '.join(map(repr, only))} only; set it to that, or choose another family"
            )
    if (scaling := model.rope_scaling) is not None and model.family != "hugging_face":
        kind = "llama3" if model.family == "llama" else "yarn"
        if scaling.kind != kind:
            yield (
                f"model.rope_scaling.kind {scaling.kind!r}: family {model.family!r} scales by "
                f"{kind!r} only; set rope_scaling to that or to null"
            )
    if model.num_mtp_layers and (
        model.family not in MTP_FAMILIES or model.init.kind != "pretrained"
    ):
        yield (
            f"model.num_mtp_layers {model.num_mtp_layers}: layers for multi-token prediction come "
            f"from a pretrained checkpoint of {', '.join(MTP_FAMILIES)} only; set it to 0"
        )
    if mla is not None:
        yield from _latent_misfits(model, mla)


def _latent_misfits(model: Model, mla: MLA) -> Iterator[str]:
    if model.num_kv_heads != model.num_heads:
        yield (
            f"model.num_kv_heads {model.num_kv_heads}: latent attention has a key for each of "
            f"num_heads {model.num_heads}; set it to that"
        )
    moe, indexer = model.moe, mla.indexer
    num_groups, num_kept = EXPERT_GROUPS.get(model.family, (1, 1))
    if moe and num_groups > 1 and (moe.num_experts % num_groups or moe.num_experts == num_groups):
        yield (
            f"model.moe.num_experts {moe.num_experts}: family {model.family!r} divides experts "
            f"into {num_groups} groups of at least two; set it to {2 * num_groups} or another "
            "multiple"
        )
    elif moe and moe.num_experts_per_token > moe.num_experts // num_groups * num_kept:
        yield (
            f"model.moe.num_experts_per_token {moe.num_experts_per_token}: a token uses "
            f"{num_kept} of {num_groups} groups of experts; set it to at most "
            f"{moe.num_experts // num_groups * num_kept}"
        )
    if indexer is None:
        if model.family in ("glm5", "deepseek_v32"):
            yield (
                f"model.mla.indexer null: family {model.family!r} chooses keys with it; write it, "
                "or choose family 'deepseek_v3'"
            )
        return
    if model.family == "deepseek_v32" and indexer.types is not None:
        yield (
            "model.mla.indexer.types is set: each layer of family 'deepseek_v32' has an indexer; "
            "set it to null"
        )
    if mla.rope_head_dim > indexer.head_dim:
        yield (
            f"model.mla.indexer.head_dim {indexer.head_dim} is less than mla.rope_head_dim "
            f"{mla.rope_head_dim}, its rotated part; set it to at least that"
        )
    if indexer.types is None:
        return
    if len(indexer.types) != model.num_layers or indexer.types[0] != "full":
        yield (
            f"model.mla.indexer.types has {len(indexer.types)} layers, of which the first is "
            f"{indexer.types[:1]}; name all {model.num_layers} layers, the first 'full', or set it "
            "to null"
        )


def trainer_field_misfits(trainer: Trainer) -> Iterator[str]:
    if (ranks := trainer.mesh.world_size) > MAX_COUNT:
        yield (
            f"trainer.mesh.dp_replicate·dp_shard·cp = {ranks}: a trainer has at most {MAX_COUNT} "
            "ranks; set them to less"
        )
    for name in ("kl", "logprob_difference"):
        warn = getattr(trainer.mismatch, f"warn_{name}")
        stop = getattr(trainer.mismatch, f"stop_{name}")
        if warn is not None and stop is not None and warn > stop:
            yield (
                f"trainer.mismatch.warn_{name} {warn:g} exceeds stop_{name} {stop:g}: the run "
                "would end before it warns; set it to at most that"
            )
    if trainer.param_dtype == "bfloat16":
        yield (
            "trainer.param_dtype 'bfloat16': a step below 1/512 of a weight is rounded away, and "
            "at a learning rate of 1e-6 no weight moves; set trainer.param_dtype to 'float32' "
            "(frozen weights beside trainer.lora are held in trainer.compute_dtype)"
        )
    mesh = trainer.mesh
    for name in ("deepep_num_sms", "deepep_token_chunk_size"):
        if (value := getattr(mesh, name)) is not None and mesh.ep_backend != "deepep":
            yield (
                f"trainer.mesh.{name} {value} with ep_backend {mesh.ep_backend!r}: only DeepEP has "
                f"this option; set trainer.mesh.{name} to null, or ep_backend to 'deepep'"
            )
    if mesh.ep_chunks > 1 and (mesh.ep == 1 or mesh.ep_backend != "torch"):
        yield (
            f"trainer.mesh.ep_chunks {mesh.ep_chunks} with ep {mesh.ep} and ep_backend "
            f"{mesh.ep_backend!r}: only the torch backend exchanges tokens in chunks beside "
            "products; set trainer.mesh.ep_chunks to 1"
        )
    if mesh.deepep_num_sms is not None and mesh.deepep_num_sms % 2:
        yield (
            f"trainer.mesh.deepep_num_sms {mesh.deepep_num_sms}: DeepEP takes an even number; "
            f"set it to {mesh.deepep_num_sms + 1}"
        )
    if share := trainer.memory.optimizer_offload_resident:
        what = f"trainer.memory.optimizer_offload_resident {share:g}"
        if not trainer.memory.optimizer_offload:
            yield f"{what} without optimizer_offload: all state is on the device; set it to 0"
    if trainer.memory.optimizer_offload and trainer.fsdp.cpu_offload:
        yield (
            "trainer.memory.optimizer_offload with fsdp.cpu_offload: the state lives in host "
            "memory already; set trainer.memory.optimizer_offload to false"
        )


def trainer_misfits(
    trainer: Trainer, model: Model, accelerator: str, devices: int
) -> Iterator[str]:
    yield from trainer_field_misfits(trainer)
    if adapters := list(_adapter_misfits(trainer.lora, model)):
        yield from adapters
        return
    yield from context_misfits(trainer.mesh, model, devices)
    yield from _module_misfits(trainer, model)
    yield from _indexer_misfits(trainer, model)
    yield from _bias_misfits(trainer, model)
    yield from _spread_misfits(trainer, model, accelerator)
    yield from _attention_misfits(trainer, model, accelerator)
    yield from _fp8_misfits(trainer, model, accelerator)


def recomputable_modules(model: Model) -> list[RecomputedModule]:
    if model.family == "hugging_face":
        return []
    has_experts = "experts" in block_parts(model)
    has_activation = has_experts and "experts" not in (model.fp8 or ())  # FP8 experts fuse SwiGLU
    found: list[RecomputedModule] = ["norms", "attention_projections"]
    found += ["router"] if has_experts else []
    return [*found, "experts_activation"] if has_activation else found


def _module_misfits(trainer: Trainer, model: Model) -> Iterator[str]:
    spec, has = trainer.memory.activation_checkpointing, recomputable_modules(model)
    if spec.kind == "modules" and (lacking := [name for name in spec.modules if name not in has]):
        remedy = f"choose from {has}" if has else "set kind to 'full'"
        fp8 = "" if model.fp8 is None else f" and model.fp8 {list(model.fp8)}"
        yield (
            f"trainer.memory.activation_checkpointing.modules {lacking}: family {model.family!r} "
            f"with these layers{fp8} recomputes none; {remedy}"
        )


def _indexer_misfits(trainer: Trainer, model: Model) -> Iterator[str]:
    if trainer.indexer == "frozen":
        return
    what, off = "trainer.indexer 'train'", "set trainer.indexer to 'frozen'"
    if model.mla is None or model.mla.indexer is None:
        yield f"{what}: family {model.family!r} has no indexers; {off}"
    if trainer.lora is not None:
        yield f"{what} with trainer.lora: engines would get no indexers, only adapters; {off}"


def _bias_misfits(trainer: Trainer, model: Model) -> Iterator[str]:
    if trainer.expert_bias_rate is None:
        return
    what = f"trainer.expert_bias_rate {trainer.expert_bias_rate:g}"
    off = "set trainer.expert_bias_rate to null"
    if model.moe is None or model.moe.score != "sigmoid":
        yield f"{what}: family {model.family!r} here has no routers with a bias; {off}"
    if trainer.lora is not None:
        yield f"{what} with trainer.lora: engines would get no biases, only adapters; {off}"
    if trainer.elastic is not None:
        yield f"{what} with trainer.elastic: sites do not exchange biases; {off}"


def _fp8_misfits(trainer: Trainer, model: Model, accelerator: str) -> Iterator[str]:
    if model.fp8 is None:
        return
    what, off = f"model.fp8 {list(model.fp8)}", "set model.fp8 to null"
    has = block_parts(model) if model.mla is None else ["attention", *block_parts(model)]
    if model.family == "hugging_face":
        yield f"{what}: layers in FP8 need one of Orrery's own networks; {off}"
    elif not model.fp8 or len(set(model.fp8)) < len(model.fp8):
        yield f"{what}: name each part of {has} once, or {off}"
    elif lacking := [part for part in model.fp8 if part not in has]:
        yield f"{what}: family {model.family!r} has no {lacking} here; choose from {has}"
    if accelerator == "cpu" or device_of(accelerator).capability != HOPPER:
        yield f"{what} on {accelerator}: products of FP8 blocks need a Hopper GPU; {off}"
    elif trainer.compute_dtype != "bfloat16":
        yield (
            f"{what} with trainer.compute_dtype {trainer.compute_dtype!r}: FP8 blocks are made "
            f"from bfloat16; set trainer.compute_dtype to 'bfloat16', or {off}"
        )
    if trainer.lora is not None:
        yield f"{what} with trainer.lora: adapters need weights in bfloat16; {off}"
    for field, size in _fp8_widths(model):
        if size % FP8_BLOCK:
            yield (
                f"{what} with {field} {size}: a layer in FP8 has widths of a multiple of "
                f"{FP8_BLOCK}; {off}"
            )


def _fp8_widths(model: Model) -> Iterator[tuple[str, int]]:
    parts, moe = model.fp8 or (), model.moe
    yield "model.hidden_size", model.hidden_size
    if "attention" in parts and model.mla is not None:
        yield "model.mla.q_lora_rank", model.mla.q_lora_rank
        yield "model.num_heads·head_dim", model.num_heads * model.head_dim
        yield "model.num_heads·mla.value_head_dim", model.num_heads * model.mla.value_head_dim
    elif "attention" in parts:
        for heads in ("num_heads", "num_kv_heads"):
            yield f"model.{heads}·head_dim", getattr(model, heads) * model.head_dim
    if "feed_forward" in parts and (moe is None or moe.num_dense_layers):
        yield "model.intermediate_size", model.intermediate_size
    if moe is not None and set(parts) & {"feed_forward", "experts"}:
        yield "model.moe.expert_intermediate_size", moe.expert_intermediate_size


def block_parts(model: Model) -> list[str]:
    """Return the parts of a block that `trainer.lora.targets` may name."""
    moe = model.moe
    parts = {
        "attention": model.mla is None,  # latent attention does not support adapters
        "feed_forward": moe is None or moe.num_dense_layers > 0 or moe.num_shared_experts > 0,
        "experts": moe is not None and moe.num_dense_layers < model.num_layers,
    }
    return [part for part, is_there in parts.items() if is_there]


def _adapter_misfits(lora: Lora | None, model: Model) -> Iterator[str]:
    if lora is None:
        return
    if model.family == "hugging_face":
        yield (
            "trainer.lora: adapters need one of Orrery's own networks; set trainer.lora to "
            "null, or choose another model.family"
        )
        return
    has = block_parts(model)
    if lacking := [target for target in lora.targets if target not in has]:
        yield (
            f"trainer.lora.targets {lacking}: family {model.family!r} with these layers has no "
            f"such part; choose from {has}"
        )


def context_misfits(mesh: Mesh, model: Model, devices: int) -> Iterator[str]:
    sharded = devices // mesh.dp_replicate
    if devices % mesh.dp_replicate:
        sharded = mesh.dp_shard * mesh.cp
    if mesh.cp == 1:
        return
    if model.family == "hugging_face":
        yield (
            f"trainer.mesh.cp {mesh.cp}: attention of family 'hugging_face' cannot be spread; "
            f"set trainer.mesh.cp to 1 and dp_shard to {sharded}"
        )
    elif model.mla is not None and mesh.cp_style != "dsa":
        yield (
            f"trainer.mesh.cp_style {mesh.cp_style!r}: family {model.family!r} has latent keys, "
            "which ranks gather; set trainer.mesh.cp_style to 'dsa'"
        )
    elif model.mla is None and mesh.cp_style == "dsa":
        yield (
            f"trainer.mesh.cp_style 'dsa': family {model.family!r} has no latent keys to gather; "
            "set trainer.mesh.cp_style to 'ring'"
        )
    elif mesh.cp_style == "ulysses" and mesh.cp not in (heads := head_divisors(model)):
        fits = ", ".join(f"{cp}·{sharded // cp}" for cp in heads if sharded % cp == 0)
        yield (
            f"trainer.mesh.cp {mesh.cp}: {model.num_heads} query heads and {model.num_kv_heads} "
            f"key heads do not divide among as many ranks; choose cp·dp_shard from {fits}"
            + ("" if sharded % mesh.cp else ", or set trainer.mesh.cp_style to 'ring'")
        )


def _spread_misfits(trainer: Trainer, model: Model, accelerator: str) -> Iterator[str]:
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
    fits = [n for n in divisors(sharded) if experts % n == 0]
    if mesh.ep not in fits:
        whole = f"dp_shard·cp = {sharded}" if sharded % mesh.ep else f"{experts} experts"
        yield f"trainer.mesh.ep {mesh.ep} does not divide {whole}; choose from {fits}"
    if mesh.ep_backend == "deepep" and (
        accelerator == "cpu" or trainer.compute_dtype != "bfloat16"
    ):
        yield (
            "trainer.mesh.ep_backend 'deepep' moves only bfloat16 values, between GPUs; "
            "set trainer.mesh.ep_backend to 'torch', or trainer.compute_dtype to 'bfloat16' on GPUs"
        )


def elastic_misfits(run: "Manifest") -> Iterator[str]:
    elastic, trainer = run.trainer.elastic, run.trainer
    if elastic is None:
        return
    off = "or set trainer.elastic to null"
    if elastic.min_sites > elastic.max_sites:
        yield (
            f"trainer.elastic.min_sites {elastic.min_sites} exceeds max_sites "
            f"{elastic.max_sites}; set it to at most that"
        )
    if elastic.quorum > elastic.min_sites:
        yield (
            f"trainer.elastic.quorum {elastic.quorum} exceeds min_sites {elastic.min_sites}; "
            f"set it to at most that"
        )
    order = ("heartbeat_s", "dead_after_s", "store_timeout_s", "exchange_timeout_s")
    for sooner, later in pairwise(order):
        if (one := getattr(elastic, sooner)) >= (other := getattr(elastic, later)):
            yield (
                f"trainer.elastic.{sooner} {one:g} is not below {later} {other:g}; "
                f"set it to less than that"
            )
    if trainer.mesh.dp_replicate > 1:
        yield (
            f"trainer.elastic with trainer.mesh.dp_replicate {trainer.mesh.dp_replicate}: replicas "
            f"would exchange the same weights twice; set it to 1, {off}"
        )
    if run.model.num_layers < elastic.fragments or elastic.inner_steps % elastic.fragments:
        yield (
            f"trainer.elastic.fragments {elastic.fragments}: it must divide inner_steps "
            f"{elastic.inner_steps} and be at most model.num_layers {run.model.num_layers}; "
            f"set it to 1"
        )
    elif elastic.delay_steps >= (phase := elastic.inner_steps // elastic.fragments):
        yield (
            f"trainer.elastic.delay_steps {elastic.delay_steps} is not below inner_steps / "
            f"fragments {phase}; set it to at most {phase - 1}"
        )
    steps = {
        "trainer.checkpoint.interval_steps": trainer.checkpoint.interval_steps,
        "stages.rl.num_steps": run.stages.rl.num_steps,
    }
    if (sft := run.stages.sft) is not None:
        steps["stages.sft.num_steps"] = sft.num_steps
    for field, value in steps.items():
        if value % elastic.inner_steps:
            fits = max(1, value // elastic.inner_steps) * elastic.inner_steps
            yield (
                f"{field} {value} is not a multiple of trainer.elastic.inner_steps "
                f"{elastic.inner_steps}; set it to {fits}, {off}"
            )
    if run.orchestrator.evaluation.stop_at is not None:
        yield (
            f"orchestrator.evaluation.stop_at {run.orchestrator.evaluation.stop_at:g} with "
            f"trainer.elastic: each site would end RL at another step, with other weights; set it "
            f"to null, {off}"
        )
    if sft is not None and sft.data.kind != "text":
        yield (
            f"stages.sft.data.kind {sft.data.kind!r} with trainer.elastic: every site would train "
            f"the same examples; set it to 'text', {off}"
        )
    elif sft is not None and sft.data.kind == "text" and sft.data.num_shards < elastic.max_sites:
        yield (
            f"stages.sft.data.num_shards {sft.data.num_shards} is below "
            f"trainer.elastic.max_sites {elastic.max_sites}; set it to at least that"
        )


KERNELS = {  # attention kernel → (minimum compute capability, maximum head size)
    "fa2": (AMPERE, 256),
    "fa4": (HOPPER, 128),
    "cudnn": (HOPPER, 128),
}


def _attention_misfits(trainer: Trainer, model: Model, accelerator: str) -> Iterator[str]:
    choice = trainer.attention
    if choice == "auto":
        return
    lacks, others = None, ["auto", "plain"]
    if model.family == "hugging_face":
        lacks, others = "transformers chooses the kernel of its networks", ["auto"]
    elif choice == "fa3":
        lacks = "no package of locks/cuda.txt has gradients of FlashAttention 3"
        others = [*others, "fa2", "fa4", "cudnn"]
    elif choice != "plain":
        capability, most = KERNELS[choice]
        has = None if accelerator == "cpu" else device_of(accelerator).capability
        if has is None or has < capability or (choice == "fa4" and has != capability):
            only = "" if choice == "fa4" else " or newer"
            lacks = f"needs a GPU of compute capability {'.'.join(map(str, capability))}{only}"
        elif trainer.compute_dtype != "bfloat16":
            lacks = f"computes in bfloat16, not in {trainer.compute_dtype}"
        elif model.head_dim > most or (choice == "fa4" and model.head_dim != most):
            lacks = f"has no kernel for model.head_dim {model.head_dim} with gradients"
    if lacks is not None:
        yield f"trainer.attention {choice!r} on {accelerator}: {lacks}; choose from {others}"


def head_divisors(model: Model) -> list[int]:
    """Return the numbers of ranks that can share the attention heads evenly."""
    groups = model.num_kv_heads
    return [n for n in divisors(model.num_heads) if groups % n == 0 or n % groups == 0]


def divisors(whole: int, most: int | None = None) -> list[int]:
    return [n for n in range(1, (most or whole) + 1) if whole % n == 0]
