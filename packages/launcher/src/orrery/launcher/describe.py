"""What `orrery status` and `orrery logs` print: read from files only, so they work on a run that is going, ended or dead."""

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from orrery.launcher import status as statuses
from orrery.launcher.runs import Run, resume_command
from orrery.launcher.slurm import queue
from orrery.launcher.supervisor import newest_checkpoint
from orrery.manifest.errors import OrreryError
from orrery.manifest.json_file import open_regular
from orrery.runtime.health import read_health
from orrery.runtime.metrics import merge_attempts, rows
from orrery.runtime.run_directory import check_layout
from orrery.runtime.timing import duration

FOLLOW_S = 0.3
NUM_LOSSES = 4
BLOCK_BYTES = 2**16


def overview(path: Path) -> str:
    """Return a run's line in the list. Raises `OrreryError` if its status cannot be read."""
    try:
        check_layout(path)
    except OrreryError as error:  # the list shows an older run with its remedy, not as a failure
        return str(error)
    status = statuses.read(path)
    if status is None:
        return f"{path.name}: not started"
    state = "launcher died" if statuses.launcher_died(path, status) else status.state
    return f"{path.name}: {status.stage} {state} (attempt {status.attempt})"


def describe(run: Run, now_s: float | None = None, on_cluster: bool = False) -> list[str]:
    """Return lines about a run: stages, jobs, processes with their present work or wait.

    If no launcher works on the run, the last line is the command to type. Raises `OrreryError` if
    the run's status cannot be read.
    """
    now_s = time.time() if now_s is None else now_s
    status = statuses.read(run.path)
    jobs, silence = _jobs(run.path) if on_cluster else ([], [])
    if status is None:
        if jobs:
            return [f"{run.path.name}: not started", *map(_job_line, jobs)]
        profile = "slurm" if on_cluster else "local"
        return [
            f"{run.path.name}: not started; type `{resume_command(run, 'init', profile=profile)}`",
            *silence,
        ]
    died = statuses.launcher_died(run.path, status)
    working = status.state in ("running", "stopping") and not died
    state = "its launcher died" if died else status.state
    since = f" for {duration(now_s - status.started_s)}" if working else ""
    lines = [f"{run.path.name}: {status.stage} {state}{since}, attempt {status.attempt}"]
    finished = run.finished()
    marks = [
        f"{'✓' if stage in finished else '▶' if stage == status.stage else '·'} {stage}"
        for stage in run.stages
    ]
    lines.append("  " + "   ".join(marks))
    lines += [*map(_job_line, jobs), *silence]
    health = read_health(run.path, status.stage, status.attempt)
    for role in status.roles:
        one = health.get(role.name)
        if working and role.state == "running":
            does = one.sentence(now_s) if one else "starting"
            step = f"step {one.step}" if one and one.step is not None else ""
        else:
            does, step = role.exit or ("lost with its launcher" if died else "ended"), ""
        where = f"pid {role.pid:<8}" if role.pid else f"{role.node:<12}"
        again = f" · started again {role.restarts} ×" if role.restarts else ""
        lines.append(f"  {role.name:<16} {where} {step:<9} {does}{again}")
    if status.stage == "sft":
        lines += _losses(run.path)
    if status.stage == "rl":
        lines += _signal(run.path, status.attempt)
    if (checkpoint := newest_checkpoint(run.path)) is not None:
        lines.append(f"  newest checkpoint: step {checkpoint}")
    if any(job.stage == status.stage and job.state == "waiting" for job in jobs):
        lines.append("  it goes on by itself when its job starts again")
    elif died:
        who = f"job {status.slurm_job}" if status.slurm_job else f"pid {status.launcher_pid}"
        lines.append(
            f"  the launcher ({who}) died without a word; type `{_resume(run, status)}` to go on"
        )
    elif status.message:
        lines.append(f"  {status.message}")
        if status.state == "done" and len(finished) < len(run.stages):
            lines.append(f"  type `{_resume(run, status, run.stages[len(finished)])}` to go on")
    return lines


def _losses(run_dir: Path) -> list[str]:
    """SFT's newest loss, and beside it the newest on examples that are never trained, oldest first."""
    of_sft = (
        row for row in rows(run_dir / "metrics" / "trainer.0.jsonl") if row.get("stage") == "sft"
    )
    losses = merge_attempts(row for row in of_sft if _is_number(row.get("step")))
    said = [
        f"loss {row['loss']:.4f} (step {row['step']})"
        for row in losses
        if _is_number(row.get("loss"))
    ][-1:]
    validated = [
        f"{row['validation_loss']:.4f} (step {row['step']})"
        for row in losses
        if _is_number(row.get("validation_loss"))
    ]
    if validated:
        said.append("validation loss " + " → ".join(validated[-NUM_LOSSES:]))
    return ["  " + " · ".join(said)] if said else []


def _signal(run_dir: Path, attempt: int) -> list[str]:
    """Describe the share without signal of the rollouts sampled for the attempt's newest batch."""
    of_rl = (
        row
        for row in rows(run_dir / "metrics" / "orchestrator.0.jsonl")
        if row.get("stage") == "rl" and row.get("attempt") == attempt
    )
    newest = deque(
        (
            row
            for row in of_rl
            if row.get("event") == "batch" and _is_number(row.get("num_without_signal"))
        ),
        1,
    )
    return [
        f"  batch {row.get('step')}: {row['num_without_signal']} of {row['num_sampled']} sampled rollouts without signal "
        f"({row['num_without_signal'] / row['num_sampled']:.0%})"
        for row in newest
        if _is_number(row.get("num_sampled")) and row["num_sampled"]
    ]


def _is_number(value: object) -> bool:
    """Return whether this is a number; rows have null for a value that is not finite."""
    return isinstance(value, int | float)


def _resume(run: Run, status: statuses.Status, stage: str | None = None) -> str:
    return resume_command(
        run, stage or status.stage, profile="slurm" if status.slurm_job else "local"
    )


def _jobs(run_dir: Path) -> tuple[list[queue.SlurmJob], list[str]]:
    """The run's jobs in Slurm's queue; where there is no word from it, a line that says so: a status is better than an error."""
    try:
        return queue.run_jobs(run_dir), []
    except OrreryError as error:
        return [], [f"  Slurm does not answer, so jobs may be missing here: {error}"]


def _job_line(job: queue.SlurmJob) -> str:
    if job.state == "waiting":
        return f"  job {job.id} ({job.stage}): {job.slurm_state.lower()}, waits for {job.reason}"
    return f"  job {job.id} ({job.stage}): {job.slurm_state.lower()} for {job.elapsed} on {job.nodes}, {job.left} left"


def log_paths(path: Path, role: str | None) -> list[Path]:
    """The logs of a role (`trainer`), of one process (`trainer.0`), or all; raises `OrreryError` naming those there are."""
    every = sorted((path / "logs").glob("*.log"))
    chosen = [
        log for log in every if role is None or log.stem == role or log.stem.split(".")[0] == role
    ]
    if not chosen:
        names = ", ".join(log.stem for log in every) or "none yet"
        raise OrreryError(
            f"logs of {role or path.name}: there are none in {path / 'logs'}; the processes with a log are {names}"
        )
    return chosen


def log_lines(paths: list[Path], num_lines: int, follow: bool) -> Iterator[str]:
    """The last lines of each log (0: all), then, when following, what is added; prefixed by the process where there are several.

    In memory are at most `num_lines` lines and a block, for a log of weeks is larger than memory.
    """
    offsets: dict[Path, int] = {}
    for path in paths:
        with open_regular(path) as log:
            log.seek(_begin_of_last(log, num_lines) if num_lines else 0)
            lines = (line for data in log for line in data.decode(errors="replace").splitlines())
            yield from _prefixed(
                path, deque(lines, num_lines) if num_lines else lines, len(paths) > 1
            )
            offsets[path] = log.tell()
    while follow:
        time.sleep(FOLLOW_S)
        for path in paths:
            with open_regular(path) as log:
                log.seek(offsets[path])
                data = log.read()
            data = data[: data.rfind(b"\n") + 1]
            offsets[path] += len(data)
            yield from _prefixed(path, data.decode(errors="replace").splitlines(), len(paths) > 1)


def _begin_of_last(log: BinaryIO, num_lines: int) -> int:
    """Where the last lines begin, found from the end."""
    begin = log.seek(0, os.SEEK_END)
    ends = num_lines + 1  # the last one ends the last line
    if begin:
        log.seek(begin - 1)
        ends -= log.read(1) != b"\n"
    while begin:
        size = min(BLOCK_BYTES, begin)
        begin -= size
        log.seek(begin)
        block = log.read(size)
        while (size := block.rfind(b"\n", 0, size)) >= 0:
            ends -= 1
            if not ends:
                return begin + size + 1
    return 0


def _prefixed(path: Path, lines: Iterable[str], prefix: bool) -> Iterator[str]:
    yield from (f"{path.stem} | {line}" for line in lines) if prefix else lines
