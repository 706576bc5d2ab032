"""Find the fastest layouts of a run that fit into device memory. `RunPlan` plans their times.

- The search keeps the numbers of trainer and engine devices and of rollouts, the model, the
  optimizer and precisions.
- For the trainer it varies the mesh, the micro-batch, checkpointing and `SAVINGS`. For engines it
  varies replicas and tensor, data and expert parallel. The cache fills the remaining memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from pydantic import ValidationError

from orrery.manifest.budget.engine import memory
from orrery.manifest.budget.options import KEPT
from orrery.manifest.budget.run import RunPlan
from orrery.manifest.check import with_values
from orrery.manifest.devices import usable_bytes
from orrery.manifest.errors import OrreryError
from orrery.manifest.plan import check_built
from orrery.manifest.schema import Manifest

NUM_LAYOUTS = 3
ROOM = 0.97  # share of usable device memory that a layout may fill
SAVINGS: tuple[dict[str, Any], ...] = (  # each adds its fields to those above, to save memory
    {"fsdp.reshard_after_forward": False, "fsdp.reduce_gradients": "step"},
    {"fsdp.reshard_after_forward": False, "fsdp.reduce_gradients": "micro_batch"},
    {"fsdp.reshard_after_forward": True, "fsdp.reduce_gradients": "micro_batch"},
    {"memory.optimizer_offload": True},
    {"memory.activation_offload": True},
)
SIZES = (0.5, 1, 2)  # micro-batches to try / the run's `max_tokens_per_micro_batch`
POWERS = (1, 2, 4, 8, 16, 32, 64)

Changes = dict[str, Any]  # new values by field


@dataclass(frozen=True)
class Proposal:
    """A layout of the trainer or of the engines.

    `seconds`: planned time of a batch. `device_bytes`: planned memory of one device. `changes`:
    fields in which `manifest` differs from the run.
    """

    seconds: float
    device_bytes: int
    changes: Changes
    manifest: Manifest


def trainer_layouts(run: Manifest, tokens: float | None) -> list[Proposal]:
    """Return the fastest trainer layouts that fit, at most one per mesh and checkpointing."""
    room = _room(run)
    if run.hardware.shared_devices:
        room -= sum(role.total_bytes for role in RunPlan(run, tokens).roles()[1:])
    timed = []
    for changes in _trainer_changes(run):
        changed = _changed(run, changes)
        if changed is not None:
            timed.append((RunPlan(changed, tokens).trainer_s["step"], len(changes), changed))
    timed.sort(key=lambda one: one[:2])
    found: dict[tuple[Any, ...], Proposal] = {}
    for seconds, _, changed in timed:
        trainer = changed.trainer
        key = trainer.mesh, trainer.memory.activation_checkpointing.kind
        if key not in found and (size := _trainer_bytes(changed)) <= room:
            found[key] = Proposal(seconds, size, _differences(run, changed), changed)
            if len(found) == NUM_LAYOUTS:
                break
    return list(found.values())


def engine_layouts(run: Manifest, tokens: float | None) -> list[Proposal]:
    """Return the fastest engine layouts, each with the largest cache that fits."""
    room = _room(run)
    if run.hardware.shared_devices:
        room -= RunPlan(run, tokens).roles()[0].total_bytes
    found = []
    for shape in _shapes(run):
        changed = _with_cache(run, shape, room)
        if changed is not None:
            plan = RunPlan(changed, tokens)
            size = plan.roles()[1].total_bytes
            differences = _differences(run, changed)
            found.append(Proposal(plan.engines["step_s"], size, differences, changed))
    return sorted(found, key=lambda one: (one.seconds, len(one.changes)))[:NUM_LAYOUTS]


def _room(run: Manifest) -> int:
    capacity = usable_bytes(run.hardware.accelerator)
    if capacity is None:
        raise OrreryError(
            f"hardware.accelerator {run.hardware.accelerator!r}: a CPU has no layouts to search; "
            "take a hardware axis with GPUs"
        )
    return int(ROOM * capacity)


def _trainer_changes(run: Manifest) -> Iterator[Changes]:
    longest, now = run.inference.max_model_len_tokens, run.trainer.memory
    sizes = [int(size * now.max_tokens_per_micro_batch) for size in SIZES]
    experts = 0 if run.model.moe is None else run.model.moe.num_experts
    kinds: list[Changes] = [{"kind": "none"}, {"kind": "full"}]
    kinds += [{"kind": "selective", "keep": list(keep)} for keep in KEPT]
    savings: list[Changes] = []
    for more in SAVINGS:
        savings.append({**(savings[-1] if savings else {}), **more})
    for mesh, size, kind, saving in product(
        _meshes(run.trainer.mesh.world_size, experts), sizes, kinds, savings
    ):
        if size < longest:
            continue
        if mesh["dp_shard"] * mesh["cp"] == 1 and saving["fsdp.reduce_gradients"] == "step":
            continue  # a single rank reduces no gradients
        yield {
            **{f"trainer.mesh.{name}": value for name, value in mesh.items()},
            "trainer.memory.max_tokens_per_micro_batch": size,
            "trainer.memory.activation_checkpointing": kind,
            "trainer.memory.optimizer_offload": False,
            "trainer.memory.activation_offload": False,
            **{f"trainer.{name}": value for name, value in saving.items()},
        }


def _meshes(world: int, experts: int) -> Iterator[dict[str, int]]:
    for cp in (cp for cp in POWERS[:4] if world % cp == 0):
        ranks = world // cp
        for replicate in (n for n in (1, 2) if ranks % n == 0):
            shard = ranks // replicate
            for ep in POWERS if experts else (1,):
                if shard * cp % ep == 0 and (ep == 1 or experts % ep == 0):
                    yield {"dp_replicate": replicate, "dp_shard": shard, "cp": cp, "ep": ep}


def _trainer_bytes(run: Manifest) -> int:
    return RunPlan(run, None).roles()[0].total_bytes


def _shapes(run: Manifest) -> Iterator[Changes]:
    one, hardware = run.inference, run.hardware
    apart = one.prefill_replicas if one.prefill is not None else 0
    devices = (one.num_replicas - apart) * one.devices_per_replica
    for tensor, data in product(POWERS[:4], POWERS):
        replicas, rest = divmod(devices, tensor * data)
        prefill, odd = apart, 0
        if not apart:
            prefill, odd = divmod(one.prefill_replicas * replicas, one.num_replicas)
        if rest or odd or not replicas:
            continue
        replicas += apart
        nodes = 1 if hardware.num_nodes == 1 else -(-tensor * data // hardware.devices_per_node)
        is_mixture = run.model.moe is not None and tensor * data > 1
        for expert_parallel in (False, True) if is_mixture else (False,):
            changes: Changes = {
                "inference.num_replicas": replicas,
                "inference.prefill_replicas": prefill,
                "inference.nodes_per_replica": nodes,
                "inference.tensor_parallel": tensor,
                "inference.data_parallel": data,
                "inference.expert_parallel": expert_parallel,
            }
            if replicas == 1:
                changes["inference.router"] = {"kind": "none"}
            yield changes


def _with_cache(run: Manifest, shape: Changes, room: int) -> Manifest | None:
    """Return the run with engine layout `shape` and the largest cache in whole GiB, if one fits."""
    fields = {name.removeprefix("inference."): value for name, value in shape.items()}
    shaped = run.inference.model_copy(
        update={name: value for name, value in fields.items() if name != "router"}
    )
    has_adapters = run.transport.weights == "adapters"
    needed = memory(run.model, shaped, True, has_adapters)
    cache = room - sum(needed.values()) + needed["cache"]
    if (cache := cache >> 30 << 30) <= 0:
        return None
    return _changed(run, {**shape, "inference.kv_cache_bytes": cache})


def _changed(run: Manifest, changes: Changes) -> Manifest | None:
    """Return the run with `changes`, or None if a constraint or `check_built` forbids them."""
    try:
        changed = with_values(run, changes)
        check_built(changed)
    except (ValidationError, OrreryError):
        return None
    return changed


def _differences(run: Manifest, changed: Manifest) -> Changes:
    before, after = run.model_dump(mode="json"), changed.model_dump(mode="json")
    found: Changes = {}
    for section, parts in (("trainer", ("mesh", "fsdp", "memory")), ("inference", ("",))):
        for part in parts:
            old, new = before[section], after[section]
            old, new = (old[part], new[part]) if part else (old, new)
            name = f"{section}.{part}." if part else f"{section}."
            found |= {name + key: new[key] for key in new if new[key] != old[key]}
    return found
