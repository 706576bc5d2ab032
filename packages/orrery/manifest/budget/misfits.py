"""Report roles (trainer, engines) that need more than a device's memory, and the fields to change.

A role is reported only if it certainly does not fit: a trainer's planned peak is first lowered by
`LARGEST_ERROR`. For an engine only weights, cache and CUDA context count.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from orrery.manifest.budget.engine import CONTEXT_BYTES, weight_bytes
from orrery.manifest.budget.options import ChosenOptions, advice, choose_options
from orrery.manifest.budget.parameters import count_parameters
from orrery.manifest.budget.rates import usable_bytes
from orrery.manifest.budget.trainer_memory import plan_memory, stage_workload
from orrery.manifest.check import with_values
from orrery.manifest.schema import Manifest

LARGEST_ERROR = 0.08  # largest error of planned peaks in benchmarks/trainer/planned.json
GIB = 2**30


def memory_misfits(run: Manifest) -> Iterator[str]:
    """Yield a sentence per misfit. Yield none on a CPU or for family `hugging_face`."""
    capacity = usable_bytes(run.hardware.accelerator)
    if capacity is None or run.model.family == "hugging_face":
        return
    least_engine = _least_engine_bytes(run)
    if least_engine > capacity:
        yield _engine_sentence(run, least_engine, capacity)
    if (found := _trainer_misfit(run, capacity)) is not None:
        beside = " beside the engine" if found.room_bytes < capacity else ""
        yield (
            f"trainer of stage {found.stage}: a device needs {_gib(found.needed_bytes)} and has "
            f"{_gib(found.room_bytes)}{beside}; {advice(found.chosen, found.missing_bytes)}"
        )


def fitting_fields(run: Manifest) -> dict[str, Any]:
    """Return new values, by field, that make the engines fit, or else the trainer."""
    capacity = usable_bytes(run.hardware.accelerator)
    if capacity is None or run.model.family == "hugging_face":
        return {}
    if (missing := _least_engine_bytes(run) - capacity) > 0:
        changes = {"kv_cache_bytes": run.inference.kv_cache_bytes - missing >> 30 << 30}
        changed = _changed(run, changes)
        fits = changed is not None and _least_engine_bytes(changed) <= capacity
        return {"inference.kv_cache_bytes": changes["kv_cache_bytes"]} if fits else {}
    found = _trainer_misfit(run, capacity)
    return found.chosen.fields if found is not None and found.chosen.is_enough else {}


@dataclass(frozen=True)
class _TrainerMisfit:
    stage: str
    needed_bytes: int
    room_bytes: int
    missing_bytes: int
    chosen: ChosenOptions


def _trainer_misfit(run: Manifest, capacity: int) -> _TrainerMisfit | None:
    least_engine = _least_engine_bytes(run)
    stages = ["rl"] if run.stages.sft is None else ["sft", "rl"]
    counted = count_parameters(run.model, run.trainer.lora)
    for stage in stages:
        trainer, load = stage_workload(run, stage)
        room = capacity
        if run.hardware.shared_devices and stage == "rl":
            room = max(0, capacity - least_engine)
        plan = plan_memory(run.model, trainer, load, capacity, counted)
        least = int((1 - LARGEST_ERROR) * plan.peak_bytes) + CONTEXT_BYTES
        if least > room:
            missing = plan.peak_bytes + CONTEXT_BYTES - room
            chosen = choose_options(run.model, trainer, load, capacity, missing, counted)
            return _TrainerMisfit(stage, plan.peak_bytes, room, missing, chosen)
    return None


def _least_engine_bytes(run: Manifest) -> int:
    weights, _ = weight_bytes(run.model, run.inference)
    return weights + run.inference.kv_cache_bytes + CONTEXT_BYTES


def _engine_sentence(run: Manifest, needed: int, capacity: int) -> str:
    weights, _ = weight_bytes(run.model, run.inference)
    cache = run.inference.kv_cache_bytes
    text = (
        f"inference: a device needs {_gib(weights)} for weights and {_gib(cache)} for the cache, "
        f"and has {_gib(capacity)}"
    )
    found = []
    for what, changes in _engine_changes(run, needed - capacity):
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
