"""Format the output of `orrery status` and `orrery logs`."""

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from orrery.launcher.runs import (
    Run,
    Status,
    launcher_died,
    newest_checkpoint,
    read_status,
    resume_command,
)
from orrery.launcher.slurm import queue
from orrery.manifest.errors import OrreryError
from orrery.manifest.json_file import open_regular
from orrery.runtime.health import read_health
from orrery.runtime.metrics import merge_attempts, rows
from orrery.runtime.run_directory import check_layout, logs_dir, metrics_path
from orrery.runtime.timing import duration

FOLLOW_S = 0.3
NUM_LOSSES = 4
BLOCK_BYTES = 2**16


def overview(path: Path) -> str:
    try:
        check_layout(path)
    except OrreryError as error:
        return str(error)
    status = read_status(path)
    if status is None:
        return f"{path.name}: not started"
    state = "launcher died" if launcher_died(path, status) else status.state
    return f"{path.name}: {status.stage} {state} (attempt {status.attempt})"


def describe(run: Run, now_s: float | None = None, on_cluster: bool = False) -> list[str]:
    now_s = time.time() if now_s is None else now_s
    name, status = run.path.name, read_status(run.path)
    jobs, no_answer = _jobs(run.path) if on_cluster else ([], [])
    if status is None:
        if jobs:
            return [f"{name}: not started", *map(_job_line, jobs)]
        profile = "slurm" if on_cluster else "local"
        command = resume_command(run, "init", profile=profile)
        return [f"{name}: not started; type `{command}`", *no_answer]
    died = launcher_died(run.path, status)
    working = status.state in ("running", "stopping") and not died
    state = "its launcher died" if died else status.state
    since = f" for {duration(now_s - status.started_s)}" if working else ""
    lines = [f"{name}: {status.stage} {state}{since}, attempt {status.attempt}"]
    finished = run.finished()
    waits = any(job.stage == status.stage and job.state == "waiting" for job in jobs)
    mark = "▶" if waits else "✗" if died else {"failed": "✗", "stopped": "■"}.get(status.state, "▶")
    marks = {status.stage: mark, **dict.fromkeys(finished, "✓")}
    lines.append("  " + "   ".join(f"{marks.get(stage, '·')} {stage}" for stage in run.stages))
    lines += [*map(_job_line, jobs), *no_answer]
    lines += _role_lines(run.path, status, working, died, now_s)
    if status.stage == "sft":
        lines += _losses(run.path)
    if status.stage == "rl":
        lines += _signal(run.path, status.attempt)
    lines += _sites(run.path, status.stage)
    if (checkpoint := newest_checkpoint(run.path)) is not None:
        lines.append(f"  newest checkpoint: step {checkpoint}")
    if waits:
        lines.append("  the stage goes on by itself when Slurm starts its job again")
    elif died:
        who = f"job {status.slurm_job}" if status.slurm_job else f"pid {status.launcher_pid}"
        command = _resume(run, status)
        lines.append(f"  the launcher ({who}) ended without a message; type `{command}` to go on")
    elif status.message:
        lines.append(f"  {status.message}")
        if status.state == "done" and len(finished) < len(run.stages):
            lines.append(f"  type `{_resume(run, status, run.stages[len(finished)])}` to go on")
    return lines


def _role_lines(
    run_dir: Path, status: Status, working: bool, died: bool, now_s: float
) -> list[str]:
    health = read_health(run_dir, status.stage, status.attempt)
    lines = []
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
    return lines


def _losses(run_dir: Path) -> list[str]:
    sft = (one for one in rows(metrics_path(run_dir, "trainer.0")) if one.get("stage") == "sft")
    losses = merge_attempts(row for row in sft if _is_number(row.get("step")))

    def told(name: str) -> list[str]:
        found = [row for row in losses if _is_number(row.get(name))]
        return [f"{row[name]:.4f} (step {row['step']})" for row in found]

    said = [f"loss {text}" for text in told("loss")[-1:]]
    if validated := told("validation_loss"):
        said.append("validation loss " + " → ".join(validated[-NUM_LOSSES:]))
    return ["  " + " · ".join(said)] if said else []


def _signal(run_dir: Path, attempt: int) -> list[str]:
    wanted = {"stage": "rl", "attempt": attempt, "event": "batch"}.items()
    newest = None
    for row in rows(metrics_path(run_dir, "orchestrator.0")):
        if wanted <= row.items() and _is_number(row.get("num_without_signal")):
            newest = row
    if newest is None or not _is_number(newest.get("num_sampled")) or not newest["num_sampled"]:
        return []
    num_without, num_sampled = newest["num_without_signal"], newest["num_sampled"]
    share = f"{num_without} of {num_sampled} sampled rollouts without signal"
    return [f"  batch {newest.get('step')}: {share} ({num_without / num_sampled:.0%})"]


def _sites(run_dir: Path, stage: str) -> list[str]:
    newest = None
    for row in rows(metrics_path(run_dir, "trainer.0")):
        if (row.get("event"), row.get("stage")) == ("round", stage):
            newest = row
    if newest is None or not isinstance(names := newest.get("names"), list):
        return []
    sites = f"{len(names)} site{'s' * (len(names) != 1)}"
    return [f"  round {newest.get('round')}: {sites} ({', '.join(map(str, names))})"]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _resume(run: Run, status: Status, stage: str | None = None) -> str:
    profile = "slurm" if status.slurm_job else "local"
    return resume_command(run, stage or status.stage, profile=profile)


def _jobs(run_dir: Path) -> tuple[list[queue.SlurmJob], list[str]]:
    try:
        return queue.run_jobs(run_dir), []
    except OrreryError as error:
        return [], [f"  Slurm does not answer, so jobs may be missing here: {error}"]


def _job_line(job: queue.SlurmJob) -> str:
    text = f"  job {job.id} ({job.stage}): {job.slurm_state.lower()}"
    if job.state == "waiting":
        return f"{text}, waits for {job.reason}"
    return f"{text} for {job.elapsed} on {job.nodes}, {job.left} left"


def log_paths(path: Path, role: str | None) -> list[Path]:
    every = sorted(logs_dir(path).glob("*.log"))
    chosen = [log for log in every if role in (None, log.stem, log.stem.split(".")[0])]
    if not chosen:
        if not every:
            raise OrreryError(
                f"{path.name}: no logs yet. Type `orrery status {path.name}` for its stages"
            )
        names = ", ".join(log.stem for log in every)
        raise OrreryError(f"{path.name}: no log of {role}. Processes with a log are {names}")
    return chosen


def log_lines(paths: list[Path], num_lines: int, follow: bool) -> Iterator[str]:
    offsets: dict[Path, int] = {}
    for path in paths:
        with open_regular(path) as log:
            log.seek(_begin_of_last(log, num_lines) if num_lines else 0)
            found = (line for data in log for line in data.decode(errors="replace").splitlines())
            lines = deque(found, num_lines) if num_lines else found
            yield from _prefixed(path, lines, len(paths) > 1)
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
    begin = log.seek(0, os.SEEK_END)
    ends = num_lines + 1
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
