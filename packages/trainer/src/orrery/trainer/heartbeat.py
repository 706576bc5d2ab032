"""Heartbeat: by what the launcher tells a rank that is stuck from one that waits for it (`orrery.observe.stillness`), and what is kept then.

- In: a launched rank, before its process group is formed. Out: every PERIOD_S, in its health: how many collectives this rank has begun and
  completed, over all groups, as torch's flight recorder counts them (nccl: completed on the device), and its marks.
- A mark is a micro-batch that was begun: on the device that has got so far, since the host runs ahead of it. Where a rank loads, copies or
  reads files, a part of that which the host is done with.
- Asked by the launcher (SIGUSR1), the rank keeps its flight recorder's dump, `logs/flight_recorder/rank_<i>`, which `torchfrtrace` reads;
  nccl's own watchdog leaves its dumps there too.
- The counts come from torch's private API, looked for at start; where it is missing, every rank counts as being in no collective.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue

import torch

from orrery.manifest.publish import write_atomic
from orrery.manifest.schema import Trainer
from orrery.observe.asked import call_on_signal
from orrery.observe.deadline import scaled
from orrery.observe.process import RoleContext
from orrery.observe.stillness import STILL_S

PERIOD_S = 3.0
WARM_UP_STALL_S = 600.0  # of a first step, which compiles, tunes kernels and connects ranks; of a single rank, which has no collectives to count
IO_STALL_S = 300.0  # of a part, a tensor or a file, of what is read or written where many ranks may ask one file system at once


def step_stall_s(is_first: bool, num_ranks: int, warms_up: bool = True) -> float:
    """How long a step, or what stands between two, may show no progress: no collective and no mark begun or completed."""
    return scaled(WARM_UP_STALL_S if (is_first and warms_up) or num_ranks == 1 else STILL_S)


def io_stall_s(num_ranks: int) -> float:
    """The same of what goes through files, part by part."""
    return scaled(WARM_UP_STALL_S if num_ranks == 1 else IO_STALL_S)


def warms_up(trainer: Trainer, device: torch.device) -> bool:
    """Whether a first step does more than the others; on GPUs a library may compile something of its own."""
    return trainer.compile or device.type == "cuda"


class _Progress:
    """Micro-batches that the device has got to, and parts that the host is done with; one queue, since a process has one device.

    A thread of its own waits for each. The heartbeat never asks the device itself: `Event.query` keeps Python's lock while it may have to wait
    for another thread's call into CUDA, one that waits for a collective, and then nobody here says anything more.
    """

    def __init__(self) -> None:
        self._done = 0
        self._ahead: SimpleQueue[torch.cuda.Event] | None = None

    def follow(self, device: torch.device) -> None:
        """From now on; before, and where nobody listens, micro-batches on a device are not counted."""
        self._ahead = SimpleQueue()
        threading.Thread(
            target=self._wait, args=(self._ahead, device), name="marks", daemon=True
        ).start()

    def _wait(self, ahead: "SimpleQueue[torch.cuda.Event]", device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        while True:
            ahead.get().synchronize()
            self._done += 1

    def add(self, device: torch.device) -> None:
        if device.type != "cuda":
            self._done += 1
        elif self._ahead is not None:
            event = torch.cuda.Event(blocking=True)  # or the waiting thread would keep a core busy
            event.record()
            self._ahead.put(event)

    def count(self) -> int:
        return self._done


_PROGRESS = _Progress()
_HOST = torch.device("cpu")


def mark_micro_batch(device: torch.device) -> None:
    """A micro-batch begins."""
    _PROGRESS.add(device)


def mark_part() -> None:
    """A part of something on the host is done."""
    _PROGRESS.add(_HOST)


@contextmanager
def heartbeat(ctx: RoleContext, device: torch.device) -> Iterator[None]:
    """Around the life of the process group."""
    if not ctx.lifeline.is_launched:
        yield
        return
    folder = ctx.run_dir / "logs" / "flight_recorder"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank_{ctx.index}").unlink(missing_ok=True)  # of an earlier attempt
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{folder}/rank_")
    call_on_signal(lambda: dump_flight_recorder(folder / f"rank_{ctx.index}", device))
    if warms_up(ctx.manifest.trainer, device):
        _say_when_compiling(ctx)
    if device.type == "cuda":
        _PROGRESS.follow(device)
    end = threading.Event()

    def beat() -> None:
        while not end.wait(scaled(PERIOD_S)):
            ctx.health.beat(*count_collectives(device), _PROGRESS.count())

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _say_when_compiling(ctx: RoleContext) -> None:
    """A block that is compiled once more, for lengths it has not seen, takes its time in any step."""
    from torch._dynamo import (
        on_compile_end,
        on_compile_start,
    )  # here: to import it takes a while, and runs on CPUs hardly ever need it

    compiling = ExitStack()
    on_compile_start(
        lambda _: compiling.enter_context(
            ctx.health.waiting("the compiler", deadline_s=scaled(WARM_UP_STALL_S))
        )
    )
    on_compile_end(lambda _: compiling.close())


def count_collectives(device: torch.device) -> tuple[int, int]:
    """(begun, completed) by this process so far, over all groups."""
    ask = _recorder(device, "_dump_nccl_trace_json", "_dump_fr_trace_json")
    if ask is None:
        return 0, 0
    groups = (
        json.loads(ask(includeCollectives=False, onlyActive=False)).get("pg_status", {}).values()
    )
    begun, completed = (
        sum(max(0, int(group[f"last_{what}_collective"])) for group in groups)
        for what in ("enqueued", "completed")
    )
    return begun, completed


def dump_flight_recorder(path: Path, device: torch.device) -> None:
    """What torch recorded of the last collectives, in the form that it writes itself."""
    if (dump := _recorder(device, "_dump_nccl_trace", "_dump_fr_trace")) is not None:
        write_atomic(path, dump())


def _recorder(device: torch.device, nccl: str, other: str) -> Callable | None:
    """nccl has a recorder of its own."""
    return getattr(torch._C._distributed_c10d, nccl if device.type == "cuda" else other, None)
