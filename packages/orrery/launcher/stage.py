"""Hold a running stage's state, preempt it, and end its processes.

A stage is preempted by SIGUSR1, or `warning_s` before its Slurm job ends. The RL stage then writes
a checkpoint and ends. If the checkpoint is new, the launcher requeues the job.
"""

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

import psutil

from orrery.launcher.process import PROCESS, Process
from orrery.launcher.runs import (
    Holder,
    RoleStatus,
    State,
    Status,
    lock_holder,
    newest_checkpoint,
    read_status,
)
from orrery.launcher.site import Site
from orrery.launcher.slurm import queue
from orrery.launcher.slurm.allocation import Allocation, SlurmTask
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import Workspace
from orrery.manifest.plan import StagePlan
from orrery.manifest.publish import write_atomic
from orrery.observe.hang_detector import HealthView
from orrery.runtime import run_directory
from orrery.runtime.health import FAILED, Health, read_health
from orrery.runtime.metrics import MetricsFile
from orrery.runtime.process_control import EXIT_PREEMPTED, START
from orrery.runtime.run_directory import (
    CHECKPOINT_TARGET,
    WIRE,
    endpoints_dir,
    log_path,
    no_requeue_path,
    request_path,
    weights_path,
)

KILLED_S = 10.0  # maximum wait after SIGKILL
WIND_DOWN_S = 600.0  # maximum wait for the checkpoint, without Slurm
MARGIN_S = 60.0  # for the stage's end after its checkpoint
STOP_S = 30.0
# exit codes after SIGTERM, which Slurm sends to the other ranks of a failed step
TERMINATED = (128 + signal.SIGTERM, -signal.SIGTERM)


@dataclass(frozen=True)
class Job:
    """`num_devices`: devices per node, or None on CPUs.

    `allocation`: None without Slurm. `max_restarts`: engine restarts allowed per day.
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
    """How a stage ended. `requeue`: "ask" Slurm to requeue the job, or "wait" until it does."""

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


@contextmanager
def catch_signals() -> Iterator[Interrupts]:
    interrupts = Interrupts()
    from_terminal = [
        number
        for number in (signal.SIGINT, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    numbers = (*from_terminal, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, interrupts) for number in numbers}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class RunningStage:
    metrics: MetricsFile

    def __init__(self, job: Job, interrupts: Interrupts, attempt: int):
        self.job, self.interrupts, self.attempt = job, interrupts, attempt
        self.run_dir, self.name = job.run_dir, job.plan.name
        self.processes: Sequence[Process | SlurmTask] = []
        self.health: dict[str, Health] = {}
        self.health_view = HealthView()
        self.fenced: dict[str, str] = {}  # process name → reason to kill the engine
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
        # After a rank exits with EXIT_PREEMPTED, Slurm kills the other ranks.
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
        return f"{self.name} {'begins anew' if step is None else f'goes on from step {step}'}"

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
        """Write to the launcher's log. Ignore errors, such as a full disk."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with suppress(OSError), open(log_path(self.run_dir, "launcher.0"), "a") as log:
            log.write(f"{stamp} {self.name}, attempt {self.attempt}: {text}\n")


# Preemption


class Preemption:
    def __init__(self, stage: RunningStage):
        self.stage, self.job = stage, stage.job
        self._step_at_start = newest_checkpoint(stage.run_dir)
        self._ends_at_s = _job_ends_at_s(stage.job)
        # Checkpoint copies must be saved by `saved_by_s`.
        self._limit_s, self.saved_by_s = 0.0, math.inf

    def poll(self) -> Outcome | None:
        """Request a checkpoint if preemption is due.

        Return the outcome if the stage has ended or is out of time, otherwise None.
        """
        stage = self.stage
        if not stage.is_preempted:
            if self._is_due():
                self._begin()
            return None
        trained = [one for one in stage.processes if one.plan.ends == "itself"]
        if all(map(stage.was_preempted, trained)):
            message = f"{stage.name}: wound down; {stage.resume_hint()}"
        elif time.monotonic() > self._limit_s:
            waits = "; ".join(
                f"{name} was {one.sentence()}"
                for name, one in stage.health.items()
                if one.role in ("trainer", "orchestrator")
            )
            message = f"{stage.name}: did not wind down in time ({waits}); {stage.resume_hint()}"
        else:
            return None
        has_new = newest_checkpoint(stage.run_dir) != self._step_at_start
        requeue = has_new and not no_requeue_path(stage.run_dir, stage.name).exists()
        return Outcome("stopped", message, EXIT_PREEMPTED, requeue="ask" if requeue else None)

    def _is_due(self) -> bool:
        warning_s = self.job.allocation.slurm.warning_s if self.job.allocation else 0
        is_over = self._ends_at_s is not None and time.monotonic() > self._ends_at_s - warning_s
        return self.stage.interrupts.preemption_requested or is_over

    def _begin(self) -> None:
        stage = self.stage
        if stage.name != "rl":
            stage.log("continues, because only rl can end early")
            stage.interrupts.preemption_requested, self._ends_at_s = False, None
            return
        write_atomic(request_path(stage.run_dir, stage.name), b"")
        for_s, margin_s = self._time_left_s()
        self._limit_s = time.monotonic() + for_s
        self.saved_by_s = self._limit_s + 0.5 * margin_s
        stage.is_preempted = True
        stage.log("winding down")

    def _time_left_s(self) -> tuple[float, float]:
        """Return (seconds to write the checkpoint, seconds to end the stage)."""
        if self.job.allocation is None:
            return WIND_DOWN_S * self.stage.deadline_scale, math.inf
        ends_at_s = _job_ends_at_s(self.job)  # ask again, because operators can change the limit
        left_s = float(self.job.allocation.slurm.warning_s)
        if ends_at_s is not None:
            left_s = ends_at_s - time.monotonic()
        margin_s = min(0.5 * left_s, MARGIN_S)
        return left_s - margin_s, margin_s


def requeue(stage: RunningStage) -> None:
    assert stage.job.allocation is not None
    try:
        queue.requeue(stage.job.allocation.job)
    except OrreryError as error:
        stage.log(f"job not requeued: {error}")


def _job_ends_at_s(job: Job) -> float | None:
    if job.allocation is None:
        return None
    try:
        left = [one.left for one in queue.user_jobs() if one.id == job.allocation.job]
    except OrreryError:
        return None
    left_s = queue.seconds(left[0]) if left else None
    return None if left_s is None else time.monotonic() + left_s


# Ending processes


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
        f"{names} did not end within {within_s:g} s of SIGKILL, so a device or file system "
        "does not answer; repair that node before you start again"
    )


def end_strays(processes: Iterable[Process | SlurmTask], start: str, incarnation: str = "") -> None:
    """Kill processes that roles started outside their own process groups.

    Their environment contains the attempt's mark `start`. With `incarnation` (`inference.0.2`),
    kill only those that this process started.
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
    except psutil.AccessDenied:  # roles hide their environment, so check the parent
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


# `orrery stop`


def stop_run(run_dir: Path, on_cluster: bool, checkpoint: bool = False) -> str:
    """End the run. With `checkpoint`, request a checkpoint and return without waiting."""
    name = run_dir.name
    holder = lock_holder(run_dir)
    if holder is not None and holder.is_here and not _is_a_job(run_dir):
        if checkpoint:
            return _preempt_launcher(run_dir, holder.pid)
        return _end_launcher(run_dir, holder.pid)
    jobs = queue.run_jobs(run_dir) if on_cluster else []
    if not jobs:
        if holder is not None:
            raise OrreryError(
                f"{name}: its launcher is {holder}. Type `orrery stop {name}` on that machine"
            )
        raise OrreryError(f"{name}: is not running. Type `orrery status {name}` for its stages")
    return _preempt_jobs(run_dir, jobs) if checkpoint else _cancel_jobs(run_dir, jobs)


def _named(jobs: list[queue.SlurmJob]) -> str:
    return ", ".join(f"{job.id} ({job.stage}, {job.slurm_state.lower()})" for job in jobs)


def _preempt_jobs(run_dir: Path, jobs: list[queue.SlurmJob]) -> str:
    name, running = run_dir.name, [job for job in jobs if job.state == "running"]
    if not running:
        raise OrreryError(
            f"{name}: none of its jobs runs ({_named(jobs)}). Type `orrery stop {name}` to cancel "
            "them"
        )
    _forbid_requeue(run_dir)
    queue.call("scancel", "--batch", "--signal=USR1", *(job.id for job in running))
    return f"{name}: asked job {_named(running)} for a checkpoint; the job ends after writing it"


def _cancel_jobs(run_dir: Path, jobs: list[queue.SlurmJob]) -> str:
    ids = [job.id for job in jobs]
    queue.cancel(ids)
    limit_s = time.monotonic() + STOP_S
    text = f"{run_dir.name}: cancelled job {_named(jobs)}"
    while left := [job for job in queue.run_jobs(run_dir) if job.id in ids]:
        if time.monotonic() > limit_s:
            named = ", ".join(job.id for job in left)
            if all(job.state == "ending" for job in left):
                return f"{text}; Slurm still cleans up after {named} (completing)"
            raise OrreryError(f"{text}, but {named} has not ended after {STOP_S:.0f} s")
        time.sleep(0.2)
    return text


def _forbid_requeue(run_dir: Path) -> None:
    status, holder = read_status(run_dir), lock_holder(run_dir)
    if status is None or holder != Holder(status.host, status.launcher_pid):
        raise OrreryError(f"{run_dir.name}: its launcher is starting. Try again in a minute")
    if status.state != "running" or status.stage != "rl":
        raise OrreryError(
            f"{run_dir.name}: --checkpoint needs a running rl stage, but {status.stage} is "
            f"{status.state}. Type `orrery stop {run_dir.name}`"
        )
    no_requeue_path(run_dir, "rl").touch()


def _is_a_job(run_dir: Path) -> bool:
    status = read_status(run_dir)
    return status is not None and status.slurm_job is not None


def _preempt_launcher(run_dir: Path, pid: int) -> str:
    _forbid_requeue(run_dir)
    _signal(run_dir, pid, signal.SIGUSR1)
    asked = f"{run_dir.name}: asked its launcher (pid {pid}) for a checkpoint"
    return f"{asked}; the run ends after writing it"


def _signal(run_dir: Path, pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except PermissionError:
        raise OrreryError(
            f"{run_dir.name}: its launcher (pid {pid}) is another user's. Ask that user to stop it"
        ) from None


def _end_launcher(run_dir: Path, pid: int) -> str:
    _signal(run_dir, pid, signal.SIGTERM)
    limit_s = time.monotonic() + STOP_S
    while (holder := lock_holder(run_dir)) is not None and holder.pid == pid:
        if time.monotonic() > limit_s:
            raise OrreryError(
                f"{run_dir.name}: the launcher (pid {pid}) did not end within {STOP_S:.0f} s. "
                f"See {log_path(run_dir, 'launcher.0')}"
            )
        time.sleep(0.05)
    status = read_status(run_dir)
    return status.message if status else f"{run_dir.name}: stopped"
