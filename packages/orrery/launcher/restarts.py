"""Restart an engine that has ended, as its next incarnation.

- An engine is not restarted after a user's mistake (exit code 2), or if two incarnations in a row
  ended before they served.
- The old incarnation's endpoint, health file and processes are removed before the next one starts.
"""

import signal
import time
from collections import Counter, deque

from orrery.launcher import failure
from orrery.launcher.process import PROCESS, Process, reap
from orrery.launcher.slurm.job import SlurmTask
from orrery.launcher.stage import TERMINATED, RunningStage, end_strays
from orrery.manifest.errors import OrreryError
from orrery.observe import hang_detector
from orrery.runtime.health import FAILED, Health
from orrery.runtime.preemption import fenced, forget_fence
from orrery.runtime.run_directory import health_dir

ROLE = "inference"  # only engines are restarted, and the other roles wait for them
WINDOW_S = 24 * 3600.0  # period in which restarts are counted


class Restarts:
    """Count restarts. `most` is the limit for all engines together within WINDOW_S."""

    def __init__(self, most: int):
        self.most = most
        self.by_name: Counter[str] = Counter()
        self._times_s: deque[float] = deque()
        self._failed_starts: Counter[str] = Counter()  # incarnations in a row that never served

    @property
    def num_recent(self) -> int:
        return len(self._times_s)

    def refusal(self, name: str, has_served: bool, code: int | None, now_s: float) -> str | None:
        """Count a restart of `name` after exit code `code` and return None, or refuse it.

        A refusal is the reason in words, or "" if the manifest allows no restarts.
        """
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
        self._replaced: list[int] = []  # process groups of old incarnations, to be reaped

    def restart_ended(self) -> bool:
        stage, job = self.stage, self.stage.job
        if not job.max_restarts:
            return False
        time.sleep(failure.SETTLE_S)
        ended = [process for process in stage.processes if stage.has_failed(process)]
        stage.read_health()
        others = [health for health in stage.health.values() if health.role != ROLE]
        if any(process.plan.role != ROLE for process in ended):
            return False
        if any(health.doing == FAILED for health in others):
            return False
        if job.allocation is not None:
            is_ended_by_slurm = any(one.poll() in TERMINATED for one in ended)
            if is_ended_by_slurm or failure.lost_nodes(stage, ended):
                return False
        for process in ended:
            has_served = (stage.endpoints / f"{process.name}.json").exists()
            now_s = time.monotonic()
            refusal = self._policy.refusal(process.name, has_served, process.poll(), now_s)
            if refusal is not None:
                self.refusal = refusal
                return False
            self._replace(process, has_served)
        stage.write_status("running", "")
        return True

    def _replace(self, process: Process | SlurmTask, has_served: bool) -> None:
        stage = self.stage
        process.kill()
        if isinstance(process, Process):
            end_strays(stage.processes, self._start, process.env[PROCESS])
            self._replaced.append(process.pid)
        for folder in (stage.endpoints, health_dir(stage.run_dir, stage.name)):
            (folder / f"{process.name}.json").unlink(missing_ok=True)
        why = failure.sentence(stage, process).removeprefix(f"{stage.name}: ")
        started = process.restart()
        stage.processes = [started if one is process else one for one in stage.processes]
        stage.health.pop(process.name, None)
        stage.fenced.pop(process.name, None)
        stage.metrics.write(
            event="engine_restart",
            process=process.name,
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
                        stage.log(f"{one.name} is fenced, and ended: {one.why}")
                        process.kill()
                    stage.fenced[one.name] = one.why
            forget_fence(stage.run_dir, stage.name, stage.attempt, one)

    def _kill_hung(self, running: dict[str, Health]) -> None:
        stage, ended = self.stage, []
        hung = {
            name: hang_detector.hung_s(one, stage.health_view.now_s)
            for name, one in running.items()
            if one.role == ROLE and name not in stage.fenced
        }
        for process in stage.processes:
            if for_s := hung.get(process.name):
                stage.fenced[process.name] = f"its event loop has not turned for {for_s:.0f} s"
                stage.log(f"{process.name} is ended: {stage.fenced[process.name]}")
                process.signal(signal.SIGUSR1)
                process.signal(signal.SIGCONT)
                ended.append(process)
        time.sleep(failure.EVIDENCE_S if ended else 0.0)
        for process in ended:
            process.kill()
