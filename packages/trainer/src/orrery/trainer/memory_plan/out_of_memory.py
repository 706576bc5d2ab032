"""Out of memory: an error as one sentence that says which field of the manifest to change, and what that frees and costs.

- Needed is what the failed allocation asked for, or by how much the plan exceeds what torch could have, if that is more; and a margin for
  what the allocator cannot use.
- CUDA and NCCL say that they are out of memory in other errors than torch's allocator does, without numbers. Where the device has room,
  a field that pins host memory is on, and it was not NCCL that asked, it is host memory that could not be pinned.
- A rank that ran out leaves collectives of others behind, for which an orderly end may wait: it gets END_S for that.
"""

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.manifest.schema import Manifest, Model, Trainer
from orrery.runtime.role_context import RoleContext
from orrery.trainer.host_memory import available_bytes
from orrery.trainer.learner import Learner
from orrery.trainer.memory_plan.kept import width
from orrery.trainer.memory_plan.levers import Choice, choose
from orrery.trainer.memory_plan.plan import Load, plan
from orrery.trainer.memory_plan.sizes import sizes
from orrery.transport.weight_wire import DIRECT_KINDS

MARGIN = 0.02  # of the device: fragments that no allocation fits
END_S = 10.0
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class StageProgress:
    """How far a stage has got; `learner` is None while it is being built."""

    learner: Learner | None = None


@contextmanager
def explain_out_of_memory(ctx: RoleContext) -> Iterator[StageProgress]:
    """Around a stage's work: an error of memory becomes RunFailed with the sentence. What the plan foresees rank 0 says first."""
    progress, world_size = StageProgress(), ctx.manifest.trainer.mesh.world_size
    ranks_here = min(world_size, ctx.manifest.hardware.devices_per_node)
    if (
        ctx.index == 0
        and (
            text := predict_out_of_memory(
                ctx.manifest, ctx.stage, device_bytes(), available_bytes() // ranks_here
            )
        )
        is not None
    ):
        ctx.log.warning(text)
    try:
        yield progress
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        step = None if progress.learner is None else progress.learner.step + 1
        text = explain(
            error,
            ctx.index,
            step,
            ctx.manifest.model,
            *stage_workload(ctx.manifest, ctx.stage),
            ranks_here,
        )
        if world_size > 1:
            _end_soon(ctx, text)
        raise RunFailed(text) from None


def is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def explain(
    error: RuntimeError,
    rank: int,
    step: int | None,
    model: Model,
    trainer: Trainer,
    load: Load,
    ranks_here: int,
) -> str:
    """The sentence for one that `is_out_of_memory`; `ranks_here` share this host's memory. `step` None: no step had begun."""
    capacity, available = device_bytes(), available_bytes()
    fields = {
        "trainer.memory.activation_offload": trainer.memory.activation_offload,
        "trainer.memory.optimizer_offload": trainer.memory.optimizer_offload,
        "trainer.fsdp.cpu_offload": trainer.fsdp.cpu_offload,
    }
    pinning = " or ".join(field for field, value in fields.items() if value)
    if (
        isinstance(error, torch.OutOfMemoryError)
        or "NCCL" in str(error)
        or not pinning
        or free_bytes() <= MARGIN * capacity
    ):
        text = sentence(
            str(error), rank, step, model, trainer, load, capacity, available // ranks_here
        )
        return (
            text
            if isinstance(error, torch.OutOfMemoryError)
            else f"{text} (it was not torch's allocator that ran out: {_line(error)})"
        )
    left = f"{_shown(available)} of it are left to the {ranks_here} ranks of this node together"
    remedy = f"set {pinning} to false in the manifest's memory axis"
    return f"rank {rank} could not have host memory pinned {_when(step)}, though its device has room; {left}; {remedy}"


def predict_out_of_memory(
    manifest: Manifest, stage: str, capacity: int, host_bytes: int = sys.maxsize
) -> str | None:
    """What to change before a stage whose plan exceeds `capacity` bytes of a device; None where it does not, or nobody can tell.

    `host_bytes`: what a rank may take of host memory.
    """
    if not capacity:
        return None
    trainer, load = stage_workload(manifest, stage)
    try:
        counted = sizes(manifest.model, trainer.lora)
        found = plan(manifest.model, trainer, load, capacity, counted)
        peak = found.peak_bytes
        missing = peak + int(MARGIN * capacity) - capacity
        if missing <= 0:
            return None
        choice = choose(
            manifest.model, trainer, load, capacity, missing, counted, host_bytes - found.host_bytes
        )
    except OrreryError:
        return None
    head = f"a step is planned to take {_shown(peak)} of the {_shown(capacity)} of each device, which may run out in the middle of the run"
    return f"{head}; {advice(choice, missing)}"


def device_bytes() -> int:
    return (
        torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        if torch.cuda.is_available()
        else 0
    )


def free_bytes() -> int:
    """Of the device, for who asks the driver and not torch."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def stage_workload(manifest: Manifest, stage: str) -> tuple[Trainer, Load]:
    """The stage's trainer, and the most that a data rank may have to do in a step: every sample of full length.

    A rollout is as long as the engines' context at most, a chat as what `sft_data.py` lets through.
    """
    trainer, rl = manifest.trainer, manifest.orchestrator
    samples = rl.rollouts_per_batch
    if stage == "sft" and (sft := manifest.stages.sft) is not None:
        samples = sft.examples_per_batch
        trainer = trainer.model_copy(update={"optimizer": sft.optimizer})
    tokens = trainer.memory.max_tokens_per_micro_batch
    longest = (
        min(tokens, manifest.model.max_positions)
        if stage == "sft"
        else manifest.inference.max_model_len_tokens
    )
    each = -(-samples // trainer.mesh.num_data_ranks)
    is_sent_merged = (
        stage == "rl" and trainer.lora is not None and manifest.transport.weights in DIRECT_KINDS
    )
    merged_width = width(manifest.inference.dtype) if is_sent_merged else 0
    return trainer, Load(tokens, longest, -(-each // max(1, tokens // longest)), merged_width)


def sentence(
    error: str,
    rank: int,
    step: int | None,
    model: Model,
    trainer: Trainer,
    load: Load,
    capacity: int = 0,
    host_bytes: int = sys.maxsize,
) -> str:
    """`error` is torch's text; `step` None: no step had begun; `capacity` of the device counts where the text does not say.

    `host_bytes`: what this rank may take of host memory beside what it has.
    """
    asked, free = _bytes(error, "Tried to allocate"), _bytes(error, "of which", "is free")
    capacity = _bytes(error, "total capacity of") or capacity
    head = f"rank {rank} ran out of device memory {_when(step)}"
    if asked is not None:
        head += f": {_shown(asked)} were asked for"
        head += (
            f", {_shown(free)} of {_shown(capacity)} were free"
            if free is not None and capacity
            else ""
        )
        own = _bytes(error, "this process has")
        if (
            free is not None
            and own is not None
            and (others := capacity - free - own) > MARGIN * capacity
        ):
            head += f" and {_shown(others)} other processes'"
    try:
        counted = sizes(model, trainer.lora)
        needed = (asked or 0) + int(MARGIN * capacity)
        mine = [
            _bytes(error, "Of the allocated memory"),
            _bytes(error, "and", "is reserved by PyTorch"),
            free,
        ]
        if mine[0] is not None:
            over = plan(model, trainer, load, capacity, counted).peak_bytes - sum(
                part or 0 for part in mine
            )
            needed = max(needed, over + int(MARGIN * capacity))
        return f"{head}; {advice(choose(model, trainer, load, capacity, needed, counted, host_bytes), needed)}"
    except OrreryError as unknown:
        return f"{head}; there is no plan of its memory: {unknown}"


def _line(error: RuntimeError) -> str:
    return next(line.strip() for line in str(error).splitlines() if "out of memory" in line)


def _when(step: int | None) -> str:
    return "while it was being built" if step is None else f"in step {step}"


def advice(choice: Choice, needed_bytes: int) -> str:
    levers, freed = choice.levers, f"about {choice.freed_bytes / 2**30:.1f} GiB on each rank"
    if not levers:
        return "no lever of the manifest frees any; it takes a smaller model, shorter contexts or other devices"
    places = " and ".join(dict.fromkeys(lever.place for lever in levers))
    if len(levers) == 1:
        text = f"{levers[0]} frees {freed} (cost: {levers[0].cost}); set it in {places}"
    else:
        each = "; ".join(f"{lever} (cost: {lever.cost})" for lever in levers)
        missing = f"no lever alone frees the {needed_bytes / 2**30:.1f} GiB that are missing"
        text = f"{missing}; together these free {freed}: {each}; set them in {places}"
    if choice.is_enough:
        return text
    return f"{text}. That is less than the {needed_bytes / 2**30:.1f} GiB that are missing: it takes more devices too"


def _bytes(text: str, before: str, after: str = "") -> int | None:
    found = re.search(
        rf"{re.escape(before)} ([\d.]+) (bytes|KiB|MiB|GiB)[^.]*?{re.escape(after)}", text
    )
    return None if found is None else int(float(found[1]) * UNITS[found[2]])


def _shown(num_bytes: int) -> str:
    return (
        f"{num_bytes / 2**30:.1f} GiB"
        if num_bytes >= 2**30 // 10
        else f"{num_bytes / 2**20:.1f} MiB"
    )


def _end_soon(ctx: RoleContext, text: str) -> None:
    def end() -> None:
        ctx.health.failed(text)
        print(f"error: {text}", file=sys.stderr, flush=True)
        os._exit(RunFailed.exit_code)

    timer = threading.Timer(END_S, end)
    timer.daemon = True
    timer.start()
