"""Find the process that failed first, and write the stage's last message.

If its error names another failing process, the message blames that process.
"""

import re
import signal
import time
from collections.abc import Collection, Sequence

from orrery.launcher.process import Process
from orrery.launcher.slurm import queue
from orrery.launcher.slurm.job import SlurmTask, failed_node
from orrery.launcher.stage import TERMINATED, Outcome, RunningStage
from orrery.manifest.errors import OrreryError, OutOfMemory
from orrery.runtime.health import FAILED, listed
from orrery.runtime.run_directory import flight_recorder_dir, logs_dir

POLL_S = 0.1
BLAME_S = 5.0  # longest wait for the failure of a process that an error names
SETTLE_S = 0.3  # wait for further failures after the first
EVIDENCE_S = 2.0  # wait until processes have written their stacks
RECORDED_S = 10.0  # longest wait for a rank's flight recorder
SLURM_SAYS_S = 2.0  # longest wait for Slurm to report whether it ends the job


def named_processes(error: str | None, names: Collection[str]) -> set[str]:
    """Return the named processes. `engine 0` is `inference.0`, `router` is `router.0`."""
    words = set(re.findall(r"\b[a-z_]+\.\d+\b", error or ""))
    words |= {f"inference.{index}" for index in re.findall(r"\bengine (\d+)\b", error or "")}
    words |= {"router.0"} if re.search(r"\brouter\b", error or "") else set()
    return words & set(names)


def failure_outcome(stage: RunningStage, refusal: str = "") -> Outcome:
    first = _first_failed(stage)
    text = sentence(stage, first)
    if (outcome := lost_outcome(stage, text.removeprefix(f"{stage.name}: "))) is not None:
        return outcome
    if (outcome := _ended_by_slurm(stage, first)) is not None:
        return outcome
    text += f"; {refusal}" if refusal else ""
    text += f"; its log is {first.log}"
    peers = [one for one in stage.processes if one.plan.role == first.plan.role]
    others = any(one is not first and _can_answer(stage, one) for one in peers)
    if others and (first.poll() or 0) < 0:  # a killed process cannot report an error
        text += f"; {keep_evidence(stage)}"
    hint = stage.resume_hint()
    if first.poll() == OutOfMemory.exit_code:
        run = stage.run_dir.name.rpartition("-")[0]
        hint = (
            f"change the fields that it names in the spec, type `orrery render {run}`, then "
            f"`{stage.job.resume}`"
        )
    return Outcome("failed", f"{text}; {hint}", 1)


def stall_outcome(stage: RunningStage, text: str) -> Outcome:
    if (outcome := lost_outcome(stage, text)) is not None:
        return outcome
    evidence = keep_evidence(stage)
    return Outcome("failed", f"{stage.name}: {text}; {evidence}; {stage.resume_hint()}", 1)


def lost_outcome(stage: RunningStage, seen: str) -> Outcome | None:
    lost = lost_nodes(stage)
    if not lost:
        return None
    held = "; ".join(f"{node} was lost, which held {_held(stage, node)}" for node in lost)
    text = f"{stage.name}: {held} (seen first: {seen}); when Slurm starts the job again"
    return Outcome("failed", f"{text}, {stage.resume_point()}", 1, requeue="wait")


def lost_nodes(stage: RunningStage, ended: Sequence[Process | SlurmTask] = ()) -> list[str]:
    if stage.job.allocation is None or stage.job.plan.num_nodes == 1:
        return []
    tasks = [one for one in stage.processes if isinstance(one, SlurmTask)]
    said = {node for task in tasks if (node := failed_node(task.step.messages()))}
    suspected = sorted({process.node for process in ended})
    return sorted(said) or stage.job.allocation.silent_nodes(suspected)


def _held(stage: RunningStage, node: str) -> str:
    return listed(process.name for process in stage.processes if process.node == node)


def sentence(stage: RunningStage, process: Process | SlurmTask) -> str:
    health, code = stage.health.get(process.name), process.poll()
    if code is None:
        how = "failed and does not end"
    elif code == 0:
        how = "ended by itself (exit code 0) while the stage needed it"
    else:
        how = f"was killed by {process.ending}" if code < 0 else f"ended with {process.ending}"
    if stage.job.plan.num_nodes > 1:
        how = f"on {process.node} {how}"
    doing = "" if health else " before it said anything"
    if health and code != 0:
        doing = f" while {health.last}"
    error = health.error if health else None
    error = stage.fenced.get(process.name) if error is None else error
    if error is None and code != -signal.SIGKILL and (words := process.last_output()):
        error = f"its last line is {words!r}"
    return f"{stage.name}: {process.name} {how}{doing}" + (f": {error}" if error else "")


def keep_evidence(stage: RunningStage) -> str:
    """Make all processes write their stacks, and trainer ranks torch's flight recorder."""
    for process in stage.processes:
        if process.name in stage.health:  # a process with a health file handles the signal
            process.signal(signal.SIGUSR1)
            process.signal(signal.SIGCONT)
    time.sleep(EVIDENCE_S)
    logs, recorders = logs_dir(stage.run_dir), flight_recorder_dir(stage.run_dir)
    limit_s = time.monotonic() + RECORDED_S - EVIDENCE_S
    ranks = [
        one
        for one in stage.processes
        if (health := stage.health.get(one.name)) is not None and health.heartbeat
    ]

    def is_missing(process: Process | SlurmTask) -> bool:
        file = recorders / f"rank_{process.plan.index}"
        return _can_answer(stage, process) and not file.exists()

    while time.monotonic() < limit_s and any(map(is_missing, ranks)):
        time.sleep(0.1)
        stage.read_health()
    text = f"stacks are in {logs}/*.log"
    if any(recorders.glob("rank_*")):
        text += f", flight recorders in {recorders}"
    return text


def _can_answer(stage: RunningStage, process: Process | SlurmTask) -> bool:
    health = stage.health.get(process.name)
    return process.poll() is None and (health is None or health.doing != FAILED)


def _first_failed(stage: RunningStage) -> Process | SlurmTask:
    def order(process: Process | SlurmTask) -> tuple[bool, float]:
        return process.poll() != -signal.SIGKILL, stage.changed_s(process)

    time.sleep(SETTLE_S)
    limit_s = time.monotonic() + BLAME_S
    while True:
        stage.read_health()
        said = {name for name, health in stage.health.items() if health.doing == FAILED}
        failed = [one for one in stage.processes if stage.has_failed(one) or one.name in said]
        first = min(failed, key=order)
        health = stage.health.get(first.name)
        others = {process.name for process in stage.processes} - {first.name}
        blamed = named_processes(health.error if health else None, others)
        if guilty := [process for process in failed if process.name in blamed]:
            return min(guilty, key=order)
        if not blamed or time.monotonic() > limit_s:
            return first
        time.sleep(POLL_S)


def _ended_by_slurm(stage: RunningStage, first: Process | SlurmTask) -> Outcome | None:
    """Return the outcome if Slurm ends the job. A role may get its signal first."""
    ended_by_signal = first.poll() in (*TERMINATED, -signal.SIGKILL)
    if stage.job.allocation is None or not ended_by_signal:
        return None
    job, code = stage.job.allocation.job, 128 + signal.SIGTERM
    limit_s = time.monotonic() + SLURM_SAYS_S
    while time.monotonic() < limit_s:
        if stage.interrupts.received:
            return stage.stopped()
        try:
            if queue.is_preempted(job):
                text = f"{stage.name}: Slurm takes the nodes of job {job} away"
                text += f"; when it starts the job again, {stage.resume_point()}"
                return Outcome("stopped", text, code, requeue="wait")
            state = queue.slurm_states([job]).get(job, "")
        except OrreryError:
            return None
        if state not in ("RUNNING", ""):
            text = f"{stage.name}: Slurm ends job {job} ({state}); {stage.resume_hint()}"
            return Outcome("stopped", text, code)
        time.sleep(0.5)
    return None
