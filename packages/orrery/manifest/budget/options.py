"""Find roles that exceed device memory, and options that make them fit.

Tiers of options: 0 costs little speed, 1 moves all trainer state to host memory, 2 adds
devices.

`memory_misfits` reports only certain excesses: it lowers the trainer's planned peak by
`LARGEST_ERROR`, and counts only an engine's weights, cache and CUDA context. `memory_doubts` uses
the full plan.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import ValidationError

from orrery.manifest.budget import engine
from orrery.manifest.budget.engine import CONTEXT_BYTES, NCCL_BYTES, weight_bytes
from orrery.manifest.budget.parameters import ParameterCounts, count_parameters, is_sparse
from orrery.manifest.budget.trainer_memory import MemoryPlan, Workload, plan_memory, stage_workload
from orrery.manifest.check import with_values
from orrery.manifest.devices import PCIE_BYTES, usable_bytes
from orrery.manifest.schema import (
    FullCheckpointing,
    Inference,
    Manifest,
    Model,
    ModuleCheckpointing,
    Record,
    SelectiveCheckpointing,
    Trainer,
)
from orrery.manifest.schema.trainer import RecomputedModule
from orrery.manifest.schema.trainer_constraints import recomputable_modules

CHUNKS = (4096, 1024, 256)
KEPT: tuple[tuple[Literal["attention", "projections", "experts"], ...], ...] = (
    ("attention", "projections", "experts"),
    ("attention", "projections"),
    ("attention",),
)
WORTH_BYTES = 64 << 20
ONE_FIELD = re.compile(r"\w+(\.\w+)+")


@dataclass(frozen=True)
class MemoryOption:
    field: str
    value: Any
    instead_of: Any
    cost: str
    trainer: Trainer
    load: Workload
    place: str = "the manifest's memory axis"
    tier: int = 0

    def __str__(self) -> str:
        return (
            f"{self.field}: {format_value(self.value)} instead of {format_value(self.instead_of)}"
        )


@dataclass(frozen=True)
class ChosenOptions:
    options: tuple[MemoryOption, ...]
    freed_bytes: int
    is_enough: bool

    @property
    def fields(self) -> dict[str, Any]:
        """Return new values by manifest field, or {} if an option changes several fields."""
        if not all(ONE_FIELD.fullmatch(option.field) for option in self.options):
            return {}
        return {option.field: option.value for option in self.options}


def memory_options(
    model: Model, trainer: Trainer, load: Workload, before: MemoryPlan
) -> Iterator[MemoryOption]:
    yield from _head_options(trainer, load)
    yield from _fsdp_options(trainer, load)
    if trainer.memory.activation_checkpointing_every > 1:
        cost = "more blocks are recomputed"
        yield _change(trainer, load, "memory", "activation_checkpointing_every", 1, cost)
    for kind, cost in _checkpointing(model, trainer):
        yield _change(trainer, load, "memory", "activation_checkpointing", kind, cost)
    yield from _offload_options(model, trainer, load, before)
    yield from _mesh_options(model, trainer, load)


def choose_options(
    model: Model,
    trainer: Trainer,
    load: Workload,
    device_bytes: int,
    needed_bytes: int,
    counted: ParameterCounts,
    host_bytes: int = sys.maxsize,
    max_tier: int = 2,
) -> ChosenOptions:
    """Return the cheapest options that free `needed_bytes`, or else the options that free most.

    `host_bytes`: a rank's free host memory.
    """
    base = plan_memory(model, trainer, load, device_bytes, counted)

    def freed(option: MemoryOption) -> int:
        after = plan_memory(model, option.trainer, option.load, device_bytes, counted)
        fits = after.host_bytes - base.host_bytes <= max(0, host_bytes)
        return base.peak_bytes - after.peak_bytes if fits else -sys.maxsize

    best = ChosenOptions((), 0, False)
    for tier in range(max_tier + 1):
        for option in memory_options(model, trainer, load, base):
            if option.tier == tier and (num_bytes := freed(option)) >= needed_bytes:
                return ChosenOptions((option,), num_bytes, True)
        together = _combine(model, trainer, load, base, needed_bytes, freed, tier)
        if together.is_enough:
            return together
        best = max(best, together, key=lambda chosen: chosen.freed_bytes)
    return best


def _combine(
    model: Model,
    trainer: Trainer,
    load: Workload,
    before: MemoryPlan,
    needed_bytes: int,
    freed: Callable[[MemoryOption], int],
    max_tier: int,
) -> ChosenOptions:
    applied: dict[str, MemoryOption] = {}
    total = 0
    while total < needed_bytes:
        options = memory_options(model, trainer, load, before)
        candidates = [option for option in options if option.tier <= max_tier]
        best = max(candidates, key=freed, default=None)
        if best is None or freed(best) < total + WORTH_BYTES:
            break
        total, trainer, load = freed(best), best.trainer, best.load
        first = applied.pop(best.field, best)
        applied[best.field] = replace(best, instead_of=first.instead_of)
        if best.tier == 2:  # each option of tier 2 doubles the devices
            break
    return ChosenOptions(tuple(applied.values()), total, total >= needed_bytes)


def _change(
    trainer: Trainer,
    load: Workload,
    section: str,
    field: str,
    value: Any,
    cost: str,
    tier: int = 0,
) -> MemoryOption:
    old = getattr(trainer, section)
    changed = trainer.model_copy(update={section: old.model_copy(update={field: value})})
    name, instead_of = f"trainer.{section}.{field}", getattr(old, field)
    place = f"the manifest's {'hardware' if section == 'mesh' else 'memory'} axis"
    return MemoryOption(name, value, instead_of, cost, changed, load, place, tier)


def _head_options(trainer: Trainer, load: Workload) -> Iterator[MemoryOption]:
    memory = trainer.memory
    chunk = memory.lm_head_chunk_tokens
    for smaller in CHUNKS:
        if chunk == "auto" or smaller < chunk:
            cost = "smaller products of the LM head"
            yield _change(trainer, load, "memory", "lm_head_chunk_tokens", smaller, cost)
    if memory.lm_head_keeps_logits:
        cost = "one more product of the LM head in the backward pass"
        yield _change(trainer, load, "memory", "lm_head_keeps_logits", False, cost)


def _fsdp_options(trainer: Trainer, load: Workload) -> Iterator[MemoryOption]:
    if load.tokens > load.document_tokens:
        tokens = max(load.document_tokens, load.tokens // 2)
        cost = "more micro-batches, and weights are gathered for each"
        one = _change(trainer, load, "memory", "max_tokens_per_micro_batch", tokens, cost)
        micro_batches = -(-load.micro_batches * load.tokens // tokens)
        smaller_load = replace(load, tokens=tokens, micro_batches=micro_batches)
        yield replace(one, instead_of=load.tokens, load=smaller_load)
    if trainer.fsdp.reduce_gradients == "step" and load.micro_batches > 1:
        cost = "gradients travel after every micro-batch"
        yield _change(trainer, load, "fsdp", "reduce_gradients", "micro_batch", cost)
    if not trainer.fsdp.reshard_after_forward:
        cost = "weights are gathered again for the backward pass"
        yield _change(trainer, load, "fsdp", "reshard_after_forward", True, cost)


def _offload_options(
    model: Model, trainer: Trainer, load: Workload, before: MemoryPlan
) -> Iterator[MemoryOption]:
    memory = trainer.memory

    def transfers(category: str, times: int) -> str:
        num_bytes = max(moment[category] for moment in before.moments.values())
        return f", {times * num_bytes / PCIE_BYTES:.1f} s in all"

    if not memory.activation_offload and model.num_layers > 2:
        cost = (
            f"activations cross to the host and back{transfers('activations', 2)} "
            "for each micro-batch, beside the blocks"
        )
        yield _change(trainer, load, "memory", "activation_offload", True, cost)
    if not memory.optimizer_offload and not trainer.fsdp.cpu_offload:
        cost = (
            f"states cross to the host and back{transfers('optimizer state', 1)} "
            "once a step, beside the last backward pass and the next step"
        )
        yield _change(trainer, load, "memory", "optimizer_offload", True, cost)
    if memory.optimizer_offload_resident:
        cost = "more state crosses to the host and back"
        yield _change(trainer, load, "memory", "optimizer_offload_resident", 0.0, cost)


def _mesh_options(model: Model, trainer: Trainer, load: Workload) -> Iterator[MemoryOption]:
    memory, mesh, moe = trainer.memory, trainer.mesh, model.moe
    if mesh.dp_shard % 2 == 0 and _can_split_attention(model, trainer, 2 * mesh.cp):
        cost = (
            "attention's tokens travel between ranks, "
            "and half as many documents are trained at a time"
        )
        one = _change(trainer, load, "mesh", "cp", 2 * mesh.cp, cost)
        half = one.trainer.mesh.model_copy(update={"dp_shard": mesh.dp_shard // 2})
        changed = one.trainer.model_copy(update={"mesh": half})
        field = f"trainer.mesh.dp_shard: {half.dp_shard} and trainer.mesh.cp"
        twice = replace(load, micro_batches=2 * load.micro_batches)
        yield replace(one, field=field, trainer=changed, load=twice)
    if moe is not None:
        cost = "tokens travel to their experts"
        for ep in (2 * mesh.ep, 4 * mesh.ep, 8 * mesh.ep):
            if (mesh.dp_shard * mesh.cp) % ep == 0 and moe.num_experts % ep == 0:
                yield _change(trainer, load, "mesh", "ep", ep, cost)
    if not trainer.fsdp.cpu_offload and mesh.world_size > 1:
        cost = (
            "weights come over PCIe for each pass, and the optimizer steps on the processor: "
            "many times slower"
        )
        if memory.optimizer_offload:
            field = "trainer.memory.optimizer_offload"
            cost += f"; {field} then has no state to move, so set it to false"
        one = _change(trainer, load, "fsdp", "cpu_offload", True, cost, tier=1)
        off = {"optimizer_offload": False, "optimizer_offload_resident": 0.0}
        kept = memory.model_copy(update=off)
        yield replace(one, trainer=one.trainer.model_copy(update={"memory": kept}))
    one = _change(trainer, load, "mesh", "dp_shard", 2 * mesh.dp_shard, "twice the devices", tier=2)
    yield replace(one, load=replace(load, micro_batches=-(-load.micro_batches // 2)))


def _checkpointing(
    model: Model, trainer: Trainer
) -> Iterator[tuple[ModuleCheckpointing | SelectiveCheckpointing | FullCheckpointing, str]]:
    now = trainer.memory.activation_checkpointing
    if now.kind == "full":
        return
    if now.kind in ("none", "modules"):
        named = set(getattr(now, "modules", ()))
        modules = module_choices(model)[0]
        if named < set(modules):
            cost = "these modules of each block are recomputed"
            yield ModuleCheckpointing(kind="modules", modules=modules), cost
    has_experts = any(is_sparse(model, layer) for layer in range(model.num_layers))
    elementwise = "elementwise work of a block is done twice, its products once"
    costs = {
        3: elementwise,
        2: "products of experts are made again" if has_experts else elementwise,
        1: "all products of a block are made again",
    }
    held = set(now.keep) if now.kind == "selective" else set(KEPT[0])
    for keep in KEPT:
        is_less = set(keep) < held or (now.kind != "selective" and set(keep) == held)
        if is_less and (has_experts or "experts" not in keep):
            yield SelectiveCheckpointing(kind="selective", keep=keep), costs[len(keep)]
    cost = "whole blocks are recomputed, also attention: about a third more work"
    yield FullCheckpointing(kind="full"), cost


def module_choices(model: Model) -> list[tuple[RecomputedModule, ...]]:
    """Return two sets of modules to recompute: without matrix products, and all."""
    every = tuple(recomputable_modules(model))
    cheap = tuple(name for name in every if name in ("norms", "experts_activation"))
    return [cheap, every]


def _can_split_attention(model: Model, trainer: Trainer, cp: int) -> bool:
    heads, groups = model.num_heads, model.num_kv_heads
    divides = heads % cp == 0 and (groups % cp == 0 or cp % groups == 0)
    is_free = trainer.mesh.cp_style != "ulysses"
    return model.family != "hugging_face" and (is_free or divides)


def format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Record):
        return str(value.model_dump(mode="json"))
    return repr(value) if isinstance(value, str) else str(value)


def jsonnet_of(fields: Mapping[str, Any]) -> str:
    """Return fields as Jsonnet: `trainer+: { memory+: { activation_offload: true } }`."""
    nested: dict[str, Any] = {}
    for field, value in fields.items():
        *parents, last = field.split(".")
        inside = nested
        for parent in parents:
            inside = inside.setdefault(f"{parent}+", {})
        inside[last] = value.model_dump(mode="json") if isinstance(value, Record) else value

    def spelled(value: Any) -> str:
        if isinstance(value, dict):
            inside = ", ".join(f"{name}: {spelled(one)}" for name, one in value.items())
            return f"{{ {inside} }}"
        if isinstance(value, list):
            return f"[{', '.join(map(spelled, value))}]"
        return repr(value) if isinstance(value, str) else json.dumps(value)

    return ", ".join(f"{name}: {spelled(one)}" for name, one in nested.items())


def advice(chosen: ChosenOptions, needed_bytes: int) -> str:
    options, freed = chosen.options, f"about {chosen.freed_bytes / 2**30:.1f} GiB"
    if not options:
        return (
            "no memory option of the manifest frees memory; it takes a smaller model, "
            "shorter contexts or other devices"
        )
    needed = f"{needed_bytes / 2**30:.1f} GiB"
    places = " and ".join(dict.fromkeys(option.place for option in options))
    each = "; ".join(f"{option} (cost: {option.cost})" for option in options)
    values = f": `{jsonnet_of(chosen.fields)}`" if chosen.fields else ""
    if not chosen.is_enough:
        found = "this option frees" if len(options) == 1 else "all options together free"
        return (
            f"{found} only {freed} of the {needed} that are missing on each rank, so it takes more "
            f"devices too; set in {places}: {each}{values}"
        )
    if len(options) == 1:
        text = (
            f"{options[0]} frees {freed} on each rank (cost: {options[0].cost}); set it in {places}"
        )
    else:
        text = (
            f"no memory option alone frees the {needed} that are missing; "
            f"together these free {freed} on each rank: {each}; set them in {places}"
        )
    return text + values


FRAGMENTATION = 0.065  # torch's unusable / allocated bytes: median of benchmarks/trainer
LARGEST_ERROR = 0.1  # bounds the relative errors in benchmarks/trainer/planned.json
GIB = 2**30


def memory_misfits(run: Manifest) -> Iterator[str]:
    """Yield a sentence per role that certainly exceeds device memory.

    Skip CPUs and family `hugging_face`.
    """
    capacity = usable_bytes(run.hardware.accelerator)
    if capacity is None or run.model.family == "hugging_face":
        return
    least_engine = _least_engine_bytes(run)
    if least_engine > capacity:
        yield _engine_sentence(run, least_engine, capacity)
    elif run.inference.prefill is not None:
        one = run.model_copy(update={"inference": run.inference.of_engine(0)})
        if (least := _least_engine_bytes(one)) > capacity:
            yield _prefill_sentence(one, least, capacity)
    if (found := _trainer_misfit(run, capacity)) is not None:
        yield _trainer_sentence(found, capacity, "needs", "")


def memory_doubts(run: Manifest) -> Iterator[str]:
    """Yield a sentence per role whose planned memory exceeds a device's."""
    capacity = usable_bytes(run.hardware.accelerator)
    if capacity is None or run.model.family == "hugging_face" or any(memory_misfits(run)):
        return
    shapes = {"inference": run.inference}
    if run.inference.prefill is not None:
        shapes["inference.prefill"] = run.inference.of_engine(0)
    engines_fit = True
    for name, shape in shapes.items():
        if (planned := _engine_bytes(run, shape)) > capacity:
            engines_fit = False
            most = max(0, shape.kv_cache_bytes - (planned - capacity)) >> 30 << 30
            remedy = f"set {name}.kv_cache_bytes to {most}" if most else "take more devices"
            yield (
                f"{name}: by its plan a device needs {_gib(planned)} and has {_gib(capacity)}, so "
                f"it may run out of memory; {remedy}"
            )
    if engines_fit and (found := _trainer_misfit(run, capacity, is_certain=False)) is not None:
        doubt = ", so it may run out of memory"
        yield _trainer_sentence(found, capacity, "by its plan needs", doubt)


def _trainer_sentence(found: "_TrainerMisfit", capacity: int, needs: str, doubt: str) -> str:
    beside = " beside the engine" if found.room_bytes < capacity else ""
    return (
        f"trainer of stage {found.stage}: a device {needs} {_gib(found.needed_bytes)} and has "
        f"{_gib(found.room_bytes)}{beside}{doubt}; {advice(found.chosen, found.missing_bytes)}"
    )


def fitting_fields(run: Manifest) -> dict[str, Any]:
    """Return {field: value} that makes the engines or, if they fit, the trainer fit into memory.

    Add no devices. Return {} if the run fits or no change suffices.
    """
    capacity = usable_bytes(run.hardware.accelerator)
    if capacity is None or run.model.family == "hugging_face":
        return {}
    if (missing := _engine_bytes(run, run.inference) - capacity) > 0:
        changes = {"kv_cache_bytes": run.inference.kv_cache_bytes - missing >> 30 << 30}
        changed = _changed(run, changes)
        fits = changed is not None and _engine_bytes(changed, changed.inference) <= capacity
        return {"inference.kv_cache_bytes": changes["kv_cache_bytes"]} if fits else {}
    found = _trainer_misfit(run, capacity, is_certain=False, max_tier=1)
    return found.chosen.fields if found is not None and found.chosen.is_enough else {}


@dataclass(frozen=True)
class _TrainerMisfit:
    stage: str
    needed_bytes: int
    room_bytes: int
    missing_bytes: int
    chosen: ChosenOptions


def _trainer_misfit(
    run: Manifest, capacity: int, is_certain: bool = True, max_tier: int = 2
) -> _TrainerMisfit | None:
    """Return the first stage whose trainer exceeds device memory.

    `is_certain`: count only the bytes that `memory_misfits` counts.
    """
    engine_bytes = _least_engine_bytes(run) if is_certain else _engine_bytes(run, run.inference)
    stages = ["rl"] if run.stages.sft is None else ["sft", "rl"]
    counted = count_parameters(run.model, run.trainer.lora)
    for stage in stages:
        trainer, load = stage_workload(run, stage)
        room = capacity
        if run.hardware.shared_devices and stage == "rl":
            room = max(0, capacity - engine_bytes)
        plan = plan_memory(run.model, trainer, load, capacity, counted)
        needed = least = plan.peak_bytes + sum(unplanned_bytes(run, plan).values())
        if is_certain:
            least = int((1 - LARGEST_ERROR) * plan.peak_bytes) + CONTEXT_BYTES
        if least > room:
            missing = needed - room
            chosen = choose_options(
                run.model, trainer, load, capacity, missing, counted, max_tier=max_tier
            )
            return _TrainerMisfit(stage, needed, room, missing, chosen)
    return None


def _least_engine_bytes(run: Manifest) -> int:
    weights, _ = weight_bytes(run.model, run.inference)
    return weights + run.inference.kv_cache_bytes + CONTEXT_BYTES


def _engine_bytes(run: Manifest, inference: Inference) -> int:
    return sum(engine.memory_of(run, inference).values())


def unplanned_bytes(run: Manifest, plan: MemoryPlan) -> dict[str, int]:
    """Return {kind: a trainer rank's device bytes that `plan` omits}."""
    found, mesh = {}, run.trainer.mesh
    if run.hardware.accelerator != "cpu":
        found["fragmentation"] = int(FRAGMENTATION * plan.peak_bytes)
        found["context"] = CONTEXT_BYTES
    if mesh.world_size > 1:
        found["communication buffers"] = NCCL_BYTES
    if row := run.choice_bytes:
        found["chosen keys"] = run.trainer.memory.max_tokens_per_micro_batch // mesh.cp * row
    return found


def _engine_sentence(run: Manifest, needed: int, capacity: int) -> str:
    weights, _ = weight_bytes(run.model, run.inference)
    cache = run.inference.kv_cache_bytes
    text = (
        f"inference: a device needs {_gib(weights)} for weights and {_gib(cache)} for the cache, "
        f"and has {_gib(capacity)}"
    )
    found = []
    missing = max(needed, _engine_bytes(run, run.inference)) - capacity
    for what, changes in _engine_changes(run, missing):
        changed = _changed(run, changes)
        if changed is not None and (freed := needed - _least_engine_bytes(changed)) > 0:
            found.append((freed, what))
    enough = [one for one in found if needed - one[0] <= capacity]
    if enough:
        return f"{text}; {' or '.join(f'{what} frees {_gib(freed)}' for freed, what in enough)}"
    if found:
        freed, what = max(found)
        return f"{text}; {what} frees {_gib(freed)}, which is not enough: it takes more devices too"
    return f"{text}; it takes a smaller model, or engines of more devices"


def _prefill_sentence(one: Manifest, needed: int, capacity: int) -> str:
    remedy = "set its kv_cache_bytes to less, or its data_parallel to more"
    if one.inference.quantization == "none":
        fp8 = one.inference.model_copy(update={"quantization": "fp8"})
        freed = needed - _least_engine_bytes(one.model_copy(update={"inference": fp8}))
        remedy += f"; inference.quantization: 'fp8' frees {_gib(freed)}"
    return (
        f"inference.prefill: a device needs {_gib(needed)} for weights and cache, and has "
        f"{_gib(capacity)}; {remedy}"
    )


def _engine_changes(run: Manifest, missing: int) -> Iterator[tuple[str, dict[str, Any]]]:
    one = run.inference
    if one.quantization == "none":
        yield "inference.quantization: 'fp8'", {"quantization": "fp8"}
    if run.model.moe is not None and not one.expert_parallel and one.devices_per_replica > 1:
        yield "inference.expert_parallel: true", {"expert_parallel": True}
    for factor in (2, 4, 8):
        if one.num_replicas % factor or one.prefill_replicas % factor:
            continue
        replicas = {
            "num_replicas": one.num_replicas // factor,
            "prefill_replicas": one.prefill_replicas // factor,
        }
        tensor = one.tensor_parallel * factor
        what = (
            f"inference.tensor_parallel: {tensor} with num_replicas: {one.num_replicas // factor}"
        )
        alone = {"router": {"kind": "none"}} if one.num_replicas == factor else {}
        what += " and router.kind: 'none'" if alone else ""
        yield what, {**replicas, **alone, "tensor_parallel": tensor}
    if (smaller := one.kv_cache_bytes - missing >> 30 << 30) > 0:
        yield f"inference.kv_cache_bytes: {smaller}", {"kv_cache_bytes": smaller}


def _changed(run: Manifest, changes: dict[str, Any]) -> Manifest | None:
    try:
        return with_values(run, {f"inference.{name}": value for name, value in changes.items()})
    except ValidationError:
        return None


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
