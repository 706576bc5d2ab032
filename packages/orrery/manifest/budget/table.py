"""Format an RL stage's plan, and find the fastest layouts that fit into memory.

Layouts change only parallelism, memory options, and sizes of micro-batches and KV caches.
"""

import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from pydantic import ValidationError

from orrery.manifest.budget.engine import memory
from orrery.manifest.budget.options import KEPT, format_value, module_choices
from orrery.manifest.budget.run import WEIGHTS, RoleBudget, RunBudget, RunPlan
from orrery.manifest.check import with_values
from orrery.manifest.devices import usable_bytes
from orrery.manifest.errors import OrreryError
from orrery.manifest.plan import check_built
from orrery.manifest.schema import Manifest, Trainer

NUM_LAYOUTS = 3
HOST_BYTES = 1.9e12  # default memory of a node
GAIN = 0.01  # minimum share of time that a proposed layout saves, if the run fits
ROOM = 0.97  # share of usable memory that a layout may take
SAVINGS: tuple[dict[str, Any], ...] = (  # memory savings to try, cumulatively
    {"fsdp.reshard_after_forward": False, "fsdp.reduce_gradients": "step"},
    {"fsdp.reshard_after_forward": False, "fsdp.reduce_gradients": "micro_batch"},
    {"fsdp.reshard_after_forward": True, "fsdp.reduce_gradients": "micro_batch"},
    {"memory.optimizer_offload": True, "memory.optimizer_offload_resident": 0.5},
    {"memory.optimizer_offload_resident": 0.0},
    {"memory.activation_offload": True},
)
SIZES = (0.5, 1, 2)  # relative micro-batch sizes to try
EVERY = (1, 2)  # `activation_checkpointing_every` to try with kind "full"
POWERS = (1, 2, 4, 8, 16, 32, 64)

Changes = dict[str, Any]  # new values by field


@dataclass(frozen=True)
class Proposal:
    """A layout of the trainer or the engines.

    `seconds`: time to train or generate a batch. `role`: the layout's planned memory.
    """

    seconds: float
    role: RoleBudget
    changes: Changes
    manifest: Manifest


def trainer_layouts(
    run: Manifest,
    tokens: float | None,
    network: float | None = None,
    host_bytes: float = HOST_BYTES,
) -> list[Proposal]:
    """Return the fastest layouts that fit, one per mesh and kind of activation checkpointing."""
    room, now = _room(run), RunPlan(run, tokens, network)
    if run.hardware.shared_devices:
        room -= max(role.total_bytes for role in now.roles()[1:])
    timed = []
    for changes in _trainer_changes(run):
        plan = RunPlan(_with_trainer(run, changes), tokens, network, now.counted)
        timed.append((plan.trainer_s["step"], len(changes), changes, plan))
    timed.sort(key=lambda one: one[:2])
    found: dict[tuple[Any, ...], Proposal] = {}
    for seconds, _, changes, plan in timed:
        key = plan.trainer.mesh, plan.trainer.memory.activation_checkpointing.kind
        if key in found:
            continue
        role = plan.roles()[0]
        if role.total_bytes > room or role.host_bytes > host_bytes:
            continue
        if (changed := _changed(run, changes)) is not None:
            found[key] = Proposal(seconds, role, _differences(run, changed), changed)
            if len(found) == NUM_LAYOUTS:
                break
    return list(found.values())


def _with_trainer(run: Manifest, changes: Changes) -> Manifest:
    trainer = run.trainer.model_dump(mode="json")
    for field, value in changes.items():
        _, *section, name = field.split(".")
        place = trainer[section[0]] if section else trainer
        place[name] = value
    return run.model_copy(update={"trainer": Trainer.model_validate(trainer)})


def engine_layouts(
    run: Manifest, tokens: float | None, network: float | None = None
) -> list[Proposal]:
    room = _room(run)
    if run.hardware.shared_devices:
        room -= RunPlan(run, tokens).roles()[0].total_bytes
    found = []
    for shape in _shapes(run):
        changed = _with_cache(run, shape, room)
        if changed is not None:
            plan = RunPlan(changed, tokens, network)
            role, differences = plan.roles()[1], _differences(run, changed)
            found.append(Proposal(plan.engines["step_s"], role, differences, changed))
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
    kinds: list[tuple[Changes, int]] = [({"kind": "none"}, 1)]
    kinds += [({"kind": "full"}, every) for every in EVERY]
    kinds += [({"kind": "selective", "keep": list(keep)}, 1) for keep in KEPT]
    choices = module_choices(run.model)
    kinds += [({"kind": "modules", "modules": list(modules)}, 1) for modules in choices]
    savings: list[Changes] = []
    for more in SAVINGS:
        savings.append({**(savings[-1] if savings else {}), **more})
    for mesh, size, (kind, every), saving in product(
        _meshes(run.trainer.mesh.world_size, experts), sizes, kinds, savings
    ):
        if size < longest:
            continue
        if mesh["dp_shard"] * mesh["cp"] == 1 and saving["fsdp.reduce_gradients"] == "step":
            continue
        yield {
            **{f"trainer.mesh.{name}": value for name, value in mesh.items()},
            "trainer.memory.max_tokens_per_micro_batch": size,
            "trainer.memory.activation_checkpointing": kind,
            "trainer.memory.activation_checkpointing_every": every,
            "trainer.memory.optimizer_offload": False,
            "trainer.memory.optimizer_offload_resident": 0.0,
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


def _shapes(run: Manifest) -> Iterator[Changes]:
    one, hardware = run.inference, run.hardware
    is_apart = one.prefill is not None
    first = one.of_engine(0).devices_per_replica
    counts = range(1, one.prefill_replicas + 1) if is_apart else (0,)
    for apart, tensor, data in product(counts, POWERS[:4], POWERS):
        devices = one.num_devices - apart * first
        replicas, rest = divmod(devices, tensor * data)
        prefill, odd = apart, 0
        if not is_apart:
            prefill, odd = divmod(one.prefill_replicas * replicas, one.num_replicas)
        if rest or odd or replicas < 1:
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


GIB = 2**30
PARTS = (
    "dense products", "grouped products", "attention", "lm head", "elementwise",
    "sharding copies", "copies", "communication", "optimizer", "idle",
)  # fmt: skip
NAMES = {
    "dense products": "matrix products",
    "grouped products": "products of experts",
    "lm head": "LM head",
    "sharding copies": "copies of FSDP",
    "copies": "copies to the host",
    "communication": "communication, not hidden",
}


def lines(budget: RunBudget) -> Iterator[str]:
    yield from _memory(budget)
    yield ""
    yield from _trainer_step(budget)
    yield ""
    yield from _speed(budget)
    yield ""
    yield from _traffic(budget)
    yield ""
    yield "assumptions"
    for text in budget.assumptions:
        yield f"  {text}"


def _memory(budget: RunBudget) -> Iterator[str]:
    roles = budget.roles
    heads = "".join(f"{f'{role.role} × {role.num_devices}':>18}" for role in roles)
    yield f"{'memory of a device, GiB':28}{heads}"
    for kind in dict.fromkeys(kind for role in roles for kind in role.memory):
        if any(role.memory.get(kind) for role in roles):
            yield _row(kind, [role.memory.get(kind) for role in roles])
    yield _row("sum", [role.total_bytes for role in roles])
    if budget.capacity_bytes is not None:
        yield _row("capacity", [budget.capacity_bytes for _ in roles])
        if budget.shares_devices:
            fullest = max(role.total_bytes for role in roles[1:])  # engines share no device
            yield _row("sum of both on one device", [roles[0].total_bytes + fullest])
    for name, kinds in budget.other_ep.items():
        large = {kind: size / GIB for kind, size in kinds.items() if abs(size) >= GIB / 100}
        each = ", ".join(f"{kind} {size:+,.1f}" for kind, size in large.items())
        total = f"{sum(kinds.values()) / GIB:+,.1f}"
        yield from textwrap.wrap(
            f"trainer {name}: {total}" + (f" ({each})" if each else ""), 96, initial_indent="  ",
            subsequent_indent="    ",
        )  # fmt: skip
    rows = {"host memory": "host_bytes", "of it pinned": "pinned_bytes", "scratch": "scratch_bytes"}
    found = {name: [getattr(role, field) for role in roles] for name, field in rows.items()}
    if any(map(any, found.values())):
        yield "memory of a node, GiB"
    for name, row in found.items():
        if any(row):
            yield _row(name, row)


def host_misfits(budget: RunBudget, memory_per_node_mb: int) -> Iterator[str]:
    for role in budget.roles:
        needed_mb = -(-role.host_bytes // 2**20)
        if needed_mb > memory_per_node_mb:
            yield (
                f"{role.role} needs {needed_mb} MB of a node's memory, and "
                f"slurm.memory_per_node_mb is {memory_per_node_mb}; raise it, or keep less on hosts"
            )


def warning_misfit(budget: RunBudget, warning_s: float) -> Iterator[str]:
    needed_s = budget.step_s + sum(budget.checkpoint[name] for name in ("waits_s", "writes_s"))
    if needed_s > warning_s:
        yield (
            f"slurm.warning_s {warning_s:g}: a step and its checkpoint take {needed_s:,.0f} s; set "
            "it to at least that, or a job's last steps are lost"
        )


def _trainer_step(budget: RunBudget) -> Iterator[str]:
    yield "time of a trainer's step, s"
    digits = 1 if budget.trainer_s["step"] >= 10 else 3
    for part in PARTS:
        if seconds := budget.trainer_s[part]:
            yield f"  {NAMES.get(part, part):26}{seconds:18,.{digits}f}"
    yield f"  {'sum':26}{budget.trainer_s['step']:18,.{digits}f}"


def _speed(budget: RunBudget) -> Iterator[str]:
    engines, update, checkpoint = budget.engines, budget.update, budget.checkpoint
    yield f"speed: {in_seconds(budget.step_s)} a step, set by {budget.slower}"

    def busy(seconds: float) -> str:
        share = 100 * seconds / budget.step_s
        return f"busy for {share:.0f} % of a step" if share >= 1 else "nearly idle"

    trainer_s, batch_s = budget.trainer_s["step"], engines["step_s"]
    trained = f"{budget.trainer_tokens_per_s:,.0f} tokens/s"
    yield _line("trainer", f"{in_seconds(trainer_s)} a batch, {trained}, {busy(trainer_s)}")
    sampled = f"{engines['sampled_tokens_per_s']:,.0f} sampled tokens/s"
    yield _line("engines", f"{in_seconds(batch_s)} a batch, {sampled}, {busy(batch_s)}")
    decodes, prefills = (
        f"{engines[f'{how}_tokens_per_s_of_a_rank']:,.0f} tokens/s" for how in ("decode", "prefill")
    )
    yield _line(
        "a decoding rank",
        f"{engines['sequences_a_rank']:,.0f} sequences, {decodes}, "
        f"{in_seconds(engines['decode_step_s'])} a step",
    )
    cached = engines["cache_tokens_of_a_rank"]
    rollouts = f"{cached / budget.tokens['all']:,.0f} rollouts of mean length"
    yield _line("its cache", f"{cached:,.0f} tokens, {rollouts}")
    if seconds := engines["prefill_s"]:
        prefills += f", {busy(seconds)}"
    yield _line("a prefilling rank", prefills)
    yield _line(
        "spread lengths", f"{in_seconds(budget.spread_step_s)} a step, with exponential lengths"
    )
    yield _line("longest rollouts only", f"{in_seconds(budget.longest_step_s)} a step")
    all_s, devices = budget.num_steps * budget.step_s, budget.num_devices
    yield _line(
        "all steps",
        f"{budget.num_steps:,}, {in_seconds(all_s)}, {devices * all_s / 3600:,.0f} device hours",
    )
    yield _line(
        "mean staleness",
        f"about {budget.staleness:.1f} steps, {budget.spread_staleness:.1f} if lengths spread",
    )
    if budget.too_old["groups"]:
        share, steps = budget.too_old["groups"], budget.too_old["steps"]
        yield _line(
            "dropped as too old",
            f"{share:.0%} of groups, if lengths spread; max_off_policy_steps {steps:.0f} keeps all",
        )
    yield _line("weight update", f"{in_seconds(update['seconds'])}")
    for role, load in budget.loading.items():
        size, time_s = _gb(load["bytes"]), in_seconds(load["seconds"])
        yield _line(f"loading, {role} node", f"{time_s}, {size}")
    yield _line(
        "checkpoint",
        f"{_gb(checkpoint['bytes'])}, training waits {in_seconds(checkpoint['waits_s'])}, "
        f"on disk {in_seconds(checkpoint['writes_s'])} later",
    )
    yield _line("checkpoints on disk", f"at most {_gb(checkpoint['disk_bytes'])}")


def _traffic(budget: RunBudget) -> Iterator[str]:
    yield "bytes of a step"
    for name, num_bytes in budget.traffic_bytes.items():
        rate = 8 * num_bytes / budget.step_s / 1e9
        speed = f"{rate:,.0f}" if rate >= 100 else f"{rate:.2g}"
        how = f"{speed} Gb/s"
        if name == WEIGHTS:
            how = f"all within the {in_seconds(budget.update['seconds'])} of an update"
        yield _line(name, f"{_gb(num_bytes)}, {how}")
    for name, links in budget.collective_bytes.items():
        network = f", {_gb(links['network'])} between nodes" if links["network"] else ""
        yield _line(name, f"{_gb(links['links'])} inside nodes{network}")
    gathers = [f"{_gb(size)} {how}" for how, size in budget.layer_gather_bytes.items()]
    if gathers:
        yield _line("gather of largest layer", ", ".join(gathers))


def search(
    run: Manifest,
    tokens: float | None,
    network: float | None,
    host_bytes: float = HOST_BYTES,
) -> Iterator[str]:
    now = RunPlan(run, tokens, network)
    sizes = [role.total_bytes for role in now.roles()]
    layouts = trainer_layouts(run, tokens, network, host_bytes)
    yield from _proposals("trainer", now.trainer_s["step"], sizes[0] <= _room(run), layouts)
    yield ""
    layouts = engine_layouts(run, tokens, network)
    yield from _proposals("engines", now.engines["step_s"], max(sizes[1:]) <= _room(run), layouts)


def _proposals(role: str, now_s: float, fits: bool, layouts: list[Proposal]) -> Iterator[str]:
    """Describe the layouts. If the run `fits`, omit layouts that are not faster."""
    yield f"{role}: {in_seconds(now_s)} a batch as it is; the fastest layouts that fit:"
    most_s = (1 - GAIN) * now_s if fits else math.inf
    shown = [one for one in layouts if one.seconds < most_s]
    for number, one in enumerate(shown, 1):
        host = f", {one.role.host_bytes / GIB:,.0f} GiB a node" if one.role.host_bytes else ""
        size = f"{one.role.total_bytes / GIB:,.1f} GiB a device{host}"
        yield f"  {number}. {in_seconds(one.seconds)}, {size}"
        for field, value in one.changes.items():
            yield f"       {field}: {format_value(value)}"
    if layouts and not shown:
        yield "  none is faster than the run as it is"
    if not layouts:
        yield "  none: take more devices, a smaller model or shorter rollouts"


def _line(name: str, text: str) -> str:
    return f"  {name:26}{text}"


def _row(name: str, row: list[int | None]) -> str:
    cells = (f"{each / GIB:,.2f}" if each else "-" for each in row)
    return f"  {name:26}" + "".join(f"{cell:>18}" for cell in cells)


def in_seconds(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:,.1f} h"
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _gb(num_bytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.3g} {unit}"
    return f"{num_bytes / 1e3:,.3g} kB"
