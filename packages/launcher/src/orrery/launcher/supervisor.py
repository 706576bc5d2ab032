"""One stage, from its first process to its `DONE`.

- In: a `Job`: a run directory with its manifest, and the stage's plan.
- Out: an `Outcome`, `status.json`, and on success `stages/<stage>/DONE`.
- Holds the run's lock throughout: two launchers never share a run directory.
- The first process that fails (a server that ends early counts) ends all others within seconds; the outcome's sentence names it.
- But an engine is started again, as the same index in its next incarnation, where the manifest allows it (`restarts.py`).
- Processes are local ones, or tasks of the steps of the Slurm job that this launcher runs in; what is watched is the same.
- SIGUSR1 asks for a wind-down (Slurm sends it before the time limit): the RL stage writes a checkpoint and ends, to be gone on with.
- Whatever happens, no process, no shared memory and no cache on a scratch disk of the run is left. If this process itself is killed,
  parent watches (in a Slurm job: Slurm) end the roles, and the next start clears what they left.
- A stage is never retried. Whoever wants it to go on starts it again. A job that lost a node, or whose time was up, Slurm starts
  again.
"""

import json
import math
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Literal

import psutil

from orrery.launcher import inputs, lock, receipt
from orrery.launcher import status as statuses
from orrery.launcher.environment import environment
from orrery.launcher.failure import ACCUSED_S, accused
from orrery.launcher.observer import Observer
from orrery.launcher.placement import share_cores, share_devices
from orrery.launcher.process import PROCESS, Process, reap
from orrery.launcher.restarts import ROLE, Restarts
from orrery.launcher.site import Site
from orrery.launcher.slurm import queue
from orrery.launcher.slurm.allocation import Allocation
from orrery.launcher.slurm.steps import Task, failed_node
from orrery.launcher.status import RoleStatus, State, Status
from orrery.launcher.view import View
from orrery.manifest.errors import OrreryError, explain_os_error
from orrery.manifest.plan import StagePlan
from orrery.manifest.publish import sync_folders, write_atomic
from orrery.manifest.workspace import Workspace
from orrery.observe import hang_detector
from orrery.observe.hang_detector import STILL_S, HealthView, RankStallDetector
from orrery.observe.progress import Progress
from orrery.runtime import preemption, scratch
from orrery.runtime.health import DONE, FAILED, HANG_S, Health, health_dir, listed, read_health
from orrery.runtime.metrics import MetricsFile
from orrery.runtime.network import free_ports
from orrery.runtime.parent_watch import START, adopt_orphans, hide_memory
from orrery.runtime.preemption import EXIT_PREEMPTED
from orrery.runtime.role_context import log_level
from orrery.runtime.run_directory import begin_attempt, whole_checkpoints
from orrery.runtime.timing import Pace, duration
from orrery.runtime.usage import PERIOD_S, Sampler

POLL_S, LOOK_S = 0.1, 0.5
SETTLE_S = 0.3  # after a first failure: whoever failed because of it, or before it but slower to leave, shows up within this
HUNG_S = 5.0  # a process that has said `failed` and is still there after this counts as ended
EVIDENCE_S = 2.0  # for stacks and flight recorders to reach the logs
RECORDED_S = (
    10.0  # for the flight recorder of a rank on a busy host, where it is not there after that
)
SERVERS_END_S, FAILED_END_S, STOPPED_END_S = 10.0, 4.0, 10.0
KILLED_S = 10.0  # for the kernel to end who was killed
WIND_DOWN_S = (
    600.0  # for the checkpoint; in a Slurm job what is left of its time, less MARGIN_S to end in
)
MARGIN_S = 60.0
# Of a rank in a wind-down; Slurm ends a step's other ranks with its first.
TERMINATED = (128 + signal.SIGTERM, -signal.SIGTERM)
ENDED_AS_ASKED = (EXIT_PREEMPTED, *TERMINATED)
SLURM_SAYS_S = 2.0  # after a role was ended by SIGTERM: Slurm has said by then whether it was Slurm
RESTART_LOCK_S = 90.0  # a dead node's lock outlives it on a network file system


@dataclass(frozen=True)
class Job:
    """What to run. `num_devices` is None on a CPU; `resume` is what a person types to go on; `num_steps` is for the view.

    `allocation` is None for a stage of local processes. `max_restarts`: of engines, within a day.
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
    """How a stage ended, and what Slurm is to do with our job: put it back in the queue when asked (`again` "ask", where there is a newer
    checkpoint than at the start), or by itself ("wait": it will find that a node is lost, or takes the nodes away)."""

    state: State
    message: str
    exit_code: int
    again: Literal["ask", "wait"] | None = None


def run_stage(job: Job) -> Outcome:
    """Run the stage to its end; raises `OrreryError` where it cannot start."""
    log_level()  # refuse an unknown level here, since it would end every role
    restarted = job.allocation is not None and job.allocation.restarts > 0
    os.umask(
        os.umask(0o077) | 0o002
    )  # whatever the umask: what a run writes is not every user's to change
    with ExitStack() as stack:
        interrupts = stack.enter_context(_interrupts())
        stack.enter_context(
            lock.hold(job.run_dir, RESTART_LOCK_S if restarted else lock.LOOKED_AT_S)
        )
        for before in job.plan.after:
            marker = done_path(job.run_dir, before)
            if not marker.exists():
                command = inputs.command(job.run_dir, job.plan.name, before, job.resume)
                missing = f"{job.plan.name}: {before} is not done ({marker} is missing)"
                raise OrreryError(f"{missing}; type `{command}` to run the stages in order")
        if done_path(job.run_dir, job.plan.name).exists():
            return Outcome(
                "done",
                f"{job.plan.name}: done already; remove {done_path(job.run_dir, job.plan.name)} to run it again",
                0,
            )
        return Supervisor(job, interrupts).run()


def done_path(run_dir: Path, stage: str) -> Path:
    return run_dir / "stages" / stage / "DONE"


def stay_path(run_dir: Path, stage: str) -> Path:
    """Asks a stage that winds down to stay away: `orrery stop --checkpoint` makes it, so that the job is not put back in the queue."""
    return run_dir / "stages" / stage / "stay"


def newest_checkpoint(run_dir: Path, stage: str = "rl") -> int | None:
    """The step of the stage's newest checkpoint that is whole (its marker is there)."""
    if stage not in ("sft", "rl"):
        return None
    return max((one.step for one in whole_checkpoints(run_dir, stage)), default=None)


class _Interrupts:
    """Signals that ask the launcher to end: the first says why, a second means at once; and the one that asks for a wind-down."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self.wind_down = False

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.wind_down = True
        else:
            self.received.append(signal.Signals(number))


@contextmanager
def _interrupts() -> Iterator[_Interrupts]:
    """What the terminal sends stays ignored where it is (`nohup`, the background of a script), also in what we start."""
    interrupts = _Interrupts()
    of_terminal = [
        number
        for number in (signal.SIGINT, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    numbers = (*of_terminal, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, interrupts) for number in numbers}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Supervisor:
    def __init__(self, job: Job, interrupts: _Interrupts):
        self.job, self.interrupts = job, interrupts
        self.run_dir, self.stage = job.run_dir, job.plan.name
        self.last = statuses.read(self.run_dir)
        self.scratch = scratch.disk_prefix(self.run_dir), scratch.start_prefix(self.run_dir)
        if self.last is not None:
            _end_leftovers(self.run_dir, self.last)
        self._remove_weights()
        self._remove_scratch()
        self.attempt = begin_attempt(self.run_dir)
        hide_memory()
        self.token, self.start = secrets.token_hex(16), secrets.token_hex(8)
        self.processes: Sequence[Process | Task] = []
        self.restarts = Restarts(job.max_restarts)
        self.fenced: dict[
            str, str
        ] = {}  # why, by process, of incarnations that are or were being ended for that
        self.replaced: list[
            int
        ] = []  # process groups of engines that ended here, until all of them have been reaped
        self.refusal = ""  # why an engine that ended was not started again
        self.health: dict[str, Health] = {}
        scale = job.site.roles.deadline_scale
        self.health_view, self.rank_stalls = (
            HealthView(),
            RankStallDetector(STILL_S * scale, HANG_S * scale),
        )
        self.code = receipt.code_state(self.run_dir, job.workspace.root)
        self.began_at = newest_checkpoint(self.run_dir)
        self.images: receipt.ImageReader | None = None
        self.software: Future[receipt.Software] | None = None
        self.wind_down_until_s: float | None = None
        self.ends_at_s = _job_ends_at_s(job)
        slurm_job = job.allocation.job if job.allocation else None
        self.status = Status(
            self.stage,
            self.attempt,
            "running",
            "",
            os.getpid(),
            socket.gethostname(),
            slurm_job,
            time.time(),
        )
        self.began_s = time.monotonic()

    def run(self) -> Outcome:
        for folder in (
            health_dir(self.run_dir, self.stage),
            self._endpoints,
            preemption.fence_dir(self.run_dir, self.stage),
        ):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        for asked in (
            preemption.request_path(self.run_dir, self.stage),
            stay_path(self.run_dir, self.stage),
        ):
            asked.unlink(missing_ok=True)
        (self.run_dir / "logs").mkdir(exist_ok=True)
        finished = [stage for stage in self.job.stages if done_path(self.run_dir, stage).exists()]
        self.progress = Progress(
            self.run_dir.name,
            self.stage,
            self.attempt,
            self.job.stages,
            finished,
            self.job.num_steps,
            self.status.started_s,
        )
        adopt_orphans()
        self.metrics = MetricsFile(self.run_dir, self.stage, "launcher", 0, self.attempt)
        observer = Observer(self.run_dir, self.progress)
        view = View(self.progress)
        outcome = Outcome("failed", f"{self.stage}: the launcher itself broke", 1)
        try:
            self._say_restart()
            self._say_changes()
            self._verify_inputs()
            outcome = self._stopped() if self.interrupts.received else self._run(view)
            self._say_state("stopping", outcome.message)
        except OrreryError as error:
            outcome = Outcome("failed", str(error), error.exit_code)
        except OSError as error:
            outcome = Outcome(
                "failed", f"{self.stage}: {explain_os_error(error)}; {self._go_on()}", 1
            )
        finally:
            grace_s = {"done": SERVERS_END_S, "failed": FAILED_END_S}.get(
                outcome.state, STOPPED_END_S
            )
            if stuck := self._end_all(grace_s):
                outcome = replace(outcome, message=f"{outcome.message}; {stuck}")
            self._put_back(outcome)
            observer.close()
            view.close()
            self.metrics.close()
            self._end_strays()
            if self.job.allocation is not None:
                self.job.allocation.clean(*self.scratch, scratch.memory_prefix(self.run_dir))
            self._remove_weights()
            self._remove_scratch()
            self.status.ended_s, wall_s = time.time(), time.monotonic() - self.began_s
            with suppress(OSError):  # on a full disk the sentence still reaches stderr
                self._say_state(outcome.state, outcome.message)
                self._log(outcome.message)
            try:
                self._receipt(outcome)
            except (
                Exception
            ) as error:  # the boundary: what a stage has done does not hang on what is told of it
                with suppress(OSError):
                    self._log(
                        f"no receipt: {explain_os_error(error) if isinstance(error, OSError) else repr(error)}"
                    )
        if outcome.state == "done":
            row = {
                "attempt": self.attempt,
                "started_s": self.status.started_s,
                "ended_s": self.status.ended_s,
                "wall_s": wall_s,
            }
            sync_folders(self.run_dir)  # DONE stands for the roles' files and their folders' names
            write_atomic(done_path(self.run_dir, self.stage), (json.dumps(row) + "\n").encode())
        return outcome

    def _run(self, view: View) -> Outcome:
        self._start()
        return self._watch(view)

    def _verify_inputs(self) -> None:
        """Raise OrreryError if a file that the stage reads differs from the receipt."""

        def remedy(maker: str) -> str:
            command = inputs.command(self.run_dir, self.stage, maker, self.job.resume)
            return f"type `rm {done_path(self.run_dir, maker)} && {command}` to run {maker} again and go on"

        self._say_state("running", "")
        unknown = inputs.verify(
            self.run_dir,
            self.stage,
            self.job.stages,
            remedy,
            lambda: bool(self.interrupts.received),
        )
        if unknown:
            self._tell(
                f"what {' and '.join(unknown)} made is not verified: {receipt.RECEIPT} does not tell it"
            )

    def _put_back(self, outcome: Outcome) -> None:
        """Ask Slurm to start our job again, before anything else that takes time; Slurm ends this process a little later."""
        if outcome.again == "ask" and self.job.allocation is not None:
            try:
                queue.requeue(self.job.allocation.job)
            except OrreryError as error:
                self._log(f"not put back in the queue: {error}")

    def _remove_weights(self) -> None:
        """What engines and trainer pass on: in shared memory on one node, in the run's folder on several. With it what engines share."""
        scratch.remove_memory(scratch.memory_prefix(self.run_dir))
        shutil.rmtree(self.run_dir / "weights" / "wire", ignore_errors=True)

    def _remove_scratch(self) -> None:
        """What engines keep on this node's scratch disk, where they are told it is."""
        for name in self.scratch:
            scratch.remove_folders(
                name, Path(self.job.site.environment.get("TMPDIR") or tempfile.gettempdir())
            )

    def _receipt(self, outcome: Outcome) -> None:
        allocation = self.job.allocation
        if outcome.state == "done" and self.images is not None:
            self.images.wait()
        receipt.record(
            self.run_dir, self.stage, self.attempt, outcome.state, outcome.message, self.status.started_s, self.status.ended_s,
            nodes=sorted({process.node for process in self.processes}), images=self.images.facts() if self.images else {},
            slurm_job_id=allocation.job if allocation else None, workspace_root=self.job.workspace.root,
            code=self.code, software=self.software.result() if self.software else None, secrets=[self.token],
            engine_restarts=self.restarts.by_name, endings={process.name: process.ending for process in self.processes},
        )  # fmt: skip

    # Starting ---------------------------------------------------------------------------------------------------------

    def _say_restart(self) -> None:
        """After Slurm has started the job again: which node was lost, and what it held."""
        if (
            self.last is None
            or self.job.allocation is None
            or self.last.slurm_job != self.job.allocation.job
        ):
            return
        job, roles = self.job.allocation.job, self.last.roles
        nodes = {role.node for role in roles}
        lost = sorted(nodes & {*queue.lost_nodes(job), *queue.unusable_nodes(sorted(nodes))})
        held = [
            f"{node} was lost, which held {listed(role.name for role in roles if role.node == node)}"
            for node in lost
        ]
        before = self.last.message.removeprefix(f"{self.stage}: ").split("; ")[0]
        why = "; ".join(held) or before or "it was put back in the queue"
        text = f"{self.stage}: started again by Slurm (job {job}): {why}; {self._goes_on()}"
        self._log(text)
        print(text, file=sys.stderr, flush=True)

    def _say_changes(self) -> None:
        """Where this attempt goes on with other code or images than the last."""
        images = self.job.allocation.images(self.job.plan) if self.job.allocation else {}
        if changes := receipt.changes(self.run_dir, self.job.stages, self.stage, self.code, images):
            self._tell(f"goes on with {changes}; {receipt.RECEIPT} tells both")

    def _start(self) -> None:
        if self.job.allocation is not None:
            tasks = self.job.allocation.start(
                self.job.plan, self.run_dir, self.attempt, self.start, self.token
            )
            self.images = receipt.ImageReader(
                self.run_dir, self.job.allocation.images(self.job.plan)
            )
            self.processes = tasks
            for node in dict.fromkeys(task.node for task in tasks):
                self._log(f"{node}: {listed(task.name for task in tasks if task.node == node)}")
        else:
            self._start_here()
        in_images = self.images is not None and bool(self.images.facts())
        self.software = ThreadPoolExecutor(1, "software").submit(receipt.host_software, in_images)
        self._say_state("running", "")

    def _start_here(self) -> None:
        plans = self.job.plan.processes
        cores = share_cores(sorted(os.sched_getaffinity(0)), plans)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        offered = (
            visible.split(",") if visible else list(map(str, range(self.job.num_devices or 0)))
        )
        try:
            devices = {} if self.job.num_devices is None else share_devices(offered, plans)
        except ValueError as error:
            remedy = (
                "name others in CUDA_VISIBLE_DEVICES"
                if visible
                else "lower trainer.mesh or inference.num_replicas"
            )
            raise OrreryError(f"{self.stage}: {error}; {remedy}") from None
        started: list[Process] = []
        self.processes = started
        for plan, port in zip(plans, free_ports(len(plans)), strict=True):
            key = plan.role, plan.index
            env = environment(
                os.environ, self.job.site, self.start, cores.get(key), devices.get(key)
            )
            process = Process(
                plan, self.run_dir, self.stage, self.attempt, port, cores.get(key), env, self.token
            )
            started.append(process)
            self._log(
                f"{process.name}: pid {process.pid}, port {port}, cores {sorted(process.cores) if process.cores else 'any'}"
            )

    # Watching ---------------------------------------------------------------------------------------------------------

    def _watch(self, view: View) -> Outcome:
        usage = Sampler(
            os.getpid(), without=[process.pid for process in self.processes]
        )  # roles write rows of their own use
        look_at_s, pace = 0.0, Pace(PERIOD_S, time.monotonic())
        while True:
            if self.interrupts.received:
                return self._stopped()
            if (outcome := self._wind_down()) is not None:
                return outcome
            if any(map(self._failed, self.processes)) and not self._start_again():
                return self._failure()
            if all(
                process.poll() == 0 for process in self.processes if process.plan.ends == "itself"
            ):
                return Outcome(
                    "done", f"{self.stage}: done in {duration(time.monotonic() - self.began_s)}", 0
                )
            now_s = time.monotonic()
            if now_s >= look_at_s:
                look_at_s = now_s + LOOK_S
                if (outcome := self._look()) is not None:
                    return outcome
            if pace.due(now_s):
                self.metrics.write(event="usage", processes={"launcher.0": usage.sample()})
            view.draw(
                self.health,
                {process.name: process.ending or "running" for process in self.processes},
            )
            time.sleep(POLL_S)

    def _wind_down(self) -> Outcome | None:
        """Ask for a wind-down where a signal wants one; the outcome when it is over."""
        if self.wind_down_until_s is None:
            if not self._time_is_up():
                return None
            if self.stage != "rl":
                self._log("its time is nearly up, and it has no checkpoints: it goes on")
                self.interrupts.wind_down, self.ends_at_s = False, None
                return None
            write_atomic(preemption.request_path(self.run_dir, self.stage), b"")
            self.wind_down_until_s = time.monotonic() + self._time_to_wind_down()
            self._log("winding down")
            return None
        if all(
            self._wound_down(process) for process in self.processes if process.plan.ends == "itself"
        ):
            return Outcome(
                "stopped",
                f"{self.stage}: wound down; {self._go_on()}",
                EXIT_PREEMPTED,
                again=self._again(),
            )
        if time.monotonic() > self.wind_down_until_s:
            waits = "; ".join(
                f"{name} was {one.sentence()}"
                for name, one in self.health.items()
                if one.role in ("trainer", "orchestrator")
            )
            message = f"{self.stage}: did not wind down in time ({waits}); {self._go_on()}"
            return Outcome("stopped", message, EXIT_PREEMPTED, again=self._again())
        return None

    def _again(self) -> Literal["ask"] | None:
        stays = stay_path(self.run_dir, self.stage).exists()
        return "ask" if newest_checkpoint(self.run_dir) != self.began_at and not stays else None

    def _time_is_up(self) -> bool:
        warning_s = self.job.allocation.slurm.warning_s if self.job.allocation else 0
        return self.interrupts.wind_down or (
            self.ends_at_s is not None and time.monotonic() > self.ends_at_s - warning_s
        )

    def _time_to_wind_down(self) -> float:
        if self.job.allocation is None:
            return WIND_DOWN_S * self.job.site.roles.deadline_scale
        ends_at_s = _job_ends_at_s(self.job)  # asked again: an operator may have moved it
        left_s = (
            self.job.allocation.slurm.warning_s
            if ends_at_s is None
            else ends_at_s - time.monotonic()
        )
        return max(0.5 * left_s, left_s - MARGIN_S)

    def _wound_down(self, process: Process | Task) -> bool:
        code = process.poll()
        if code == -signal.SIGKILL:  # too slow to leave after the first of its step had left
            return any(
                other.poll() == EXIT_PREEMPTED
                for other in self.processes
                if other.plan.role == process.plan.role
            )
        return code in ENDED_AS_ASKED

    # Engines that end, and start again ----------------------------------------------------------------------------------

    @property
    def _endpoints(self) -> Path:
        return self.run_dir / "stages" / self.stage / "endpoints"

    def _start_again(self) -> bool:
        """Start the engines that have ended once more. False, with `refusal`, where somebody else has failed too, or one may not."""
        if not self.job.max_restarts:
            return False
        time.sleep(SETTLE_S)  # whoever it took along shows up within this
        ended = [process for process in self.processes if self._failed(process)]
        self.health = read_health(self.run_dir, self.stage, self.attempt)
        others = [health for health in self.health.values() if health.role != ROLE]
        if any(process.plan.role != ROLE for process in ended) or any(
            health.doing == FAILED for health in others
        ):
            return False
        if self.job.allocation is not None and (
            any(one.poll() in TERMINATED for one in ended) or self._lost_nodes(ended)
        ):
            return False  # Slurm ends the job, or a node is gone
        for process in ended:
            has_served = (self._endpoints / f"{process.name}.json").exists()
            refusal = self.restarts.refusal(
                process.name, has_served, process.poll(), time.monotonic()
            )
            if refusal is not None:
                self.refusal = refusal
                return False
            self._replace(process, has_served)
        self._say_state("running", "")
        return True

    def _replace(self, process: Process | Task, has_served: bool) -> None:
        """The next incarnation of an engine that has ended, with nothing left of this one that could be taken for it."""
        process.kill()
        if isinstance(process, Process):
            self._end_strays(process.env[PROCESS])
            self.replaced.append(process.pid)
        for folder in (self._endpoints, health_dir(self.run_dir, self.stage)):
            (folder / f"{process.name}.json").unlink(missing_ok=True)
        sentence = self._sentence(process).removeprefix(f"{self.stage}: ")
        started = process.again()
        self.processes = [started if one is process else one for one in self.processes]
        for known in (self.health, self.fenced):
            known.pop(process.name, None)
        self.metrics.write(
            event="engine_restart", process=process.name, incarnation=started.incarnation, ending=process.ending, has_served=has_served,
            why=sentence,
        )  # fmt: skip
        place = (
            f"pid {started.pid}, port {started.port}"
            if isinstance(started, Process)
            else started.node
        )
        self._tell(
            f"{sentence}; started again ({self.restarts.num_lately} of {self.job.max_restarts} within a day): {place}"
        )

    def _end_fenced(self) -> None:
        """Kill what nobody asks any more, dead or not: it is to be started again."""
        if not self.job.max_restarts:
            return
        for one in preemption.fenced(self.run_dir, self.stage, self.attempt):
            for process in self.processes:
                if (process.name, process.incarnation) == (one.name, one.incarnation):
                    if process.poll() is None and one.name not in self.fenced:
                        self._log(f"{one.name} is fenced, and ended: {one.why}")
                        process.kill()
                    self.fenced[one.name] = one.why
            preemption.forget_fence(self.run_dir, self.stage, self.attempt, one)

    def _failed(self, process: Process | Task) -> bool:
        code = process.poll()
        if (
            self.wind_down_until_s is not None
            and code is not None
            and process.plan.ends == "itself"
            and self._wound_down(process)
        ):
            return False
        return code is not None and (code != 0 or process.plan.ends == "with_stage")

    def _look(self) -> Outcome | None:
        seen = self._see()
        self._end_fenced()
        self.replaced = [group for group in self.replaced if reap(group)]
        running = {process.name for process in self.processes if process.poll() is None}
        for name, health in seen.items():
            if (
                name in running
                and health.doing == FAILED
                and self.health_view.now_s - health.time_s > HUNG_S
            ):
                if health.role != ROLE or not self.job.max_restarts:
                    return self._failure()
                next(process for process in self.processes if process.name == name).kill()
        if self.job.max_restarts:
            self._end_hung({name: seen[name] for name in running & seen.keys()})
        scale = self.job.site.roles.deadline_scale
        known = {
            name: one
            for name, one in seen.items()
            if (name in running and name not in self.fenced) or one.doing == DONE
        }
        stall = hang_detector.find_stall(
            known,
            self.health_view.now_s,
            hang_detector.GRACE_S * scale,
            hang_detector.DEADLOCK_S * scale,
        )
        living = {name: health for name, health in self.health.items() if name in running}
        stall = stall or self.rank_stalls.look(living, time.monotonic())
        if stall is None:
            return None
        if (outcome := self._lost(stall.sentence)) is not None:
            return outcome
        return Outcome(
            "failed", f"{self.stage}: {stall.sentence}; {self._keep_evidence()}; {self._go_on()}", 1
        )

    def _end_hung(self, running: dict[str, Health]) -> None:
        """Kill the engines whose event loop is blocked, after they have written their stacks."""
        hung = {
            name: for_s
            for name, one in running.items()
            if one.role == ROLE and (for_s := hang_detector.hung_s(one, self.health_view.now_s))
        }
        ended = [
            process
            for process in self.processes
            if process.name in hung and process.name not in self.fenced
        ]
        for process in ended:
            self.fenced[process.name] = (
                f"its event loop has not turned for {hung[process.name]:.0f} s"
            )
            self._log(f"{process.name} is ended: {self.fenced[process.name]}")
            process.signal(signal.SIGUSR1)
            process.signal(signal.SIGCONT)
        time.sleep(EVIDENCE_S if ended else 0.0)
        for process in ended:
            process.kill()

    def _see(self) -> dict[str, Health]:
        """Read all health with our own times; `self.health` has the writers' times, for people."""
        self.health = read_health(self.run_dir, self.stage, self.attempt)
        return self.health_view.look(self.health, time.monotonic())

    def _keep_evidence(self) -> str:
        """Have every process write down what it is doing, also one that somebody has stopped; where that is."""
        for process in self.processes:
            if process.name in self.health:  # it wrote health, so it handles the signal
                process.signal(signal.SIGUSR1)
                process.signal(signal.SIGCONT)
        time.sleep(EVIDENCE_S)
        logs, limit_s = self.run_dir / "logs", time.monotonic() + RECORDED_S - EVIDENCE_S
        asked = [
            process
            for process in self.processes
            if (one := self.health.get(process.name)) and one.heartbeat
        ]
        while time.monotonic() < limit_s and any(
            self._can_say(process)
            and not (logs / "flight_recorder" / f"rank_{process.plan.index}").exists()
            for process in asked
        ):
            time.sleep(0.1)
            self.health = read_health(self.run_dir, self.stage, self.attempt)
        recorded = (
            f", flight recorders in {logs}/flight_recorder"
            if any(logs.glob("flight_recorder/rank_*"))
            else ""
        )
        return f"stacks are in {logs}/*.log{recorded}"

    def _can_say(self, process: Process | Task) -> bool:
        """Whether it is there to be asked: one that has failed has told all in its log, and ends."""
        health = self.health.get(process.name)
        return process.poll() is None and (health is None or health.doing != FAILED)

    def _failure(self) -> Outcome:
        first = self._first_failed()
        sentence = self._sentence(first)
        if (outcome := self._lost(sentence.removeprefix(f"{self.stage}: "))) is not None:
            return outcome
        if (ended := self._ended_by_slurm(first)) is not None:
            return ended
        others = any(
            process is not first and process.plan.role == first.plan.role and self._can_say(process)
            for process in self.processes
        )
        evidence = (
            f"; {self._keep_evidence()}" if others and (first.poll() or 0) < 0 else ""
        )  # it left no word of its own
        refusal = f"; {self.refusal}" if self.refusal else ""
        return Outcome(
            "failed", f"{sentence}{refusal}; its log is {first.log}{evidence}; {self._go_on()}", 1
        )

    def _first_failed(self) -> Process | Task:
        """Return the process that failed first.

        If its error names another process that fails within ACCUSED_S, return that one.
        """

        def order(process: Process | Task) -> tuple[bool, float]:
            health = self.health.get(process.name)
            return process.poll() != -signal.SIGKILL, self.health_view.changed_s(
                process.name
            ) if health and health.doing == FAILED else math.inf

        time.sleep(SETTLE_S)
        limit_s = time.monotonic() + ACCUSED_S
        while True:
            self._see()
            said = {name for name, health in self.health.items() if health.doing == FAILED}
            failed = [
                process
                for process in self.processes
                if self._failed(process) or process.name in said
            ]
            first = min(failed, key=order)
            health = self.health.get(first.name)
            blamed = accused(
                health.error if health else None,
                {process.name for process in self.processes} - {first.name},
            )
            if guilty := [process for process in failed if process.name in blamed]:
                return min(guilty, key=order)
            if not blamed or time.monotonic() > limit_s:
                return first
            time.sleep(POLL_S)

    def _lost(self, seen: str) -> Outcome | None:
        """The outcome where a node of our job is gone, which is why we `seen` what we did."""
        lost = self._lost_nodes()
        if not lost:
            return None
        held = "; ".join(f"{node} was lost, which held {self._held(node)}" for node in lost)
        text = f"{self.stage}: {held} (seen first: {seen}); when Slurm starts the job again, {self._goes_on()}"
        return Outcome("failed", text, 1, again="wait")

    def _lost_nodes(self, ended: Sequence[Process | Task] = ()) -> list[str]:
        """Nodes of our job that are gone, where only those of who `ended` are suspected if any; of a stage on one node it is ours, and we
        are here."""
        if self.job.allocation is None or self.job.plan.num_nodes == 1:
            return []
        said = {
            node
            for process in self.processes
            if isinstance(process, Task) and (node := failed_node(process.step.said()))
        }
        return sorted(said) or self.job.allocation.silent_nodes(
            sorted({process.node for process in ended})
        )

    def _held(self, node: str) -> str:
        return listed(process.name for process in self.processes if process.node == node)

    def _ended_by_slurm(self, first: Process | Task) -> Outcome | None:
        """The outcome where Slurm ends the job (cancelled, preempted, out of time) and its signal reached a role before it reached us."""
        if self.job.allocation is None or first.poll() not in (*TERMINATED, -signal.SIGKILL):
            return None
        job = self.job.allocation.job
        limit_s = time.monotonic() + SLURM_SAYS_S
        while time.monotonic() < limit_s:
            if self.interrupts.received:
                return self._stopped()
            try:
                if queue.is_preempted(job):
                    text = f"{self.stage}: Slurm takes the nodes of job {job} away; when it starts the job again, {self._goes_on()}"
                    return Outcome("stopped", text, 128 + signal.SIGTERM, again="wait")
                word = queue.slurm_states([job]).get(job, "")
            except OrreryError:
                return None
            if word not in ("RUNNING", ""):
                return Outcome(
                    "stopped",
                    f"{self.stage}: Slurm ends job {job} ({word}); {self._go_on()}",
                    128 + signal.SIGTERM,
                )
            time.sleep(0.5)
        return None

    def _sentence(self, process: Process | Task) -> str:
        health, code = self.health.get(process.name), process.poll()
        if code is None:
            how = "failed and does not end"
        elif code == 0:
            how = "ended by itself (exit code 0) while the stage needed it"
        else:
            how = f"was killed by {process.ending}" if code < 0 else f"ended with {process.ending}"
        if self.job.plan.num_nodes > 1:
            how = f"on {process.node} {how}"
        doing = (
            f" while {health.last}"
            if health and code != 0
            else ""
            if health
            else " before it said anything"
        )
        error = health.error if health else None
        error = self.fenced.get(process.name) if error is None else error
        if error is None and code != -signal.SIGKILL and (words := process.last_words()):
            error = f"its last line is {words!r}"
        return f"{self.stage}: {process.name} {how}{doing}" + (f": {error}" if error else "")

    def _stopped(self) -> Outcome:
        number = self.interrupts.received[0]
        return Outcome(
            "stopped", f"{self.stage}: stopped by {number.name}; {self._go_on()}", 128 + number
        )

    def _goes_on(self) -> str:
        step = newest_checkpoint(self.run_dir, self.stage)
        return f"it begins {self.stage} anew" if step is None else f"it goes on from step {step}"

    def _go_on(self) -> str:
        step = newest_checkpoint(self.run_dir, self.stage)
        return (
            f"type `{self.job.resume}` to go on from step {step}"
            if step is not None
            else f"type `{self.job.resume}` to start {self.stage} again"
        )

    # Ending -----------------------------------------------------------------------------------------------------------

    def _end_all(self, grace_s: float) -> str:
        """SIGTERM to all, and after `grace_s` (or at a second Ctrl-C) SIGKILL; then whatever stayed in their groups.

        Who is there even so, in words.
        """
        interrupted = len(self.interrupts.received)
        for process in self.processes:
            process.signal(signal.SIGTERM)
        limit_s = time.monotonic() + grace_s
        while any(process.poll() is None for process in self.processes):
            if time.monotonic() > limit_s or len(self.interrupts.received) > max(1, interrupted):
                break
            time.sleep(0.05)
        for process in self.processes:
            process.abandon()
        killed_s = time.monotonic()
        within_s = KILLED_S * self.job.site.roles.deadline_scale
        stuck = [
            one
            for one in self.processes
            if not one.wait(max(0.0, killed_s + within_s - time.monotonic()))
        ]
        return still_there(stuck, within_s) if stuck else ""

    def _end_strays(self, of: str | None = None) -> None:
        """Kill processes that roles (or one incarnation) started outside their process groups.

        They are our children by adoption, and carry this attempt's mark.
        """
        marks = {START: self.start, **({PROCESS: of} if of else {})}
        mine = [
            child
            for child in psutil.Process().children(recursive=True)
            if self._is_stray(child, marks)
        ]
        for child in mine:
            with suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(mine, timeout=5)

    def _is_stray(self, child: psutil.Process, marks: dict[str, str]) -> bool:
        try:
            return marks.items() <= child.environ().items()
        except psutil.AccessDenied:  # a role, or its fork: our child once the role has ended
            with suppress(psutil.Error):
                return child.ppid() == os.getpid() and child.pid not in {
                    process.pid for process in self.processes
                }
        except psutil.Error:
            pass
        return False

    # Saying -----------------------------------------------------------------------------------------------------------

    def _say_state(self, state: State, message: str) -> None:
        self.status.state, self.status.message = state, message
        self.status.roles = [
            RoleStatus(
                process.name, process.node, process.pid, process.port, sorted(process.cores) if process.cores else None,
                "running" if process.ending is None else "ended", process.ending, self.restarts.by_name[process.name],
            )
            for process in self.processes
        ]  # fmt: skip
        self.status.write(self.run_dir)

    def _tell(self, text: str) -> None:
        self._log(text)
        print(f"{self.stage}: {text}", file=sys.stderr, flush=True)

    def _log(self, text: str) -> None:
        with open(self.run_dir / "logs" / "launcher.0.log", "a") as log:
            log.write(
                f"{time.strftime('%Y-%m-%d %H:%M:%S')} {self.stage}, attempt {self.attempt}: {text}\n"
            )


def still_there(stuck: Sequence[Process | Task], within_s: float) -> str:
    names = ", ".join(f"{one.name} (process {one.pid} on {one.node})" for one in stuck)
    return (
        f"{names} did not end within {within_s:g} s of SIGKILL, so the kernel holds it in a device or file system that does not answer; "
        f"see to that node before you start again"
    )


def _job_ends_at_s(job: Job) -> float | None:
    """Return when Slurm ends our job, on the monotonic clock; None if unknown or outside a job."""
    if job.allocation is None:
        return None
    try:
        left_s = next(
            (queue.seconds(one.left) for one in queue.user_jobs() if one.id == job.allocation.job),
            None,
        )
    except OrreryError:
        return None
    return None if left_s is None else time.monotonic() + left_s


def _end_leftovers(run_dir: Path, last: Status) -> None:
    """Processes of an attempt whose launcher was killed: their parent watches end them; here nothing starts before they are gone."""
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
