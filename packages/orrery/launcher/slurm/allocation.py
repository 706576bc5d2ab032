"""Run a stage's processes as srun steps of this launcher's Slurm job.

- An engine has one step on its first node, and another on its further nodes. Each other role has
  one step per node group.
- A failed task ends its step (`--kill-on-bad-exit`). A finished task does not (`--wait=0`), because
  rank 0 may still upload a checkpoint.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from orrery.launcher import containers
from orrery.launcher.process import (
    KINDS,
    cluster_environment,
    ended_within,
    header,
    last_line,
    role_argv,
    signal_or_code,
)
from orrery.launcher.site import Site, Slurm
from orrery.launcher.slurm import queue
from orrery.launcher.slurm.queue import Component, components, gres, nodes
from orrery.manifest.identity import COMMIT, Workspace, commit
from orrery.manifest.plan import ENGINE_ROLES, NodeGroup, ProcessPlan, StagePlan
from orrery.manifest.schema import Hardware
from orrery.runtime.network import handed_over
from orrery.runtime.run_directory import SHARED_MEMORY, log_path, logs_dir

CLEAN_S, ANSWER_S, KILLED_S = 15.0, 8.0, 5.0
LOOK_S = 0.2
CTRL_C_S = 0.2  # pause between SIGINTs. Two within a second make srun kill a step.


@dataclass(frozen=True)
class StepPlan:
    """An srun step, with the same number of processes on each node.

    `devices`: (first device, number of devices) that all tasks on a node see.
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
    """Return the stage's steps in the plan's order of roles.

    Slurm gives overlapping steps the same devices, so `task.sh` selects a step's devices. Trainer
    tasks see all trainer devices of a node, because CUDA IPC needs them.
    """
    order = [process.role for process in plan.processes]
    computing = {
        node: sum(one.role in KINDS for one in each) for node, each in plan.by_node.items()
    }
    found: list[StepPlan] = []
    for number, part in enumerate(parts):
        inside = [process for process in plan.processes if process.node in nodes(part.group)]
        for role in dict.fromkeys(process.role for process in inside):
            processes = tuple(process for process in inside if process.role == role)
            wholes = [process.whole if role in ENGINE_ROLES else role for process in processes]
            pairs = list(zip(wholes, processes, strict=True))
            for whole in dict.fromkeys(wholes):
                step = tuple(process for name, process in pairs if name == whole)
                num_computing = computing[step[0].node]
                found.append(_step_plan(number, part, step, num_computing, slurm))
    return sorted(found, key=lambda step: order.index(step.processes[0].role))


def _step_plan(
    number: int, part: Component, processes: tuple[ProcessPlan, ...], num_computing: int,
    slurm: Slurm,
) -> StepPlan:  # fmt: skip
    first = processes[0]
    num_nodes = len({process.node for process in processes})
    tasks = len(processes) // num_nodes
    return StepPlan(
        component=number,
        group=part.group,
        role=first.role,
        module=first.module,
        processes=processes,
        first_node=first.node - part.group.first_node,
        num_nodes=num_nodes,
        cpus_per_task=max(1, part.cpus // tasks),
        num_threads=max(1, part.cpus // num_computing) if first.role in KINDS else 1,
        gres=gres(slurm, part.gpus) if part.gpus and first.num_devices else None,
        devices=(first.first_device, tasks * first.num_devices),
    )


def step_options(
    component: int | None, nodelist: str, num_nodes: int, tasks_per_node: int,
    cpus_per_task: int, gres: str | None, stdin: Literal["none", "all"] = "none",
) -> list[str]:  # fmt: skip
    return [
        *("srun", *([f"--het-group={component}"] if component is not None else [])),
        *(f"--nodes={num_nodes}", f"--nodelist={nodelist}"),
        *(f"--ntasks={num_nodes * tasks_per_node}", f"--ntasks-per-node={tasks_per_node}"),
        *(f"--cpus-per-task={cpus_per_task}", "--distribution=block", "--overlap"),
        *("--cpu-bind=none", "--mem=0", f"--gres={gres or 'none'}", "--export=ALL"),
        f"--input={stdin}",
    ]


def srun(
    step: StepPlan, component: int | None, nodelist: str, code: Path, logs: Path,
    folders: Sequence[Path], header: str, argv: Sequence[str],
) -> list[str]:  # fmt: skip
    per_task = step.num_nodes, step.tasks_per_node, step.cpus_per_task
    script = str(code / "orrery" / "launcher" / "task.sh")
    return [
        *step_options(component, nodelist, *per_task, step.gres, "all"),
        *("--kill-on-bad-exit=1", "--wait=0", f"--job-name={step.role}"),
        *("bash", script, step.role, str(step.processes[0].index)),
        *(",".join(map(str, step.devices)), str(logs), ":".join(map(str, folders)), header),
        *argv,
    ]


class Step:
    def __init__(
        self, plan: StepPlan, line: Callable[[int], Sequence[str]], log: Path,
        env: Mapping[str, str], token: str, incarnation: int = 0,
    ):  # fmt: skip
        self.plan, self.line, self.log, self.env = plan, line, log, env
        self.incarnation, self._token = incarnation, token
        self.is_killed = False
        self._next: Step | None = None
        self._read: tuple[int, dict[int, int]] = (0, {})
        self._looked_s = 0.0
        argv = list(line(incarnation))
        with open(log, "ab") as out, handed_over(token) as stdin:
            out.write(f"=== {time.strftime('%Y-%m-%d %H:%M:%S')}: {shlex.join(argv)}\n".encode())
            out.flush()
            self.begin = out.tell()
            self._popen = subprocess.Popen(
                argv, stdin=stdin, stdout=out, stderr=out, env=dict(env),
                start_new_session=True, close_fds=True,
            )  # fmt: skip

    def restart(self) -> "Step":
        """Start this step again. Further calls return the same step."""
        if self._next is None:
            again = self.incarnation + 1
            self._next = Step(self.plan, self.line, self.log, self.env, self._token, again)
        return self._next

    def poll(self) -> int | None:
        return self._popen.poll()

    def messages(self) -> str:
        with open(self.log, "rb") as log:
            log.seek(self.begin)
            return log.read().decode(errors="replace")

    def endings(self) -> dict[int, int]:
        if self.poll() is not None or time.monotonic() - self._looked_s >= LOOK_S:
            self._looked_s = time.monotonic()
            with suppress(OSError):
                if (size := self.log.stat().st_size) != self._read[0]:
                    self._read = size, task_endings(self.messages())
        return self._read[1]

    def signal(self, number: int) -> None:
        if self.poll() is None:
            self._popen.send_signal(number)

    def kill(self) -> None:
        if self.poll() is not None:
            return
        self.is_killed = True
        self.signal(signal.SIGINT)
        time.sleep(CTRL_C_S)
        self.signal(signal.SIGINT)

    def abandon(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def wait(self, within_s: float) -> bool:
        return ended_within(self._popen, within_s)


class SlurmTask:
    pid, port, cores = 0, 0, None

    def __init__(self, plan: ProcessPlan, rank: int, node: str, step: Step, logs: Path):
        self.plan, self.rank, self.node, self.step = plan, rank, node, step
        self.name = f"{plan.role}.{plan.index}"
        self.log = logs / f"{self.name}.log"
        self._log_begin = self.log.stat().st_size if self.log.exists() else 0

    @property
    def incarnation(self) -> int:
        return self.step.incarnation

    def restart(self) -> "SlurmTask":
        return SlurmTask(self.plan, self.rank, self.node, self.step.restart(), self.log.parent)

    def poll(self) -> int | None:
        # Poll first, because srun's log, which `endings` reads, is complete only after srun ends.
        code = self.step.poll()
        ended = self.step.endings()
        if self.step.is_killed:
            return None if code is None else -signal.SIGKILL
        if self.rank in ended:
            return ended[self.rank]
        if code is None or not ended:
            return code
        return 0 if code == 0 else -signal.SIGTERM  # srun ended this task after another task failed

    @property
    def ending(self) -> str | None:
        return signal_or_code(self.poll())

    def signal(self, number: int) -> None:
        if self.rank == 0:  # srun passes the signal to every task
            self.step.signal(number)

    def wait(self, within_s: float) -> bool:
        return self.step.wait(within_s)

    def kill(self) -> None:
        self.step.kill()

    def abandon(self) -> None:
        """Kill srun. Slurm ends the remote tasks when the job ends."""
        self.step.abandon()

    def last_output(self) -> str:
        return last_line(self.log, self._log_begin) or last_line(self.step.log, self.step.begin)


_ENDED = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,\[\]-]+): (?P<how>.+)")
_HOW = {
    "Killed": signal.SIGKILL, "Terminated": signal.SIGTERM, "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT, "Bus error": signal.SIGBUS, "Out Of Memory": signal.SIGKILL,
    "Interrupt": signal.SIGINT, "Hangup": signal.SIGHUP,
}  # fmt: skip


def task_endings(said: str) -> dict[int, int]:
    ended: dict[int, int] = {}
    for found in _ENDED.finditer(said):
        how = found["how"].strip()
        if code := re.match(r"Exited with exit code (\d+)", how):
            number = int(code[1])
        else:
            number = next((-value for word, value in _HOW.items() if how.startswith(word)), 1)
        # Apptainer reports signal N as exit code 128 + N. Keep 143, because roles exit with it too.
        if 128 < number < 160 and number != 128 + signal.SIGTERM:
            number = 128 - number
        for rank in _ranks(found["tasks"]):
            ended.setdefault(rank, number)
    return ended


def failed_node(said: str) -> str | None:
    pattern = r"srun: error: (?:Node failure on (\S+)|(\S+): .*node failure)"
    found = re.search(pattern, said, re.IGNORECASE)
    return (found[1] or found[2]).rstrip(",") if found else None


def _ranks(text: str) -> list[int]:
    ranks: list[int] = []
    for part in text.strip("[]").split(","):
        first, _, last = part.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return ranks


@dataclass(frozen=True)
class Allocation:
    """A Slurm job. `nodes`: host names by job component. `restarts`: number of requeues."""

    job: str
    restarts: int
    nodes: tuple[tuple[str, ...], ...]
    site: Site
    slurm: Slurm
    hardware: Hardware
    workspace: Workspace

    @property
    def scratch(self) -> Path:
        return containers.scratch_of(self.site.containers, self.job)

    def images(self, plan: StagePlan) -> dict[str, Path]:
        return containers.images_of(self.site.containers, self.workspace, self.hardware, plan)

    def steps(self, plan: StagePlan) -> list[StepPlan]:
        return step_plans(plan, components(self.hardware, plan, self.slurm), self.slurm)

    def start(
        self, plan: StagePlan, run_dir: Path, attempt: int, start: str, token: str
    ) -> list[SlurmTask]:
        code = containers.snapshot(self.workspace, run_dir)
        logs, tasks = logs_dir(run_dir), []
        base = containers.without_apptainer_options(
            queue.clean_environment(os.environ, inside=True)
        )
        if self.site.containers is None:
            base[COMMIT] = commit(self.workspace.root)
        for number, one in enumerate(self.steps(plan)):
            line = partial(self._line, one, run_dir, code, plan.name, attempt)
            variables = cluster_environment(self.site, start, one.num_threads, plan.num_nodes)
            if self.site.containers:
                env = base | containers.container_variables(variables)
            else:
                env = base | variables
                folders = str(code), env.get("PYTHONPATH")
                env["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
            step = Step(one, line, log_path(run_dir, f"step.{number}"), env, token)
            nodes = self._nodes_of(one)
            tasks += [
                SlurmTask(process, rank, nodes[rank // one.tasks_per_node], step, logs)
                for rank, process in enumerate(one.processes)
            ]
        return tasks

    def _line(
        self, step: StepPlan, run_dir: Path, code: Path, stage: str, attempt: int, incarnation: int
    ) -> list[str]:
        folders, argv = self.command(step, run_dir, code, stage, attempt, incarnation)
        component, nodelist = self.component(step.component), ",".join(self._nodes_of(step))
        opening = header(stage, attempt, incarnation)
        logs = logs_dir(run_dir)
        return srun(step, component, nodelist, code, logs, folders, opening, argv)

    def command(
        self, step: StepPlan, run_dir: Path, code: Path, stage: str, attempt: int, incarnation: int
    ) -> tuple[list[Path], list[str]]:
        """Return (folders to create on the node, role's command)."""
        where = self.site.containers
        python = sys.executable if where is None else "python3"
        argv = role_argv(python, step.module, run_dir, stage, attempt, 0, incarnation)
        if where is None:
            return [self.scratch], argv
        gpus = self.hardware.accelerator != "cpu"
        image = containers.image_of(where, self.workspace, self.hardware, step.role)
        folders = containers.node_folders(where, self.job, image, os.getuid())
        return folders, containers.apptainer(where, image, run_dir, code, folders, gpus, argv)

    def component(self, number: int) -> int | None:
        return number if len(self.nodes) > 1 else None

    def _nodes_of(self, step: StepPlan) -> tuple[str, ...]:
        return self.nodes[step.component][step.first_node : step.first_node + step.num_nodes]

    def silent_nodes(self, suspected: Sequence[str] = ()) -> list[str]:
        """Return the nodes on which two probe steps in a row fail.

        Return [] if all `suspected` nodes answer, or if the launcher's own node fails, because then
        srun is broken.
        """
        if suspected and not self._without_answer(suspected):
            return []
        own, silent = self.nodes[0][0], [name for names in self.nodes for name in names]
        for _ in range(2):
            silent = self._without_answer([own, *silent])
            if own in silent:
                return []
        return silent

    def _without_answer(self, asked: Sequence[str]) -> list[str]:
        probes = {}
        for number, names in enumerate(self.nodes):
            for name in names:
                if name in asked:
                    options = step_options(self.component(number), name, 1, 1, 1, None)
                    probes[name] = self._run(options, "true")
        limit_s = time.monotonic() + ANSWER_S
        while time.monotonic() < limit_s and any(probe.poll() is None for probe in probes.values()):
            time.sleep(0.1)
        for probe in probes.values():
            probe.kill()

        def is_silent(probe: subprocess.Popen) -> bool:
            return not ended_within(probe, KILLED_S) or probe.returncode != 0

        return [name for name, probe in probes.items() if is_silent(probe)]

    def clean(self, caches: str, starts: str, shared: str) -> None:
        script = (
            "tmp=${TMPDIR:-${TEMP:-${TMP:-/tmp}}}; "
            f'rm -rf "$1" "$tmp/$2"* "$tmp/$3"* {SHARED_MEMORY}/*"$4"*'
        )
        remove = ["sh", "-c", script, "sh", str(self.scratch), caches, starts, shared]
        steps = []
        for number, names in enumerate(self.nodes):
            nodelist, component = ",".join(names), self.component(number)
            options = step_options(component, nodelist, len(names), 1, 1, None)
            steps.append(self._run(options, *remove))
        limit_s = time.monotonic() + CLEAN_S
        for step in steps:
            with suppress(subprocess.TimeoutExpired):
                step.wait(max(0.0, limit_s - time.monotonic()))
            step.kill()

    def _run(self, options: Sequence[str], *command: str) -> subprocess.Popen:
        env = queue.clean_environment(os.environ, inside=True) | self.site.environment
        nowhere = subprocess.DEVNULL
        argv = [*options, *command]
        return subprocess.Popen(argv, env=env, stdin=nowhere, stdout=nowhere, stderr=nowhere)


def allocation(
    site: Site,
    slurm_site: Slurm,
    hardware: Hardware,
    workspace: Workspace,
    env: Mapping[str, str] = os.environ,
) -> Allocation:
    size = int(env.get("SLURM_HET_SIZE", "1"))
    names = ["SLURM_JOB_NODELIST"]
    if size > 1:
        names = [f"SLURM_JOB_NODELIST_HET_GROUP_{i}" for i in range(size)]
    return Allocation(
        job=env.get("SLURM_HET_JOB_ID") or env["SLURM_JOB_ID"],
        restarts=int(env.get("SLURM_RESTART_COUNT", "0")),
        nodes=tuple(tuple(queue.hostnames(env[name])) for name in names),
        site=site,
        slurm=slurm_site,
        hardware=hardware,
        workspace=workspace,
    )
