"""Explain an out-of-memory error: name the manifest field to change, its gain and its cost."""

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from orrery.manifest.budget.options import advice, choose_options
from orrery.manifest.budget.trainer_memory import Workload, plan_memory, stage_workload
from orrery.manifest.errors import OrreryError, OutOfMemory
from orrery.manifest.schema import Manifest, Model, Trainer
from orrery.models.families import count_parameters
from orrery.runtime.role_context import RoleContext
from orrery.trainer.host_memory import available_bytes
from orrery.trainer.learner import Learner

MARGIN = 0.02  # fraction of device memory lost to fragmentation
END_S = 10.0  # time limit for an orderly exit, because collectives may hang
CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory: you tried to allocate"
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
PINNING_FIELDS = (
    ("memory", "activation_offload"),
    ("memory", "optimizer_offload"),
    ("fsdp", "cpu_offload"),
)


class StageProgress:
    learner: Learner | None = None


@contextmanager
def explain_out_of_memory(ctx: RoleContext) -> Iterator[StageProgress]:
    progress, world_size = StageProgress(), ctx.manifest.trainer.mesh.world_size
    ranks_here = min(world_size, ctx.manifest.hardware.devices_per_node)
    if ctx.index == 0:
        host_bytes = available_bytes() // ranks_here
        text = predict_out_of_memory(ctx.manifest, ctx.stage, device_bytes(), host_bytes)
        if text is not None:
            ctx.log.warning(text)
    try:
        yield progress
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        step = None if progress.learner is None else progress.learner.step + 1
        trainer, load = stage_workload(ctx.manifest, ctx.stage)
        model = ctx.manifest.model
        text = describe_error(error, ctx.index, step, model, trainer, load, ranks_here)
        if world_size > 1:
            _end_soon(ctx, text)
        raise OutOfMemory(text) from None


def is_out_of_memory(error: RuntimeError) -> bool:
    if CPU_ALLOCATOR in str(error):
        return not torch.cuda.is_available()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def describe_error(
    error: RuntimeError,
    rank: int,
    step: int | None,
    model: Model,
    trainer: Trainer,
    load: Workload,
    ranks_here: int,
) -> str:
    capacity, available = device_bytes(), available_bytes()
    is_torchs = isinstance(error, torch.OutOfMemoryError) or CPU_ALLOCATOR in str(error)
    pinning = " or ".join(
        f"trainer.{section}.{field}"
        for section, field in PINNING_FIELDS
        if getattr(getattr(trainer, section), field)
    )
    is_devices = is_torchs or "NCCL" in str(error) or not pinning
    if is_devices or free_bytes() <= MARGIN * capacity:
        own = available // ranks_here
        text = describe_device_error(str(error), rank, step, model, trainer, load, capacity, own)
        if is_torchs:
            return text
        return f"{text} (it was not torch's allocator that ran out: {_line(error)})"
    left = f"{_size(available)} of host memory are left to all {ranks_here} ranks of this node"
    remedy = f"set {pinning} to false in the manifest's memory axis"
    return (
        f"rank {rank} could not pin host memory {_when(step)}, "
        f"though its device has room; {left}; {remedy}"
    )


def predict_out_of_memory(
    manifest: Manifest, stage: str, capacity: int, host_bytes: int = sys.maxsize
) -> str | None:
    if not capacity:
        return None
    model = manifest.model
    trainer, load = stage_workload(manifest, stage)
    try:
        counted = count_parameters(model, trainer.lora)
        plan = plan_memory(model, trainer, load, capacity, counted)
        missing = plan.peak_bytes + int(MARGIN * capacity) - capacity
        if missing <= 0:
            return None
        left = host_bytes - plan.host_bytes
        chosen = choose_options(model, trainer, load, capacity, missing, counted, left)
    except OrreryError:
        return None
    return (
        f"a step is planned to take {_size(plan.peak_bytes)} of the {_size(capacity)} "
        f"of each device, which may run out in the middle of the run; {advice(chosen, missing)}"
    )


def device_bytes() -> int:
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def describe_device_error(
    error: str,
    rank: int,
    step: int | None,
    model: Model,
    trainer: Trainer,
    load: Workload,
    capacity: int = 0,
    host_bytes: int = sys.maxsize,
) -> str:
    """Describe torch's message `error`, and a remedy. `step` is None before training.

    `capacity`: device bytes. `host_bytes`: host memory available to this rank.
    """
    asked, free = _bytes(error, "ried to allocate"), _bytes(error, "of which", "is free")
    capacity = _bytes(error, "total capacity of") or capacity
    kind = "host" if CPU_ALLOCATOR in error else "device"
    head = f"rank {rank} ran out of {kind} memory {_when(step)}"
    if asked is not None:
        head += f": {_size(asked)} were asked for"
        if free is not None and capacity:
            head += f", {_size(free)} of {_size(capacity)} were free"
        own = _bytes(error, "this process has")
        if free is not None and own is not None:
            others = capacity - free - own
            head += f", others held {_size(others)}" if others > MARGIN * capacity else ""
    try:
        counted = count_parameters(model, trainer.lora)
        needed = (asked or 0) + int(MARGIN * capacity)
        allocated = _bytes(error, "Of the allocated memory")
        if allocated is not None:
            reserved = _bytes(error, "and", "is reserved by PyTorch")
            peak = plan_memory(model, trainer, load, capacity, counted).peak_bytes
            excess = peak - allocated - (reserved or 0) - (free or 0)
            needed = max(needed, excess + int(MARGIN * capacity))
        chosen = choose_options(model, trainer, load, capacity, needed, counted, host_bytes)
        return f"{head}; {advice(chosen, needed)}"
    except OrreryError as unknown:
        return f"{head}; there is no memory plan: {unknown}"


def _line(error: RuntimeError) -> str:
    return next(line.strip() for line in str(error).splitlines() if "out of memory" in line)


def _when(step: int | None) -> str:
    return "while its model was being built" if step is None else f"in step {step}"


def _bytes(text: str, before: str, after: str = "") -> int | None:
    number = rf"{re.escape(before)} ([\d.]+) (bytes|KiB|MiB|GiB)[^.]*?{re.escape(after)}"
    found = re.search(number, text)
    return None if found is None else int(float(found[1]) * UNITS[found[2]])


def _size(num_bytes: int) -> str:
    if num_bytes >= 2**30 // 10:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"


def _end_soon(ctx: RoleContext, text: str) -> None:
    def end() -> None:
        ctx.health.failed(text)
        print(f"error: {text}", file=sys.stderr, flush=True)
        os._exit(OutOfMemory.exit_code)

    timer = threading.Timer(END_S, end)
    timer.daemon = True
    timer.start()
