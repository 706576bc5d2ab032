"""Steps: the roles of a stage as `srun` steps of this Slurm job: one step a role and node group, and one an engine.

- In: a stage's plan and the command of one role process. Out: `Task`s, which the stage watches as it watches local processes.
- A task learns its index from its rank in the step, and writes its own log on its own node: `logs/<role>.<index>.log`.
- How a task ended is what srun says of it (`node2: task 3: Killed`); srun itself ends when all have.
- A first bad exit ends the whole step (`--kill-on-bad-exit`), and the stage ends the other steps, or starts an engine's once more.
"""

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

from orrery.launcher.placement import KINDS
from orrery.launcher.process import ended_within, last_line, signal_or_code
from orrery.launcher.site import Slurm
from orrery.launcher.slurm.job_script import Component, gres, nodes
from orrery.manifest.plan import NodeGroup, ProcessPlan, StagePlan
from orrery.runtime.token import handed_over

LOOK_S = 0.2
CTRL_C_S = 0.2  # between two: srun takes the second for an order if it comes within a second


@dataclass(frozen=True)
class StepPlan:
    """Processes of one role in one node group: consecutive indices, the same number on every node from the first one's on. Or one engine.

    `first_node`: in the component. `devices`: of a node's devices the first one of the step, and how many a task sees.
    """

    component: int
    group: NodeGroup
    role: str
    module: str
    processes: tuple[ProcessPlan, ...]
    first_node: int
    num_nodes: int
    cpus_per_task: int
    num_threads: int
    gres: str | None
    devices: tuple[int, int]

    @property
    def tasks_per_node(self) -> int:
        return len(self.processes) // self.num_nodes


def step_plans(plan: StagePlan, parts: Sequence[Component], slurm: Slurm) -> list[StepPlan]:
    """The stage's steps, servers first as in the plan. An engine is a step of its own, which can end and start without the others.

    Steps overlap: each has all processors of its nodes and, where its role has devices, all of those, for Slurm gives overlapping steps the
    same first ones. Which devices a task sees is said here: trainers all of their role's on the node, for ranks reach one another's memory
    (CUDA IPC) only so; engines their own.
    """
    order = [process.role for process in plan.processes]
    before = {
        one: num
        for each in plan.by_node.values()
        for one, num in zip(each, accumulate(_devices(each), initial=0), strict=False)
    }
    computing = {
        node: sum(one.role in KINDS for one in each) for node, each in plan.by_node.items()
    }
    found: list[StepPlan] = []
    for number, part in enumerate(parts):
        inside = [process for process in plan.processes if process.node in nodes(part.group)]
        for role in dict.fromkeys(process.role for process in inside):
            processes = tuple(process for process in inside if process.role == role)
            together = [(process,) for process in processes] if role == "inference" else [processes]
            found += [
                _step_plan(number, part, each, before[each[0]], computing[each[0].node], slurm)
                for each in together
            ]
    return sorted(found, key=lambda step: order.index(step.processes[0].role))


def _devices(processes: Iterable[ProcessPlan]) -> list[int]:
    return [process.num_devices for process in processes]


def _step_plan(
    number: int,
    part: Component,
    processes: tuple[ProcessPlan, ...],
    before: int,
    computing: int,
    slurm: Slurm,
) -> StepPlan:
    """Plan a step.

    `before`: devices that earlier processes of the node have. `computing`: its processes that
    compute.
    """
    first = processes[0]
    num_nodes = len({process.node for process in processes})
    tasks = len(processes) // num_nodes
    return StepPlan(
        number, part.group, first.role, first.module, processes, first.node - part.group.first_node, num_nodes, max(1, part.cpus // tasks),
        max(1, part.cpus // computing) if first.role in KINDS else 1, gres(slurm, part.gpus) if part.gpus and first.num_devices else None,
        (before, tasks * first.num_devices),
    )  # fmt: skip


def step_options(
    component: int | None, nodelist: str, num_nodes: int, tasks_per_node: int, cpus_per_task: int, gres: str | None,
    stdin: Literal["none", "all"] = "none",
) -> list[str]:  # fmt: skip
    """Return srun's options for a step on these nodes, beside running steps.

    `component` None: the job is not heterogeneous. `stdin` "all": srun copies stdin to each task.
    """
    return [
        "srun",
        *([f"--het-group={component}"] if component is not None else []),
        f"--nodes={num_nodes}",
        f"--nodelist={nodelist}",
        f"--ntasks={num_nodes * tasks_per_node}",
        f"--ntasks-per-node={tasks_per_node}",
        f"--cpus-per-task={cpus_per_task}",
        *(
            "--distribution=block",
            "--overlap",
            "--cpu-bind=none",
            "--mem=0",
            f"--gres={gres or 'none'}",
            "--export=ALL",
        ),
        f"--input={stdin}",
    ]


def srun(step: StepPlan, component: int | None, nodelist: str, code: Path, logs: Path, scratch: Path, header: str,
         argv: Sequence[str]) -> list[str]:  # fmt: skip
    """The step's command line around `argv`, the command of one role process without its index."""
    return [
        *step_options(
            component,
            nodelist,
            step.num_nodes,
            step.tasks_per_node,
            step.cpus_per_task,
            step.gres,
            "all",
        ),
        *("--kill-on-bad-exit=1", f"--job-name={step.role}"),
        *(
            "bash",
            str(code / "orrery" / "launcher" / "task.sh"),
            step.role,
            str(step.processes[0].index),
        ),
        *(",".join(map(str, step.devices)), str(logs), str(scratch), header),
        *argv,
    ]


class Step:
    """A started step."""

    def __init__(self, plan: StepPlan, line: Callable[[int], Sequence[str]], log: Path, env: Mapping[str, str], token: str,
                 incarnation: int = 0):  # fmt: skip
        """`line` is its command, of an incarnation."""
        self.plan, self.line, self.log, self.env, self.incarnation = (
            plan,
            line,
            log,
            env,
            incarnation,
        )
        self._token = token
        self.is_killed = False
        self._read: tuple[int, dict[int, int]] = (0, {})
        self._looked_s = 0.0
        argv = list(line(incarnation))
        with open(log, "ab") as out, handed_over(token) as stdin:
            out.write(f"=== {time.strftime('%Y-%m-%d %H:%M:%S')}: {shlex.join(argv)}\n".encode())
            out.flush()
            self.begin = out.tell()
            self._popen = subprocess.Popen(
                argv,
                stdin=stdin,
                stdout=out,
                stderr=out,
                env=dict(env),
                start_new_session=True,
                close_fds=True,
            )

    def again(self) -> "Step":
        """The same once more, as the next incarnation."""
        return Step(self.plan, self.line, self.log, self.env, self._token, self.incarnation + 1)

    def poll(self) -> int | None:
        return self._popen.poll()

    def said(self) -> str:
        """What srun wrote of this step so far."""
        with open(self.log, "rb") as log:
            log.seek(self.begin)
            return log.read().decode(errors="replace")

    def endings(self) -> dict[int, int]:
        """`task_endings` of what srun wrote; looked at every LOOK_S, and read again only when there is more."""
        if time.monotonic() - self._looked_s >= LOOK_S:
            self._looked_s = time.monotonic()
            with suppress(OSError):  # what a shared file system cannot say now it says later
                if (size := self.log.stat().st_size) != self._read[0]:
                    self._read = size, task_endings(self.said())
        return self._read[1]

    def signal(self, number: int) -> None:
        """srun hands it on to every task."""
        if self.poll() is None:
            self._popen.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to every task, by what two Ctrl-C in a row are to srun. The job goes on."""
        if self.poll() is not None:
            return
        self.is_killed = True
        self.signal(signal.SIGINT)
        time.sleep(CTRL_C_S)
        self.signal(signal.SIGINT)

    def abandon(self) -> None:
        """End srun at once; Slurm ends what is left of the step with the job."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def wait(self, within_s: float) -> bool:
        return ended_within(self._popen, within_s)


class Task:
    """One role process of a step; what the stage asks of it is what it asks of a local `Process`."""

    pid, port, cores = 0, 0, None

    def __init__(self, plan: ProcessPlan, rank: int, node: str, step: Step, logs: Path):
        self.plan, self.rank, self.node, self.step = plan, rank, node, step
        self.name = f"{plan.role}.{plan.index}"
        self.log = logs / f"{self.name}.log"
        self._log_begin = self.log.stat().st_size if self.log.exists() else 0

    @property
    def incarnation(self) -> int:
        return self.step.incarnation

    def again(self) -> "Task":
        """The next incarnation of a task that was a step of its own, on the same node."""
        return Task(self.plan, self.rank, self.node, self.step.again(), self.log.parent)

    def poll(self) -> int | None:
        """Minus the signal's number, or the exit code; None while it runs and srun has said nothing of it."""
        ended, code = self.step.endings(), self.step.poll()
        if self.step.is_killed:
            return None if code is None else -signal.SIGKILL
        if self.rank in ended:
            return ended[self.rank]
        if code is None or not ended:
            return code
        return (
            0 if code == 0 else -signal.SIGTERM
        )  # the others of a step that was ended for one of them

    @property
    def ending(self) -> str | None:
        return signal_or_code(self.poll())

    def signal(self, number: int) -> None:
        if self.rank == 0:  # once a step: srun hands it to every task
            self.step.signal(number)

    def wait(self, within_s: float) -> bool:
        return self.step.wait(within_s)

    def kill(self) -> None:
        """SIGKILL to it and to all of its step."""
        self.step.kill()

    def abandon(self) -> None:
        """Nobody watches it from here on; Slurm ends it with the job."""
        self.step.abandon()

    def last_words(self) -> str:
        return last_line(self.log, self._log_begin) or last_line(self.step.log, self.step.begin)


_ENDED = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,\[\]-]+): (?P<how>.+)")
_HOW = {
    "Killed": -signal.SIGKILL, "Terminated": -signal.SIGTERM, "Segmentation fault": -signal.SIGSEGV, "Aborted": -signal.SIGABRT,
    "Bus error": -signal.SIGBUS, "Out Of Memory": -signal.SIGKILL, "Interrupt": -signal.SIGINT, "Hangup": -signal.SIGHUP,
}  # fmt: skip


def task_endings(said: str) -> dict[int, int]:
    """How tasks ended badly, by rank, from srun's own lines; the first word on a task counts."""
    ended: dict[int, int] = {}
    for found in _ENDED.finditer(said):
        how = found["how"].strip()
        code = re.match(r"Exited with exit code (\d+)", how)
        number = (
            int(code[1])
            if code
            else next((value for word, value in _HOW.items() if how.startswith(word)), 1)
        )
        if (
            128 < number < 160 and number != 128 + signal.SIGTERM
        ):  # how Apptainer passes a signal on; 143 is a role's own
            number = 128 - number
        for rank in _ranks(found["tasks"]):
            ended.setdefault(rank, number)
    return ended


def failed_node(said: str) -> str | None:
    """The node that srun lost, where it says so."""
    found = re.search(
        r"srun: error: (?:Node failure on (\S+)|(\S+): .*node failure)", said, re.IGNORECASE
    )
    return (found[1] or found[2]).rstrip(",") if found else None


def _ranks(text: str) -> list[int]:
    ranks: list[int] = []
    for part in text.strip("[]").split(","):
        first, _, last = part.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return ranks
