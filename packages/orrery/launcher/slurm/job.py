"""Plan and run a stage's Slurm job: components, `sbatch` command and `srun` steps.

- Each node group is a component. Several components form a heterogeneous job.
- An engine has one step on its first node, and another on its further nodes. Other roles have one
  step per node group.
- A failed task ends its step (`--kill-on-bad-exit`). A finished task does not (`--wait=0`), because
  rank 0 may still upload a checkpoint.
"""

import math
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
from pathlib import Path
from typing import Any, Literal

from orrery.launcher.process import KINDS, ended_within, last_line, signal_or_code
from orrery.launcher.site import Site, Slurm
from orrery.launcher.slurm.queue import job_name
from orrery.manifest.errors import OrreryError
from orrery.manifest.plan import ENGINE_ROLES, NodeGroup, ProcessPlan, StagePlan
from orrery.manifest.publish import sha256
from orrery.manifest.schema import Hardware
from orrery.runtime.run_directory import log_path
from orrery.runtime.token import handed_over

IN_JOB = "ORRERY_SLURM"  # environment variable that only Orrery's jobs set
MEMORY_MB = 6000  # minimum memory per node
LAUNCHER_CPUS = 2  # minimum cores per node


@dataclass(frozen=True)
class Component:
    group: NodeGroup
    gpus: int
    cpus: int
    memory_mb: int


def components(hardware: Hardware, plan: StagePlan, slurm: Slurm) -> list[Component]:
    return [_component(hardware, plan, group, slurm) for group in plan.groups]


def _component(hardware: Hardware, plan: StagePlan, group: NodeGroup, slurm: Slurm) -> Component:
    devices = devices_per_node(plan, group)
    if hardware.accelerator == "cpu":
        gpus, cpus = 0, max(hardware.devices_per_node, devices)
    else:
        gpus, cpus = devices, math.ceil(slurm.cpus_per_node * devices / hardware.devices_per_node)
    cpus = min(slurm.cpus_per_node, max(cpus, LAUNCHER_CPUS))
    share_mb = slurm.memory_per_node_mb * cpus // slurm.cpus_per_node
    return Component(group, gpus, cpus, min(slurm.memory_per_node_mb, max(MEMORY_MB, share_mb)))


def devices_per_node(plan: StagePlan, group: NodeGroup) -> int:
    processes = (plan.by_node.get(node, ()) for node in nodes(group))
    return max(one.first_device + one.num_devices for each in processes for one in each)


def nodes(group: NodeGroup) -> range:
    return range(group.first_node, group.first_node + group.num_nodes)


def gres(slurm: Slurm, count: int) -> str:
    return f"gpu:{slurm.gpu_type}:{count}" if slurm.gpu_type else f"gpu:{count}"


def where(slurm: Slurm, partition: str = "") -> list[str]:
    account = [f"--account={slurm.account}"] if slurm.account else []
    return [f"--partition={partition or slurm.partition}", *account]


def sbatch_options(hardware: Hardware, plan: StagePlan, slurm: Slurm) -> str:
    parts = []
    for number, one in enumerate(components(hardware, plan, slurm)):
        options = [
            *where(slurm, "" if one.gpus else slurm.cpu_partition),
            f"--time={slurm.time_limit_min}",
            f"--nodes={one.group.num_nodes}",
            "--ntasks-per-node=1",
            f"--cpus-per-task={one.cpus}",
            f"--mem={one.memory_mb}M",
            *([f"--gres={gres(slurm, one.gpus)}"] if one.gpus else []),
            *(["--requeue", f"--signal=B:USR1@{slurm.warning_s}"] if number == 0 else []),
            *slurm.extra,
        ]
        parts.append(shlex.join(options))
    return " : ".join(parts)


def batch_job(
    run_dir: Path, stage: str, options: str, shell_command: str, site: Site, root: Path
) -> tuple[list[str], str | None]:
    """Return (sbatch command, stdin). `stdin`: the script from the site's template, or None."""
    path = shlex.quote(str(Path(sys.executable).parent))
    modules = site.containers.modules if site.containers else ()
    load = f"module load {shlex.join(modules)} && " if modules else ""
    inner = f'{load}export PATH={path}:"$PATH" {IN_JOB}=1 && exec {shell_command}'
    lines = () if site.slurm is None else site.slurm.pre_run
    if lines:
        inner = "\n".join(["set -e", *lines, inner])
    shell = "-lc" if modules or lines else "-c"  # only login shells define `module`
    # Ignore SIGUSR1, which is for the launcher and would kill the shell.
    command = f"trap '' USR1; exec bash {shell} {shlex.quote(inner)}"
    folder = Path(str(run_dir.resolve()).replace("%", "%%"))  # Slurm expands % in --output
    argv = [
        *("sbatch", "--parsable", f"--job-name={job_name(run_dir, stage)}"),
        *(f"--output={log_path(folder, 'slurm.%j')}", "--open-mode=append"),
        f"--chdir={root}",
    ]
    if site.slurm is None or not site.slurm.template:
        return [*argv, *shlex.split(options), f"--wrap={command}"], None
    fields = {"run": run_dir.name, "stage": stage, "command": command, "slurm": site.slurm}
    return argv, _from_template(root / site.slurm.template, options, fields)


def _from_template(path: Path, options: str, fields: Mapping[str, object]) -> str:
    """Render the job script from the Jinja2 template at `path`.

    Raise OrreryError if rendering fails, or the script lacks `#!` or the field `command`.
    """
    import jinja2

    parts = [shlex.split(part) for part in options.split(" : ")]
    lines = ["\n".join(f"#SBATCH {option}" for option in part) for part in parts]
    pairs = [[option.lstrip("-").partition("=") for option in part] for part in parts]
    components = [{key.replace("-", "_"): value for key, _, value in part} for part in pairs]
    name = f"slurm.template: {path.name}"
    try:
        environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True)
        text = environment.from_string(path.read_text(encoding="utf-8")).render(
            **fields, sbatch="\n#SBATCH hetjob\n".join(lines), components=components
        )
    except OSError as error:
        raise OrreryError(f"{name}: cannot be read ({error.strerror}); correct the path") from None
    except Exception as error:  # a template's expressions may raise anything
        raise OrreryError(
            f"{name}: {error}; the fields are {', '.join([*fields, 'sbatch', 'components'])}"
        ) from None
    if not text.startswith("#!") or str(fields["command"]) not in text:
        raise OrreryError(
            f"{name}: begins without '#!' or lacks {{{{ command }}}}, so the job would not start "
            "the stage; write #!/bin/bash first and {{ command }} last"
        )
    return text.rstrip("\n") + "\n"


def script_facts(slurm: Slurm | None, root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if slurm is not None and slurm.pre_run:
        found["pre_run"] = list(slurm.pre_run)
    if slurm is not None and slurm.template:
        path = root / slurm.template
        digest = sha256(path) if path.is_file() else None
        found["template"] = {"file": path.name, "sha256": digest}
    return found


LOOK_S = 0.2
CTRL_C_S = 0.2  # pause between SIGINTs. srun kills a step after two within a second.


@dataclass(frozen=True)
class StepPlan:
    """One srun step, with equally many processes on each node.

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

    Slurm gives overlapping steps the same devices, so `task.sh` selects each step's devices.
    Trainer tasks see all trainer devices of a node, for CUDA IPC.
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
        """Start the step again, but only once. Return the new step."""
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
        code = self.step.poll()  # before `endings`, which are complete once srun has ended
        ended = self.step.endings()
        if self.step.is_killed:
            return None if code is None else -signal.SIGKILL
        if self.rank in ended:
            return ended[self.rank]
        if code is None or not ended:
            return code
        return 0 if code == 0 else -signal.SIGTERM  # srun ended this task after another failed

    @property
    def ending(self) -> str | None:
        return signal_or_code(self.poll())

    def signal(self, number: int) -> None:
        if self.rank == 0:  # srun signals every task
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
        # Apptainer exits with 128 + signal, but 143 is also an exit code of roles.
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
