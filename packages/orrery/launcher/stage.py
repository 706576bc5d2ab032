"""Hold a running stage's state, and end its processes."""

import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

import psutil

from orrery.launcher.process import PROCESS, Process
from orrery.launcher.site import Site
from orrery.launcher.slurm.allocation import Allocation, SlurmTask
from orrery.launcher.status import RoleStatus, State, Status, newest_checkpoint
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import Workspace
from orrery.manifest.plan import StagePlan
from orrery.observe.hang_detector import HealthView
from orrery.runtime import run_directory
from orrery.runtime.health import FAILED, Health, read_health
from orrery.runtime.metrics import MetricsFile
from orrery.runtime.parent_watch import START
from orrery.runtime.preemption import EXIT_PREEMPTED
from orrery.runtime.run_directory import (
    CHECKPOINT_TARGET,
    WIRE,
    endpoints_dir,
    log_path,
    weights_path,
)

KILLED_S = 10.0  # maximum wait after SIGKILL
# exit codes after SIGTERM, which Slurm sends to all ranks of a failed step
TERMINATED = (128 + signal.SIGTERM, -signal.SIGTERM)


@dataclass(frozen=True)
class Job:
    """A stage to run. `num_devices`: devices per node, or None on CPUs.

    `allocation` is None without Slurm. `max_restarts`: maximum engine restarts per day.
    """

    run_dir: Path
    plan: StagePlan
    stages: tuple[str, ...]
    num_devices: int | None
    num_steps: int | None
    resume: str
    site: Site
    workspace: Workspace
    allocation: Allocation | None = None
    max_restarts: int = 0


@dataclass(frozen=True)
class Outcome:
    """How a stage ended. `requeue`: "ask" Slurm to requeue the job, or "wait" until Slurm does."""

    state: State
    message: str
    exit_code: int
    requeue: Literal["ask", "wait"] | None = None


class Interrupts:
    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self.preemption_requested = False

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.preemption_requested = True
        else:
            self.received.append(signal.Signals(number))


class RunningStage:
    metrics: MetricsFile

    def __init__(self, job: Job, interrupts: Interrupts, attempt: int):
        self.job, self.interrupts, self.attempt = job, interrupts, attempt
        self.run_dir, self.name = job.run_dir, job.plan.name
        self.processes: Sequence[Process | SlurmTask] = []
        self.health: dict[str, Health] = {}
        self.health_view = HealthView()
        self.fenced: dict[str, str] = {}  # reason to kill an engine, by process name
        self.engine_restarts: Counter[str] = Counter()
        self.is_preempted = False
        slurm_job = job.allocation.job if job.allocation else None
        self.status = Status(
            *(self.name, attempt, "running", "", os.getpid(), socket.gethostname()),
            *(slurm_job, time.time()),
        )

    @property
    def run_name(self) -> str:
        return self.run_dir.name.rpartition("-")[0]

    @property
    def endpoints(self) -> Path:
        return endpoints_dir(self.run_dir, self.name)

    @property
    def deadline_scale(self) -> float:
        return self.job.site.roles.deadline_scale

    def read_health(self) -> dict[str, Health]:
        self.health = read_health(self.run_dir, self.name, self.attempt)
        return self.health_view.look(self.health, time.monotonic())

    def changed_s(self, process: Process | SlurmTask) -> float:
        health = self.health.get(process.name)
        is_failed = health is not None and health.doing == FAILED
        return self.health_view.changed_s(process.name) if is_failed else math.inf

    def has_failed(self, process: Process | SlurmTask) -> bool:
        code = process.poll()
        ends_itself = process.plan.ends == "itself"
        if code is None or (self.is_preempted and ends_itself and self.was_preempted(process)):
            return False
        return code != 0 or not ends_itself

    def was_preempted(self, process: Process | SlurmTask) -> bool:
        code = process.poll()
        if code != -signal.SIGKILL:
            return code in (EXIT_PREEMPTED, *TERMINATED)
        # After one rank exits with EXIT_PREEMPTED, Slurm kills the others.
        same_role = (one for one in self.processes if one.plan.role == process.plan.role)
        return any(one.poll() == EXIT_PREEMPTED for one in same_role)

    def stopped(self) -> Outcome:
        number = self.interrupts.received[0]
        message = f"{self.name}: stopped by {number.name}; {self.resume_hint()}"
        return Outcome("stopped", message, 128 + number)

    def resume_hint(self) -> str:
        step = newest_checkpoint(self.run_dir, self.name)
        if step is None:
            return f"type `{self.job.resume}` to start {self.name} again"
        return f"type `{self.job.resume}` to go on from step {step}"

    def resume_point(self) -> str:
        step = newest_checkpoint(self.run_dir, self.name)
        return f"it begins {self.name} anew" if step is None else f"it goes on from step {step}"

    def write_status(self, state: State, message: str) -> None:
        self.status.state, self.status.message = state, message
        self.status.roles = [
            RoleStatus(
                *(one.name, one.node, one.pid, one.port, sorted(one.cores) if one.cores else None),
                "running" if one.ending is None else "ended",
                *(one.ending, self.engine_restarts[one.plan.whole]),
            )
            for one in self.processes
        ]
        self.status.write(self.run_dir)

    def tell(self, text: str) -> None:
        self.log(text)
        with suppress(OSError):
            print(f"{self.name}: {text}", file=sys.stderr, flush=True)

    def log(self, text: str) -> None:
        """Write a line into the launcher's log. Ignore errors, such as those of a full disk."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with suppress(OSError), open(log_path(self.run_dir, "launcher.0"), "a") as log:
            log.write(f"{stamp} {self.name}, attempt {self.attempt}: {text}\n")


def end_all(stage: RunningStage, grace_s: float) -> str:
    """Send SIGTERM to all processes, and SIGKILL after `grace_s` or a second Ctrl-C.

    Return a message about processes that survive SIGKILL, or "".
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
        "device or file system that does not answer; repair that node before you start again"
    )


def end_strays(processes: Iterable[Process | SlurmTask], start: str, incarnation: str = "") -> None:
    """Kill processes that roles started outside their own process groups.

    The environment of these processes contains the attempt's mark `start`. With `incarnation` (such
    as `inference.0.2`), kill only that process's children.
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
    except psutil.AccessDenied:  # roles hide their environment, so check the parent pid
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
    return run_directory.disk_prefix(run_dir), run_directory.start_prefix(run_dir)


def finish_saves(run_dir: Path, target: str, is_cut_short: Callable[[], bool]) -> None:
    """Save checkpoint copies that ended trainers left in shared memory.

    Then upload the newest checkpoint to `target`, unless `target` is "".
    """
    found = run_directory.SHARED_MEMORY.glob(f"{run_directory.saves_prefix(run_dir)}*")
    # Rank 0's copy comes last, because its save waits for other ranks.
    if not (folders := sorted(map(str, found), reverse=True)):
        return
    log_path(run_dir, "trainer.0").parent.mkdir(exist_ok=True)
    with open(log_path(run_dir, "trainer.0"), "ab") as log:
        argv = [sys.executable, "-m", "orrery.trainer.saver", "finish", *folders]
        env = os.environ | {CHECKPOINT_TARGET: target}
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=log, env=env)
    try:
        while process.poll() is None and not is_cut_short():
            time.sleep(0.05)
    finally:
        process.kill()


def check_target(target: str) -> None:
    argv = [sys.executable, "-m", "orrery.trainer.uploader", "check", target]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise OrreryError(done.stderr.strip().rpartition("\n")[2].removeprefix("error: "))


def remove_weights(run_dir: Path) -> None:
    run_directory.remove_memory(run_directory.memory_prefix(run_dir))
    shutil.rmtree(weights_path(run_dir, WIRE), ignore_errors=True)


def remove_scratch(prefixes: Iterable[str], site: Site) -> None:
    for prefix in prefixes:
        run_directory.remove_folders(
            prefix, Path(site.environment.get("TMPDIR") or tempfile.gettempdir())
        )
