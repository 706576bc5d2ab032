"""The plan of a run as text of at most 100 columns."""

from collections.abc import Iterator

from orrery.manifest.budget.run import RunBudget

GIB = 2**30
PARTS = (  # rows of the step, in the order of the table
    "dense products", "grouped products", "attention", "lm head", "elementwise",
    "sharding copies", "copies", "communication", "optimizer", "idle", "step",
)  # fmt: skip


def lines(budget: RunBudget) -> Iterator[str]:
    yield from _memory(budget)
    for sentence in budget.misfits:
        yield f"does not fit: {sentence}"
    yield ""
    yield from _time(budget)
    yield ""
    for name, num_bytes in budget.traffic_bytes.items():
        rate = 8 * num_bytes / budget.step_s / 1e9
        yield f"{name}: {_gb(num_bytes)} a step, {rate:.2g} Gb/s"
    gathers = (f"{_gb(size)} {how}" for how, size in budget.layer_gather_bytes.items())
    yield f"largest gather of a layer: {', '.join(gathers)}"
    update, checkpoint = budget.update, budget.checkpoint
    yield f"weight update: {_gb(update['bytes'])} in {update['seconds']:,.2f} s"
    yield (
        f"checkpoint: {_gb(checkpoint['bytes'])}, training waits {checkpoint['waits_s']:,.1f} s, "
        f"written after {checkpoint['writes_s']:,.1f} s"
    )
    for text in budget.assumptions:
        yield f"assumed: {text}"


def _memory(budget: RunBudget) -> Iterator[str]:
    roles = budget.roles
    heads = "".join(f"{f'{role.role} × {role.num_devices}':>18}" for role in roles)
    yield f"{'a device, GiB':26}{heads}"
    for kind in dict.fromkeys(kind for role in roles for kind in role.memory):
        yield f"  {kind:24}" + "".join(_cell(role.memory.get(kind)) for role in roles)
    yield f"  {'in all':24}" + "".join(_cell(role.total_bytes) for role in roles)
    if budget.capacity_bytes is not None:
        yield f"  {'capacity':24}" + _cell(budget.capacity_bytes) * len(roles)
    yield f"{'a node, GiB':26}"
    for what in ("host", "pinned", "scratch"):
        yield f"  {what:24}" + "".join(_cell(getattr(role, f"{what}_bytes")) for role in roles)


def _time(budget: RunBudget) -> Iterator[str]:
    yield f"{'trainer, s a step':26}"
    for part in PARTS:
        if seconds := budget.trainer_s[part]:
            yield f"  {part:24}{seconds:18,.3f}"
    engines = budget.engines
    yield (
        f"trainer: {budget.trainer_tokens_per_s:,.0f} tokens/s; engines: "
        f"{engines['sampled_tokens_per_s']:,.0f} sampled tokens/s, "
        f"{engines['step_s']:,.1f} s a batch"
    )
    yield (
        f"engine rank: {engines['sequences_a_rank']:,.0f} sequences, decodes "
        f"{engines['decode_tokens_per_s_of_a_rank']:,.0f} and prefills "
        f"{engines['prefill_tokens_per_s_of_a_rank']:,.0f} tokens/s"
    )
    yield (
        f"step: {budget.step_s:,.1f} s, set by {budget.slower}; "
        f"mean staleness about {budget.staleness:.1f}"
    )


def _cell(num_bytes: int | None) -> str:
    return f"{'' if num_bytes is None else format(num_bytes / GIB, ',.2f'):>18}"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.3g} GB" if num_bytes < 1e12 else f"{num_bytes / 1e12:,.3g} TB"
