"""End a stage's processes, and remove their remains on this machine."""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from orrery.launcher.process import PROCESS, Process
from orrery.launcher.site import Site
from orrery.launcher.slurm.job import SlurmTask
from orrery.launcher.stage import RunningStage
from orrery.launcher.status import Status
from orrery.runtime import scratch
from orrery.runtime.parent_watch import START
from orrery.runtime.run_directory import WIRE, weights_path

KILLED_S = 10.0  # for the kernel to end a killed process


def end_all(stage: RunningStage, grace_s: float) -> str:
    """Send SIGTERM to all, and SIGKILL to their groups after `grace_s` or a second Ctrl-C.

    Return a message that names survivors of SIGKILL, or "".
    """
    interrupted = len(stage.interrupts.received)
    for process in stage.processes:
        process.signal(signal.SIGTERM)
    limit_s = time.monotonic() + grace_s
    while any(process.poll() is None for process in stage.processes):
        if time.monotonic() > limit_s or len(stage.interrupts.received) > max(1, interrupted):
            break
        time.sleep(0.05)
    for process in stage.processes:
        process.abandon()
    within_s = KILLED_S * stage.deadline_scale
    limit_s = time.monotonic() + within_s
    stuck = [one for one in stage.processes if not one.wait(max(0.0, limit_s - time.monotonic()))]
    return still_there(stuck, within_s) if stuck else ""


def still_there(stuck: Sequence[Process | SlurmTask], within_s: float) -> str:
    names = ", ".join(f"{one.name} (process {one.pid} on {one.node})" for one in stuck)
    return (
        f"{names} did not end within {within_s:g} s of SIGKILL, so the kernel holds it in a "
        "device or file system that does not answer; see to that node before you start again"
    )


def end_strays(processes: Iterable[Process | SlurmTask], start: str, incarnation: str = "") -> None:
    """Kill processes that roles, or one incarnation, started outside their process groups.

    We have adopted them. Their environment holds the attempt's `start`.
    """
    marks = {START: start, **({PROCESS: incarnation} if incarnation else {})}
    known = {process.pid for process in processes}
    children = psutil.Process().children(recursive=True)
    strays = [child for child in children if _is_stray(child, marks, known)]
    for child in strays:
        with suppress(psutil.Error):
            child.kill()
    psutil.wait_procs(strays, timeout=5)


def _is_stray(child: psutil.Process, marks: dict[str, str], known: set[int]) -> bool:
    try:
        return marks.items() <= child.environ().items()
    except psutil.AccessDenied:  # a role, or its fork, adopted after the role's end
        with suppress(psutil.Error):
            return child.ppid() == os.getpid() and child.pid not in known
    except psutil.Error:
        pass
    return False


def end_leftovers(run_dir: Path, last: Status) -> None:
    left = []
    for role in last.roles:
        with suppress(psutil.Error):
            process = psutil.Process(role.pid)
            if str(run_dir) in process.cmdline():
                left.append(process)
    for process in left:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    psutil.wait_procs(left, timeout=10)


def scratch_prefixes(run_dir: Path) -> tuple[str, str]:
    return scratch.disk_prefix(run_dir), scratch.start_prefix(run_dir)


def remove_weights(run_dir: Path) -> None:
    scratch.remove_memory(scratch.memory_prefix(run_dir))
    shutil.rmtree(weights_path(run_dir, WIRE), ignore_errors=True)


def remove_scratch(prefixes: Iterable[str], site: Site) -> None:
    for prefix in prefixes:
        scratch.remove_folders(
            prefix, Path(site.environment.get("TMPDIR") or tempfile.gettempdir())
        )
