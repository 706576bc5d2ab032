"""Preemption: a stage that runs out of time writes a checkpoint and ends, and Slurm requeues it.

- SIGUSR1 (sent by Slurm) and the time limit preempt a stage.
- Only the RL stage ends. The others are short, or have their own checkpoints.
- The job is requeued only if the stage has written a newer checkpoint.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from orrery.launcher.slurm import queue
from orrery.launcher.stage import Interrupts, Job, Outcome, RunningStage
from orrery.launcher.status import newest_checkpoint
from orrery.manifest.errors import OrreryError
from orrery.manifest.publish import write_atomic
from orrery.runtime.preemption import EXIT_PREEMPTED
from orrery.runtime.run_directory import no_requeue_path, request_path

WIND_DOWN_S = 600.0  # for the checkpoint of local processes
MARGIN_S = 60.0  # of a Slurm job's time, for the end


@contextmanager
def catch_signals() -> Iterator[Interrupts]:
    """Catch the signals that end or preempt the stage, unless ignored (`nohup`)."""
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
        self._limit_s = 0.0

    def poll(self) -> Outcome | None:
        """Request the checkpoint when due. Return the outcome when it is written."""
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
            stage.log("its time is nearly up, and it has no checkpoints: it goes on")
            stage.interrupts.preemption_requested, self._ends_at_s = False, None
            return
        write_atomic(request_path(stage.run_dir, stage.name), b"")
        self._limit_s = time.monotonic() + self._time_left_s()
        stage.is_preempted = True
        stage.log("winding down")

    def _time_left_s(self) -> float:
        if self.job.allocation is None:
            return WIND_DOWN_S * self.stage.deadline_scale
        ends_at_s = _job_ends_at_s(self.job)  # asked again: an operator may have moved it
        left_s = float(self.job.allocation.slurm.warning_s)
        if ends_at_s is not None:
            left_s = ends_at_s - time.monotonic()
        return max(0.5 * left_s, left_s - MARGIN_S)


def requeue(stage: RunningStage) -> None:
    assert stage.job.allocation is not None
    try:
        queue.requeue(stage.job.allocation.job)
    except OrreryError as error:
        stage.log(f"not put back in the queue: {error}")


def _job_ends_at_s(job: Job) -> float | None:
    """Return when Slurm ends our job, on the monotonic clock."""
    if job.allocation is None:
        return None
    try:
        left = [one.left for one in queue.user_jobs() if one.id == job.allocation.job]
    except OrreryError:
        return None
    left_s = queue.seconds(left[0]) if left else None
    return None if left_s is None else time.monotonic() + left_s
