"""Levers: changes of a manifest that free memory of the device, from the cheapest to the dearest, and which of them to pull.

- What a lever frees is the difference of two plans: a lever that acts on another moment than the fullest frees nothing.
- First those that the same devices can pull, one alone if one suffices, else the most effective ones together; then host memory for
  everything, then more devices.
- Those that take more host memory than the ranks of a node have are not offered.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from orrery.manifest.schema import FullCheckpointing, Model, Record, SelectiveCheckpointing, Trainer
from orrery.trainer.memory_plan.kept import is_sparse
from orrery.trainer.memory_plan.plan import Load, Plan, plan
from orrery.trainer.memory_plan.sizes import Sizes

CHUNKS = (4096, 1024, 256)  # rows of logits; fewer make products too small to be fast
KEPT: tuple[tuple[Literal["attention", "projections", "experts"], ...], ...] = (
    ("attention", "projections", "experts"),
    ("attention", "projections"),
    ("attention",),
)
HOST_LINK_BYTES_PER_S = 50e9  # what pinned copies reach of PCIe 5
WORTH_BYTES = 64 << 20  # less is not worth a change


@dataclass(frozen=True)
class Lever:
    """One field's change, and trainer and load with it. `place` is where a manifest's author finds the field."""

    field: str
    value: Any
    instead_of: Any
    cost: str
    trainer: Trainer
    load: Load
    place: str = "the manifest's memory axis"
    rank: int = 0  # 1: everything lives in host memory; 2: more devices

    def __str__(self) -> str:
        return f"{self.field}: {shown(self.value)} instead of {shown(self.instead_of)}"


@dataclass(frozen=True)
class Choice:
    """Levers to pull together, and what they free on each rank."""

    levers: tuple[Lever, ...]
    freed_bytes: int
    is_enough: bool


def levers(model: Model, trainer: Trainer, load: Load, before: Plan) -> Iterator[Lever]:
    """Those that this trainer, whose plan is `before`, has not pulled yet, in order of cost."""
    memory, spec, mesh = trainer.memory, trainer.fsdp, trainer.mesh

    def in_section(section: str, field: str, value: Any, cost: str, **more: Any) -> Lever:
        old = getattr(trainer, section)
        changed = trainer.model_copy(update={section: old.model_copy(update={field: value})})
        where = {"place": "the manifest's hardware axis"} if section == "mesh" else {}
        return Lever(
            f"trainer.{section}.{field}",
            value,
            getattr(old, field),
            cost,
            changed,
            load,
            **where | more,
        )

    def transfers(category: str, times: int) -> str:
        num_bytes = max(moment[category] for moment in before.moments.values())
        return f", {times * num_bytes / HOST_LINK_BYTES_PER_S:.1f} s in all"

    chunk = memory.lm_head_chunk_tokens
    for smaller in CHUNKS:
        if chunk == "auto" or smaller < chunk:
            yield in_section(
                "memory", "lm_head_chunk_tokens", smaller, "smaller products of the LM head"
            )
    if memory.lm_head_keeps_logits:
        yield in_section(
            "memory",
            "lm_head_keeps_logits",
            False,
            "one more product of the LM head in the backward pass",
        )
    if load.tokens > load.document_tokens:
        tokens = max(load.document_tokens, load.tokens // 2)
        cost = "more micro-batches, and weights are gathered for each"
        one = in_section("memory", "max_tokens_per_micro_batch", tokens, cost)
        smaller_load = replace(
            load, tokens=tokens, micro_batches=-(-load.micro_batches * load.tokens // tokens)
        )
        yield replace(one, instead_of=load.tokens, load=smaller_load)
    if spec.reduce_gradients == "step" and load.micro_batches > 1:
        yield in_section(
            "fsdp", "reduce_gradients", "micro_batch", "gradients travel after every micro-batch"
        )
    if not spec.reshard_after_forward:
        yield in_section(
            "fsdp",
            "reshard_after_forward",
            True,
            "weights are gathered again for the backward pass",
        )
    for kind, cost in _checkpointing(model, trainer):
        yield in_section("memory", "activation_checkpointing", kind, cost)
    if not memory.activation_offload and model.num_layers > 2:
        cost = f"activations cross to the host and back{transfers('activations', 2)} for each micro-batch, beside the blocks"
        yield in_section("memory", "activation_offload", True, cost)
    if not memory.optimizer_offload and not spec.cpu_offload:
        cost = f"states cross to the host and back{transfers('optimizer state', 1)} once a step, both ways at once, after the backward pass"
        yield in_section("memory", "optimizer_offload", True, cost)
    if mesh.dp_shard % 2 == 0 and _can_share(model, trainer, 2 * mesh.cp):
        cost = "attention's tokens travel between ranks, and half as many documents are trained at a time"
        one = in_section("mesh", "cp", 2 * mesh.cp, cost)
        half = one.trainer.mesh.model_copy(update={"dp_shard": mesh.dp_shard // 2})
        field = f"trainer.mesh.dp_shard: {half.dp_shard} and trainer.mesh.cp"
        twice = replace(
            load, micro_batches=2 * load.micro_batches
        )  # of the same step, on half as many data ranks
        yield replace(
            one, field=field, trainer=one.trainer.model_copy(update={"mesh": half}), load=twice
        )
    if model.moe is not None:
        for ep in (2 * mesh.ep, 4 * mesh.ep, 8 * mesh.ep):
            if (mesh.dp_shard * mesh.cp) % ep == 0 and model.moe.num_experts % ep == 0:
                yield in_section(
                    "mesh",
                    "ep",
                    ep,
                    "tokens travel to their experts, and the host waits once a layer",
                )
    if not spec.cpu_offload and mesh.world_size > 1:
        cost = "weights come over PCIe for each pass, and the optimizer steps on the processor: many times slower"
        if memory.optimizer_offload:
            cost += "; trainer.memory.optimizer_offload has no more to move then: set it to false"
        one = in_section("fsdp", "cpu_offload", True, cost, rank=1)
        kept = memory.model_copy(update={"optimizer_offload": False})
        yield replace(one, trainer=one.trainer.model_copy(update={"memory": kept}))
    one = in_section("mesh", "dp_shard", 2 * mesh.dp_shard, "twice the devices", rank=2)
    yield replace(
        one, load=replace(load, micro_batches=-(-load.micro_batches // 2))
    )  # of the same step, on twice as many data ranks


def choose(
    model: Model,
    trainer: Trainer,
    load: Load,
    device_bytes: int,
    needed_bytes: int,
    counted: Sizes,
    host_bytes: int = sys.maxsize,
) -> Choice:
    """The cheapest lever that frees `needed_bytes`, or else the most effective together, up to what there is.

    `host_bytes`: what a rank may take of host memory beside what it takes now.
    """
    base = plan(model, trainer, load, device_bytes, counted)

    def freed(lever: Lever) -> int:
        after = plan(model, lever.trainer, lever.load, device_bytes, counted)
        fits = after.host_bytes - base.host_bytes <= max(0, host_bytes)
        return base.peak_bytes - after.peak_bytes if fits else -sys.maxsize

    best = Choice((), 0, False)
    for rank in (0, 1, 2):
        for lever in levers(model, trainer, load, base):
            if lever.rank == rank and (num_bytes := freed(lever)) >= needed_bytes:
                return Choice((lever,), num_bytes, True)
        together = _together(model, trainer, load, base, needed_bytes, freed, rank)
        if together.is_enough:
            return together
        best = max(best, together, key=lambda choice: choice.freed_bytes)
    return best


def _together(
    model: Model,
    trainer: Trainer,
    load: Load,
    before: Plan,
    needed_bytes: int,
    freed: Callable[[Lever], int],
    most_rank: int,
) -> Choice:
    """At each turn the lever that frees most beside those already pulled; a field that is turned twice counts once."""
    pulled: dict[str, Lever] = {}
    total = 0
    while total < needed_bytes:
        candidates = [
            lever for lever in levers(model, trainer, load, before) if lever.rank <= most_rank
        ]
        best = max(candidates, key=freed, default=None)
        if best is None or freed(best) < total + WORTH_BYTES:
            break
        total, trainer, load = freed(best), best.trainer, best.load
        first = pulled.pop(best.field, best)
        pulled[best.field] = replace(best, instead_of=first.instead_of)
        if best.rank == 2:  # more devices without end would always do
            break
    return Choice(tuple(pulled.values()), total, total >= needed_bytes)


def _checkpointing(
    model: Model, trainer: Trainer
) -> Iterator[tuple[SelectiveCheckpointing | FullCheckpointing, str]]:
    """What keeps less than now, with its cost."""
    now = trainer.memory.activation_checkpointing
    if now.kind == "full":
        return
    has_experts = any(is_sparse(model, layer) for layer in range(model.num_layers))
    costs = {
        3: "elementwise work of a block is done twice, its products once",
        2: "products of experts are made again"
        if has_experts
        else "elementwise work of a block is done twice, its products once",
        1: "all products of a block are made again",
    }
    held = set(now.keep) if now.kind == "selective" else set(KEPT[0])
    for keep in KEPT:
        is_less = set(keep) < held or (now.kind == "none" and set(keep) == held)
        if is_less and (has_experts or "experts" not in keep):
            yield SelectiveCheckpointing(kind="selective", keep=keep), costs[len(keep)]
    yield (
        FullCheckpointing(kind="full"),
        "blocks run again whole, attention too: about a third more work",
    )


def _can_share(model: Model, trainer: Trainer, cp: int) -> bool:
    """Whether attention can be spread over `cp` ranks."""
    heads, groups = model.num_heads, model.num_kv_heads
    divides = heads % cp == 0 and (groups % cp == 0 or cp % groups == 0)
    return model.family != "hugging_face" and (trainer.mesh.cp_style == "ring" or divides)


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Record):
        return str(value.model_dump(mode="json"))
    return repr(value) if isinstance(value, str) else str(value)
