"""Start a stage's srun steps in this launcher's Slurm job."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from orrery.launcher import containers
from orrery.launcher.process import cluster_environment, ended_within, header, role_argv
from orrery.launcher.site import Site, Slurm
from orrery.launcher.slurm import queue
from orrery.launcher.slurm.job import (
    SlurmTask,
    Step,
    StepPlan,
    components,
    srun,
    step_options,
    step_plans,
)
from orrery.manifest.identity import COMMIT, Workspace, commit
from orrery.manifest.plan import StagePlan
from orrery.manifest.schema import Hardware
from orrery.runtime.run_directory import SHARED_MEMORY, log_path, logs_dir

CLEAN_S, ANSWER_S, KILLED_S = 15.0, 8.0, 5.0


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
        """Return (folders to create on the node, the role's command)."""
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

        Return [] if all `suspected` nodes answer, or if the probe of the launcher's own node fails,
        because srun itself is broken then.
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
