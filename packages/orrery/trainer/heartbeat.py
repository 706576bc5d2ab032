"""Report this rank's counts of collectives and marks to the launcher's hang detector.

- A mark is a micro-batch begun on the device, or a tensor or file finished on the host.
- SIGUSR1 or an NCCL timeout dumps torch's flight recorder (for `torchfrtrace`) to
  `logs/flight_recorder/rank_<i>`.
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
from orrery.observe.hang_detector import STILL_S
from orrery.runtime.role_context import RoleContext, call_on_signal
from orrery.runtime.run_directory import flight_recorder_dir
from orrery.runtime.timing import scaled
from orrery.trainer.parallel.world import World

PERIOD_S = 3.0
WARM_UP_STALL_S = 600.0  # for compilation, for connecting ranks, and for a single rank
IO_STALL_S = 300.0  # for each tensor or file on a shared file system


def step_stall_s(world: World, trainer: Trainer, is_first: bool = False) -> float:
    """Return a step's stall limit: maximum seconds without a collective or mark."""
    is_warm_up = is_first and warms_up(trainer, world.device)
    return scaled(WARM_UP_STALL_S if is_warm_up or world.size == 1 else STILL_S)


def io_stall_s(num_ranks: int) -> float:
    return scaled(WARM_UP_STALL_S if num_ranks == 1 else IO_STALL_S)


def warms_up(trainer: Trainer, device: torch.device) -> bool:
    return trainer.compile or device.type == "cuda"


class _Progress:
    """Count marks. A thread waits for CUDA events, because polling may hold the GIL."""

    def __init__(self) -> None:
        self.count = 0
        self._ahead: SimpleQueue[torch.cuda.Event] | None = None

    def follow(self, device: torch.device) -> None:
        ahead = self._ahead = SimpleQueue()

        def wait() -> None:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            while True:
                ahead.get().synchronize()
                self.count += 1

        threading.Thread(target=wait, name="marks", daemon=True).start()

    def add(self, device: torch.device) -> None:
        if device.type != "cuda":
            self.count += 1
        elif self._ahead is not None:
            event = torch.cuda.Event(blocking=True)  # lets `synchronize` sleep instead of spin
            event.record()
            self._ahead.put(event)


_PROGRESS = _Progress()


def mark_micro_batch(device: torch.device) -> None:
    _PROGRESS.add(device)


def mark_part() -> None:
    _PROGRESS.count += 1


@contextmanager
def heartbeat(ctx: RoleContext, device: torch.device) -> Iterator[None]:
    if not ctx.parent_watch.is_launched:
        yield
        return
    folder = flight_recorder_dir(ctx.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    dump = folder / f"rank_{ctx.index}"
    dump.unlink(missing_ok=True)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{folder}/rank_")
    call_on_signal(lambda: dump_flight_recorder(dump, device))
    if warms_up(ctx.manifest.trainer, device):
        _report_compilation(ctx)
    if device.type == "cuda":
        _PROGRESS.follow(device)
    end = threading.Event()

    def beat() -> None:
        while not end.wait(scaled(PERIOD_S)):
            ctx.health.beat(*count_collectives(device), _PROGRESS.count)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _report_compilation(ctx: RoleContext) -> None:
    """Report compilations as waits, so that the hang detector reports no stall."""
    from torch._dynamo import on_compile_end, on_compile_start

    compiling = ExitStack()

    def begin(_: object) -> None:
        wait = ctx.health.waiting("the compiler", deadline_s=scaled(WARM_UP_STALL_S))
        compiling.enter_context(wait)

    on_compile_start(begin)
    on_compile_end(lambda _: compiling.close())


def count_collectives(device: torch.device) -> tuple[int, int]:
    dump = _recorder(device, "_dump_nccl_trace_json", "_dump_fr_trace_json")
    if dump is None:
        return 0, 0
    trace = json.loads(dump(includeCollectives=False, onlyActive=False))
    groups = trace.get("pg_status", {}).values()

    def total(kind: str) -> int:
        return sum(max(0, int(group[f"last_{kind}_collective"])) for group in groups)

    return total("enqueued"), total("completed")


def dump_flight_recorder(path: Path, device: torch.device) -> None:
    if (dump := _recorder(device, "_dump_nccl_trace", "_dump_fr_trace")) is not None:
        write_atomic(path, dump())


def _recorder(device: torch.device, nccl: str, other: str) -> Callable | None:
    return getattr(torch._C._distributed_c10d, nccl if device.type == "cuda" else other, None)
