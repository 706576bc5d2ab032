"""Format the plan of a run's RL stage as text of at most 100 columns."""

import textwrap
from collections.abc import Iterator

from orrery.manifest.budget.options import format_value
from orrery.manifest.budget.run import RunBudget, RunPlan
from orrery.manifest.budget.search import Proposal, engine_layouts, trainer_layouts
from orrery.manifest.schema import Manifest

GIB = 2**30
PARTS = (  # rows of the trainer's step, in the order of the table
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
            yield _row("sum of both on one device", [sum(role.total_bytes for role in roles)])
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


def _trainer_step(budget: RunBudget) -> Iterator[str]:
    yield "time of a trainer's step, s"
    for part in PARTS:
        if seconds := budget.trainer_s[part]:
            yield f"  {NAMES.get(part, part):26}{seconds:18,.3f}"
    yield f"  {'sum':26}{budget.trainer_s['step']:18,.3f}"


def _speed(budget: RunBudget) -> Iterator[str]:
    engines, update, checkpoint = budget.engines, budget.update, budget.checkpoint
    yield f"speed: {in_seconds(budget.step_s)} a step, set by {budget.slower}"
    trainer_s = budget.trainer_s["step"]
    yield _line(
        "trainer",
        f"{in_seconds(trainer_s)} a batch, {budget.trainer_tokens_per_s:,.0f} tokens/s",
    )
    sampled = engines["sampled_tokens_per_s"]
    yield _line(
        "engines", f"{in_seconds(engines['step_s'])} a batch, {sampled:,.0f} sampled tokens/s"
    )
    yield _line(
        "one engine rank",
        f"{engines['sequences_a_rank']:,.0f} sequences, decodes "
        f"{engines['decode_tokens_per_s_of_a_rank']:,.0f} and prefills "
        f"{engines['prefill_tokens_per_s_of_a_rank']:,.0f} tokens/s",
    )
    yield _line("longest rollouts only", f"{in_seconds(budget.longest_step_s)} a step")
    yield _line("mean staleness", f"about {budget.staleness:.1f} steps")
    yield _line("weight update", f"{in_seconds(update['seconds'])}")
    yield _line(
        "checkpoint",
        f"{_gb(checkpoint['bytes'])}, training waits {in_seconds(checkpoint['waits_s'])}, "
        f"on disk {in_seconds(checkpoint['writes_s'])} later",
    )


def _traffic(budget: RunBudget) -> Iterator[str]:
    yield "bytes of a step"
    for name, num_bytes in budget.traffic_bytes.items():
        rate = 8 * num_bytes / budget.step_s / 1e9
        speed = f"{rate:,.0f}" if rate >= 100 else f"{rate:.2g}"
        yield _line(name, f"{_gb(num_bytes)}, {speed} Gb/s")
    for name, links in budget.collective_bytes.items():
        network = f", {_gb(links['network'])} between nodes" if links["network"] else ""
        yield _line(name, f"{_gb(links['links'])} inside nodes{network}")
    gathers = [f"{_gb(size)} {how}" for how, size in budget.layer_gather_bytes.items()]
    if gathers:
        yield _line("gather of largest layer", ", ".join(gathers))


def search(run: Manifest, tokens: float | None) -> Iterator[str]:
    """Yield lines: the fastest layouts of trainer and engines, each with the fields to set."""
    now = RunPlan(run, tokens)
    yield from _proposals("trainer", now.trainer_s["step"], trainer_layouts(run, tokens))
    yield ""
    yield from _proposals("engines", now.engines["step_s"], engine_layouts(run, tokens))


def _proposals(role: str, now_s: float, layouts: list[Proposal]) -> Iterator[str]:
    yield f"{role}: {in_seconds(now_s)} a batch as it is; the fastest layouts that fit:"
    for number, one in enumerate(layouts, 1):
        yield f"  {number}. {in_seconds(one.seconds)}, {one.device_bytes / GIB:,.1f} GiB a device"
        for field, value in one.changes.items():
            yield f"       {field}: {format_value(value)}"
        if not one.changes:
            yield "       the run as it is"
    if not layouts:
        yield "  none: take more devices, a smaller model or shorter rollouts"


def _line(name: str, text: str) -> str:
    return f"  {name:26}{text}"


def _row(name: str, row: list[int | None]) -> str:
    cells = (f"{each / GIB:,.2f}" if each else "-" for each in row)
    return f"  {name:26}" + "".join(f"{cell:>18}" for cell in cells)


def in_seconds(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.2g} s"


def _gb(num_bytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.3g} {unit}"
    return f"{num_bytes / 1e3:,.3g} kB"
