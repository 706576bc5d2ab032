"""End a stage early: preemption, and `orrery stop`.

A stage is preempted by SIGUSR1, or `warning_s` before its Slurm job ends. The RL stage then writes
a checkpoint and ends. If the checkpoint is new, the launcher requeues the job.
"""

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orrery.launcher import status as statuses
from orrery.launcher.slurm import queue
from orrery.launcher.stage import Interrupts, Job, Outcome, RunningStage
from orrery.launcher.status import Holder, lock_holder, newest_checkpoint
from orrery.manifest.errors import OrreryError
from orrery.manifest.publish import write_atomic
from orrery.runtime.preemption import EXIT_PREEMPTED
from orrery.runtime.run_directory import log_path, no_requeue_path, request_path

WIND_DOWN_S = 600.0  # maximum wait for the checkpoint, without Slurm
MARGIN_S = 60.0  # time to end the stage after the checkpoint
STOP_S = 30.0


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


class Preemption:
    def __init__(self, stage: RunningStage):
        self.stage, self.job = stage, stage.job
        self._step_at_start = newest_checkpoint(stage.run_dir)
        self._ends_at_s = _job_ends_at_s(stage.job)
        self._limit_s, self.saved_by_s = 0.0, math.inf  # `saved_by_s`: deadline of saver processes

    def poll(self) -> Outcome | None:
        """Request a checkpoint if preemption is due.

        Return the outcome at the stage's end or the deadline, else None.
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
            stage.log("its time limit is near, and only rl can end early: it continues")
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
        ends_at_s = _job_ends_at_s(self.job)  # ask again: operators can change time limits
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
        stage.log(f"not put back in the queue: {error}")


def _job_ends_at_s(job: Job) -> float | None:
    if job.allocation is None:
        return None
    try:
        left = [one.left for one in queue.user_jobs() if one.id == job.allocation.job]
    except OrreryError:
        return None
    left_s = queue.seconds(left[0]) if left else None
    return None if left_s is None else time.monotonic() + left_s


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
        raise OrreryError(f"{name}: is not running. Type `orrery status {name}` to see its stages")
    told = ", ".join(f"{job.id} ({job.stage}, {job.slurm_state.lower()})" for job in jobs)
    if checkpoint:
        return _preempt_jobs(run_dir, jobs, told)
    return _cancel_jobs(run_dir, jobs, told)


def _preempt_jobs(run_dir: Path, jobs: list[queue.SlurmJob], told: str) -> str:
    name = run_dir.name
    running = [job.id for job in jobs if job.state == "running"]
    if not running:
        raise OrreryError(
            f"{name}: none of its jobs runs ({told}). Type `orrery stop {name}` to cancel them"
        )
    _forbid_requeue(run_dir)
    queue.call("scancel", "--batch", "--signal=USR1", *running)
    return f"{name}: asked job {told} for a checkpoint; it ends when that is written"


def _cancel_jobs(run_dir: Path, jobs: list[queue.SlurmJob], told: str) -> str:
    ids = [job.id for job in jobs]
    queue.cancel(ids)
    limit_s = time.monotonic() + STOP_S
    text = f"{run_dir.name}: cancelled job {told}"
    while left := [job for job in queue.run_jobs(run_dir) if job.id in ids]:
        if time.monotonic() > limit_s:
            named = ", ".join(job.id for job in left)
            if all(job.state == "ending" for job in left):
                return f"{text}; Slurm still cleans up after {named} (completing)"
            raise OrreryError(f"{text}, but {named} has not ended after {STOP_S:.0f} s")
        time.sleep(0.2)
    return text


def _forbid_requeue(run_dir: Path) -> None:
    status, holder = statuses.read(run_dir), lock_holder(run_dir)
    if status is None or holder != Holder(status.host, status.launcher_pid):
        raise OrreryError(
            f"{run_dir.name}: its launcher is starting. Type the command again in a minute"
        )
    if status.state != "running" or status.stage != "rl":
        raise OrreryError(
            f"{run_dir.name}: --checkpoint needs a running rl stage, but the {status.stage} stage "
            f"is {status.state}. Type `orrery stop {run_dir.name}`"
        )
    no_requeue_path(run_dir, "rl").touch()


def _is_a_job(run_dir: Path) -> bool:
    status = statuses.read(run_dir)
    return status is not None and status.slurm_job is not None


def _preempt_launcher(run_dir: Path, pid: int) -> str:
    _forbid_requeue(run_dir)
    _signal(run_dir, pid, signal.SIGUSR1)
    asked = f"{run_dir.name}: asked its launcher (pid {pid}) for a checkpoint"
    return f"{asked}; it ends when that is written"


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
    status = statuses.read(run_dir)
    return status.message if status else f"{run_dir.name}: stopped"
