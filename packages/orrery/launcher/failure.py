"""Report the process that failed first, and restart inference engines.

- If a failed process's error names another failed process, the latter is reported.
- If a process of an engine ends, all processes of the engine restart.
- An engine does not restart after a user error (exit code 2) or two failed starts in a row.
"""

import re
import signal
import time
from collections import Counter, deque
from collections.abc import Collection, Sequence

from orrery.launcher.process import PROCESS, Process, reap
from orrery.launcher.slurm import queue
from orrery.launcher.slurm.allocation import SlurmTask, failed_node
from orrery.launcher.stage import TERMINATED, Outcome, RunningStage, end_strays
from orrery.manifest.errors import OrreryError, OutOfMemory
from orrery.manifest.plan import ENGINE_ROLES
from orrery.observe import hang_detector
from orrery.runtime.health import FAILED, Health, listed
from orrery.runtime.process_control import fenced, forget_fence
from orrery.runtime.run_directory import flight_recorder_dir, health_dir, logs_dir

POLL_S = 0.1
BLAME_S = 5.0  # maximum wait for the failure of a process that an error names
SETTLE_S = 0.3  # time for related processes to fail too
EVIDENCE_S = 2.0  # time for processes to write stacks
RECORDED_S = 10.0  # maximum wait for torch's flight recorder files
SLURM_SAYS_S = 2.0  # maximum wait for Slurm's report of the job's end


def named_processes(error: str | None, names: Collection[str]) -> set[str]:
    """Return the processes of `names` that `error` mentions. `engine 0` means `inference.0`."""
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
    if others and (first.poll() or 0) < 0:  # a killed process has no error, so show peers' stacks
        text += f"; {keep_evidence(stage)}"
    hint = stage.resume_hint()
    if first.poll() == OutOfMemory.exit_code:
        hint = (
            "change the fields that the error names in the spec, type "
            f"`orrery render {stage.run_name}`, then `{stage.job.resume}`"
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
    held = "; ".join(f"{node} with {_held(stage, node)} was lost" for node in lost)
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
    doing = "" if health else " before its first report"
    if health and code != 0:
        doing = f" while {health.last}"
    error = health.error if health else None
    error = stage.fenced.get(process.name) if error is None else error
    if error is None and code != -signal.SIGKILL and (words := process.last_output()):
        error = f"its last line is {words!r}"
    return f"{stage.name}: {process.name} {how}{doing}" + (f": {error}" if error else "")


def keep_evidence(stage: RunningStage) -> str:
    """Make processes write stacks and torch flight recorder files. Return a text with the paths."""
    for process in stage.processes:
        if process.name in stage.health:  # SIGUSR1 kills a process without health file
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
                text = f"{stage.name}: Slurm preempts job {job}"
                text += f"; when Slurm starts the job again, {stage.resume_point()}"
                return Outcome("stopped", text, code, requeue="wait")
            state = queue.slurm_states([job]).get(job, "")
        except OrreryError:
            return None
        if state not in ("RUNNING", ""):
            text = f"{stage.name}: Slurm ends job {job} ({state}); {stage.resume_hint()}"
            return Outcome("stopped", text, code)
        time.sleep(0.5)
    return None


WINDOW_S = 24 * 3600.0  # older restarts do not count


class Restarts:
    """Allow `most` restarts of all engines together within WINDOW_S."""

    def __init__(self, most: int):
        self.most = most
        self.by_name: Counter[str] = Counter()
        self._times_s: deque[float] = deque()
        self._failed_starts: Counter[str] = Counter()

    @property
    def num_recent(self) -> int:
        return len(self._times_s)

    def refusal(self, name: str, has_served: bool, code: int | None, now_s: float) -> str | None:
        """Return None and count the restart, or return why it is refused ("" if `most` is 0)."""
        while self._times_s and self._times_s[0] <= now_s - WINDOW_S:
            self._times_s.popleft()
        self._failed_starts[name] = 0 if has_served else self._failed_starts[name] + 1
        if not self.most:
            return ""
        if code == OrreryError.exit_code:
            return "it is not started again, because the error would be the same"
        if self._failed_starts[name] > 1:
            return "it ended twice before it served, so it is not started again"
        if self.num_recent >= self.most:
            return (
                f"engines were started again {self.most} times, "
                "and inference.max_restarts allows no more within a day"
            )
        self.by_name[name] += 1
        self._times_s.append(now_s)
        return None


class EngineRestarts:
    def __init__(self, stage: RunningStage, start: str):
        self.stage, self._start = stage, start
        self.refusal = ""
        self._policy = Restarts(stage.job.max_restarts)
        stage.engine_restarts = self._policy.by_name
        self._replaced: list[int] = []  # process groups of killed engines, to reap

    def restart_ended(self) -> bool:
        stage, job = self.stage, self.stage.job
        if not job.max_restarts:
            return False
        time.sleep(SETTLE_S)
        ended = [process for process in stage.processes if stage.has_failed(process)]
        stage.read_health()
        others = [health for health in stage.health.values() if health.role not in ENGINE_ROLES]
        if any(process.plan.role not in ENGINE_ROLES for process in ended):
            return False
        if any(health.doing == FAILED for health in others):
            return False
        # Slurm ends a failed step's other tasks by SIGTERM, so prefer tasks that ended otherwise.
        first = {
            process.plan.whole: process
            for process in sorted(ended, key=lambda one: one.poll() not in TERMINATED)
        }
        if job.allocation is not None:
            is_ended_by_slurm = any(one.poll() in TERMINATED for one in first.values())
            if is_ended_by_slurm or lost_nodes(stage, ended):
                return False
        for engine, process in first.items():
            has_served = (stage.endpoints / f"{engine}.json").exists()
            now_s = time.monotonic()
            refusal = self._policy.refusal(engine, has_served, process.poll(), now_s)
            if refusal is not None:
                self.refusal = refusal
                return False
            self._replace(process, has_served)
        stage.write_status("running", "")
        return True

    def _replace(self, process: Process | SlurmTask, has_served: bool) -> None:
        stage, engine = self.stage, process.plan.whole
        members = [one for one in stage.processes if one.plan.whole == engine]
        why = sentence(stage, process).removeprefix(f"{stage.name}: ")
        for one in members:
            one.kill()
            if isinstance(one, Process):
                end_strays(stage.processes, self._start, one.env[PROCESS])
                self._replaced.append(one.pid)
            for folder in (stage.endpoints, health_dir(stage.run_dir, stage.name)):
                (folder / f"{one.name}.json").unlink(missing_ok=True)
        again = {one.name: one.restart() for one in members}
        stage.processes = [again.get(one.name, one) for one in stage.processes]
        for name in again:
            stage.health.pop(name, None)
            stage.fenced.pop(name, None)
        started = again[engine]
        stage.metrics.write(
            event="engine_restart",
            process=engine,
            incarnation=started.incarnation,
            ending=process.ending,
            has_served=has_served,
            why=why,
        )
        where = started.node
        if isinstance(started, Process):
            where = f"pid {started.pid}, port {started.port}"
        lately = f"{self._policy.num_recent} of {stage.job.max_restarts} within a day"
        stage.tell(f"{why}; started again ({lately}): {where}")

    def look(self, seen: dict[str, Health], running: set[str]) -> None:
        self._replaced = [group for group in self._replaced if reap(group)]
        if self.stage.job.max_restarts:
            self._kill_hung({name: seen[name] for name in running & seen.keys()})

    def kill_fenced(self) -> None:
        stage = self.stage
        if not stage.job.max_restarts:
            return
        for one in fenced(stage.run_dir, stage.name, stage.attempt):
            for process in stage.processes:
                if (process.name, process.incarnation) == (one.name, one.incarnation):
                    if process.poll() is None and one.name not in stage.fenced:
                        stage.log(f"{one.name} is killed at the orchestrator's request: {one.why}")
                        process.kill()
                    stage.fenced[one.name] = one.why
            forget_fence(stage.run_dir, stage.name, stage.attempt, one)

    def _kill_hung(self, running: dict[str, Health]) -> None:
        stage, ended = self.stage, []
        hung = {
            name: hang_detector.hung_s(one, stage.health_view.now_s)
            for name, one in running.items()
            if one.role in ENGINE_ROLES and name not in stage.fenced
        }
        for process in stage.processes:
            if for_s := hung.get(process.name):
                stage.fenced[process.name] = f"its event loop sent no heartbeat for {for_s:.0f} s"
                stage.log(f"{process.name} is killed: {stage.fenced[process.name]}")
                process.signal(signal.SIGUSR1)
                process.signal(signal.SIGCONT)
                ended.append(process)
        time.sleep(EVIDENCE_S if ended else 0.0)
        for process in ended:
            process.kill()
