"""The Slurm job that this launcher runs in: its nodes, and starting the stage's steps on them.

- In: the environment that sbatch made, the site, the manifest's hardware. Out: `Task`s.
- Variables configure a role. Only the run's token comes by standard input, which srun copies to
  each task.
"""

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
from orrery.launcher.environment import cluster_environment
from orrery.launcher.process import ended_within, header, role_argv
from orrery.launcher.site import Site, Slurm
from orrery.launcher.slurm import queue
from orrery.launcher.slurm.job_script import components
from orrery.launcher.slurm.steps import Step, StepPlan, Task, srun, step_options, step_plans
from orrery.manifest.plan import StagePlan
from orrery.manifest.schema import Hardware
from orrery.manifest.workspace import Workspace
from orrery.runtime.scratch import SHARED_MEMORY

CLEAN_S, ANSWER_S, KILLED_S = 15.0, 8.0, 5.0
INSIDE = "ORRERY_SLURM"  # set by the executor for the jobs that it submits: a launcher in somebody's own allocation starts local processes


@dataclass(frozen=True)
class Allocation:
    """One job. `nodes` are host names by component; `restarts` how often Slurm has started the job again."""

    job: str
    restarts: int
    nodes: tuple[tuple[str, ...], ...]
    site: Site
    slurm: Slurm
    hardware: Hardware
    workspace: Workspace

    def command(
        self, step: StepPlan, run_dir: Path, code: Path, stage: str, attempt: int, incarnation: int
    ) -> list[str]:
        """What one task of a step runs: the role in its image, or with this Python at a site without containers."""
        if self.site.containers is None:
            return role_argv(sys.executable, step.module, run_dir, stage, attempt, 0, incarnation)
        argv = role_argv("python3", step.module, run_dir, stage, attempt, 0, incarnation)
        gpus = self.hardware.accelerator != "cpu"
        image = containers.image_of(self.site.containers, self.workspace, self.hardware, step.role)
        return containers.apptainer(
            self.site.containers, image, run_dir, code, self.scratch, gpus, argv
        )

    def steps(self, plan: StagePlan) -> list[StepPlan]:
        return step_plans(plan, components(self.hardware, plan, self.slurm), self.slurm)

    @property
    def scratch(self) -> Path:
        return containers.scratch_of(self.site.containers, self.job)

    def component(self, number: int) -> int | None:
        """`number` for srun; None where the job has only one."""
        return number if len(self.nodes) > 1 else None

    def silent_nodes(self, suspected: Sequence[str] = ()) -> list[str]:
        """Nodes of the job on which nothing can be started, twice; none where half of them or more are silent, which is not their fault.

        Where only some are `suspected`, the others are asked only if one of these does not answer.
        """
        if suspected and not self._without_answer(suspected):
            return []
        silent = [name for names in self.nodes for name in names]
        for _ in range(2):
            silent = self._without_answer(silent)
        return silent if 2 * len(silent) < sum(map(len, self.nodes)) else []

    def _without_answer(self, asked: Sequence[str]) -> list[str]:
        probes = {
            name: self._run(step_options(self.component(number), name, 1, 1, 1, None), "true")
            for number, names in enumerate(self.nodes)
            for name in names
            if name in asked
        }
        limit_s = time.monotonic() + ANSWER_S
        while time.monotonic() < limit_s and any(probe.poll() is None for probe in probes.values()):
            time.sleep(0.1)
        for probe in probes.values():
            probe.kill()
        return [
            name
            for name, probe in probes.items()
            if not ended_within(probe, KILLED_S) or probe.returncode != 0
        ]

    def clean(self, caches: str, starts: str, shared: str) -> None:
        """Remove from every node the job's scratch folder, engines' folders, whose names begin with `caches` or `starts` and which lie
        beside it where roles are in no containers, and shared memory with `shared` in its name; what cannot be reached in CLEAN_S stays."""
        script = f'tmp=${{TMPDIR:-${{TEMP:-${{TMP:-/tmp}}}}}}; rm -rf "$1" "$tmp/$2"* "$tmp/$3"* {SHARED_MEMORY}/*"$4"*'
        remove = ["sh", "-c", script, "sh", str(self.scratch), caches, starts, shared]
        steps = [
            self._run(
                step_options(self.component(number), ",".join(names), len(names), 1, 1, None),
                *remove,
            )
            for number, names in enumerate(self.nodes)
        ]
        limit_s = time.monotonic() + CLEAN_S
        for step in steps:
            with suppress(subprocess.TimeoutExpired):
                step.wait(max(0.0, limit_s - time.monotonic()))
            step.kill()

    def _run(self, options: Sequence[str], *command: str) -> subprocess.Popen:
        env, nowhere = (
            {**queue.clean_environment(os.environ, inside=True), **self.site.environment},
            subprocess.DEVNULL,
        )
        return subprocess.Popen(
            [*options, *command], env=env, stdin=nowhere, stdout=nowhere, stderr=nowhere
        )

    def images(self, plan: StagePlan) -> dict[str, Path]:
        return containers.images_of(self.site.containers, self.workspace, self.hardware, plan)

    @staticmethod
    def _base() -> dict[str, str]:
        """Our environment without what srun or Apptainer would take from it: options, binds and variables of whoever submitted."""
        return containers.without_theirs(queue.clean_environment(os.environ, inside=True))

    def start(
        self, plan: StagePlan, run_dir: Path, attempt: int, start: str, token: str
    ) -> list[Task]:
        """Start every step of the stage; raises `OrreryError` where an image is missing."""
        code = containers.snapshot(self.workspace, run_dir)
        logs, tasks = run_dir / "logs", []
        for number, one in enumerate(self.steps(plan)):
            line = partial(self._line, one, run_dir, code, plan.name, attempt)
            variables = cluster_environment(self.site, start, one.num_threads, plan.num_nodes)
            env = {
                **self._base(),
                **(containers.passed_on(variables) if self.site.containers else variables),
            }
            step = Step(one, line, logs / f"step.{number}.log", env, token)
            tasks += [
                Task(process, rank, self._nodes_of(one)[rank // one.tasks_per_node], step, logs)
                for rank, process in enumerate(one.processes)
            ]
        return tasks

    def _line(
        self, step: StepPlan, run_dir: Path, code: Path, stage: str, attempt: int, incarnation: int
    ) -> list[str]:
        argv = self.command(step, run_dir, code, stage, attempt, incarnation)
        component, nodelist = self.component(step.component), ",".join(self._nodes_of(step))
        return srun(
            step,
            component,
            nodelist,
            code,
            run_dir / "logs",
            self.scratch,
            header(stage, attempt, incarnation),
            argv,
        )

    def _nodes_of(self, step: StepPlan) -> tuple[str, ...]:
        return self.nodes[step.component][step.first_node : step.first_node + step.num_nodes]


def allocation(
    site: Site,
    slurm_site: Slurm,
    hardware: Hardware,
    workspace: Workspace,
    env: Mapping[str, str] = os.environ,
) -> Allocation:
    """The job around this process."""
    size = int(env.get("SLURM_HET_SIZE", "1"))
    lists = (
        [env[f"SLURM_JOB_NODELIST_HET_GROUP_{i}"] for i in range(size)]
        if size > 1
        else [env["SLURM_JOB_NODELIST"]]
    )
    return Allocation(
        job=env.get("SLURM_HET_JOB_ID") or env["SLURM_JOB_ID"],
        restarts=int(env.get("SLURM_RESTART_COUNT", "0")),
        nodes=tuple(tuple(queue.hostnames(listed)) for listed in lists),
        site=site,
        slurm=slurm_site,
        hardware=hardware,
        workspace=workspace,
    )
