"""Stop a run: end its launcher, or cancel its Slurm jobs."""

import os
import signal
import time
from pathlib import Path

from orrery.launcher import lock
from orrery.launcher import status as statuses
from orrery.launcher.slurm import queue
from orrery.manifest.errors import OrreryError
from orrery.runtime.run_directory import log_path, no_requeue_path

WITHIN_S = 30.0


def stop_run(
    run_dir: Path, on_cluster: bool, checkpoint: bool = False, within_s: float = WITHIN_S
) -> str:
    """End the run and return its last message. Raise OrreryError if it does not run.

    `checkpoint`: only ask for a checkpoint and the end.
    """
    name = run_dir.name
    holder = lock.holder(run_dir)
    if holder is not None and holder.is_here and not _is_a_job(run_dir):
        if checkpoint:
            return _preempt_launcher(run_dir, holder.pid)
        return _end_launcher(run_dir, holder.pid, within_s)
    jobs = queue.run_jobs(run_dir) if on_cluster else []
    if not jobs:
        if holder is not None:
            raise OrreryError(f"{name}: its launcher is {holder}; type `orrery stop {name}` there")
        raise OrreryError(
            f"{name}: no launcher runs it; type `orrery status {name}` to see where it stands"
        )
    told = ", ".join(f"{job.id} ({job.stage}, {job.slurm_state.lower()})" for job in jobs)
    if checkpoint:
        return _preempt_jobs(run_dir, jobs, told)
    return _cancel_jobs(run_dir, jobs, told, within_s)


def _preempt_jobs(run_dir: Path, jobs: list[queue.SlurmJob], told: str) -> str:
    _forbid_requeue(run_dir)
    name = run_dir.name
    running = [job.id for job in jobs if job.state == "running"]
    if not running:
        raise OrreryError(
            f"{name}: none of its jobs runs ({told}); type `orrery stop {name}` to cancel them"
        )
    queue.call("scancel", "--batch", "--signal=USR1", *running)
    return f"{name}: asked job {told} for a checkpoint; it ends when that is written"


def _cancel_jobs(run_dir: Path, jobs: list[queue.SlurmJob], told: str, within_s: float) -> str:
    ids = [job.id for job in jobs]
    queue.cancel(ids)
    limit_s = time.monotonic() + within_s
    while left := {job.id for job in queue.run_jobs(run_dir)} & {*ids}:
        if time.monotonic() > limit_s:
            raise OrreryError(
                f"{run_dir.name}: cancelled job {told}, but {', '.join(sorted(left))} has not "
                f"ended after {within_s:.0f} s"
            )
        time.sleep(0.2)
    return f"{run_dir.name}: cancelled job {told}"


def _forbid_requeue(run_dir: Path) -> None:
    status = statuses.read(run_dir)
    if status is None or status.state != "running" or status.stage != "rl":
        stage = status.stage if status else "nothing"
        raise OrreryError(
            f"{run_dir.name}: --checkpoint is for the rl stage, and {stage} is what runs; "
            f"type `orrery stop {run_dir.name}`"
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
            f"{run_dir.name}: its launcher (pid {pid}) is another user's; ask them, or become them"
        ) from None


def _end_launcher(run_dir: Path, pid: int, within_s: float) -> str:
    _signal(run_dir, pid, signal.SIGTERM)
    limit_s = time.monotonic() + within_s
    while (holder := lock.holder(run_dir)) is not None and holder.pid == pid:
        if time.monotonic() > limit_s:
            raise OrreryError(
                f"{run_dir.name}: the launcher (pid {pid}) did not end within {within_s:.0f} s; "
                f"see {log_path(run_dir, 'launcher.0')}"
            )
        time.sleep(0.05)
    status = statuses.read(run_dir)
    return status.message if status else f"{run_dir.name}: stopped"
