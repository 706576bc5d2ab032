"""Describe how this site starts a run's stages, and check the targets given to Snakemake."""

import os
import re
import shlex
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import get_args

from orrery.launcher.containers import (
    IMAGE_OF,
    apptainer,
    hardware_of,
    image_of,
    node_folders,
    scratch_of,
)
from orrery.launcher.process import role_argv
from orrery.launcher.runs import Run
from orrery.launcher.site import EXAMPLE, FILE, Site, cluster, load_site
from orrery.launcher.slurm.allocation import StepPlan, srun, step_plans
from orrery.launcher.slurm.queue import (
    Component,
    batch_job,
    components,
    devices_per_node,
    nodes,
    sbatch_options,
)
from orrery.manifest.budget.options import memory_misfits
from orrery.manifest.budget.run import plan_run
from orrery.manifest.budget.table import host_misfits
from orrery.manifest.check import nearest
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import Workspace, find_workspace, pretty_json, run_dir
from orrery.manifest.plan import NodeGroup, ProcessPlan, StageName, StagePlan, notes, plan
from orrery.manifest.plan import stage as stage_plan
from orrery.manifest.render import Rendered, render_all, render_file
from orrery.manifest.schema import Manifest
from orrery.runtime.health import listed
from orrery.runtime.run_directory import MANIFEST, code_dir, done_path, logs_dir

STAGES = get_args(StageName)
RUNS = Path("runs")
END = "END_OF_JOB_SCRIPT"
MARKER = re.compile(str(done_path(RUNS / "(?P<run>[^/]+)", "(?P<stage>[^/]+)")))


def describe_stage(manifest: Manifest, name: str, site: Site, workspace: Workspace) -> list[str]:
    one, hardware = stage_plan(manifest, name), manifest.hardware
    if site.slurm is None:
        how = "processes here"
        if one.num_nodes > 1:
            how = f"needs a cluster, described in {FILE} as in {EXAMPLE}"
        groups = map(partial(_group, manifest, one), one.groups)
        return [_head(manifest, one, how), *groups, *notes(manifest)]
    parts = components(hardware, one, site.slurm)
    steps = step_plans(one, parts, site.slurm)
    job = "one Slurm job"
    if len(parts) > 1:
        job = f"one heterogeneous Slurm job of {len(parts)} components"
    lines = [_head(manifest, one, job)]
    for number, part in enumerate(parts):
        held = ", ".join(map(_names_of_steps, _by_role(steps, number)))
        where = f"component {number} ({part.group.name}): {_nodes(part, hardware.accelerator)}"
        lines.append(f"  {where}: {held}")
    lines += notes(manifest)
    if one.num_nodes > 1 and site.network is None:
        lines.append(
            "  note: network.interface: the site file has none, so the stage is refused, because "
            "nodes cannot reach one another"
        )
    lines += [f"  before the launcher: {line}" for line in site.slurm.pre_run]
    lines.append(f"  sbatch {sbatch_options(hardware, one, site.slurm)}")
    if site.slurm.template:
        lines.append(f"  in the job script that {site.slurm.template} makes")
    for number in range(len(parts)):
        for first, *more in _by_role(steps, number):
            line = _srun_line(first, len(parts) > 1, manifest, one, site, workspace)
            lines.append(f"  {shlex.join(line)}")
            if more:
                lines.append(f"  one such step for each of {_names_of_steps(more)}")
    return lines


def _by_role(steps: Iterable[StepPlan], component: int) -> list[list[StepPlan]]:
    inside = (step for step in steps if step.component == component)
    return [list(each) for _, each in groupby(inside, lambda step: step.role)]


def _head(manifest: Manifest, one: StagePlan, how: str) -> str:
    count = len(one.processes)
    processes = f"{count} process{'es' if count > 1 else ''}"
    folder = run_dir("", manifest).name
    return f"{one.name} of {folder}: {how}, {_count(one.num_nodes, 'node')}, {processes}"


def _group(manifest: Manifest, one: StagePlan, group: NodeGroup) -> str:
    processes = [process for node in nodes(group) for process in one.by_node.get(node, ())]
    devices, kind = devices_per_node(one, group), manifest.hardware.accelerator.upper()
    if kind == "CPU":
        kind = "cores" if devices > 1 else "core"
    each = f" × {devices} {kind}" if devices else ""
    return f"  {group.name}: {_count(group.num_nodes, 'node')}{each}: {_names(processes)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"


def _nodes(part: Component, accelerator: str) -> str:
    what = f"{part.gpus} {accelerator.upper()}" if part.gpus else f"{part.cpus} cores"
    return f"{_count(part.group.num_nodes, 'node')} × {what}"


def _names(processes: Iterable[ProcessPlan]) -> str:
    return listed(f"{process.role}.{process.index}" for process in processes)


def _names_of_steps(steps: Iterable[StepPlan]) -> str:
    return _names(process for step in steps for process in step.processes)


def _srun_line(
    step: StepPlan,
    heterogeneous: bool,
    manifest: Manifest,
    one: StagePlan,
    site: Site,
    workspace: Workspace,
) -> list[str]:
    folder = Path("runs") / run_dir("", manifest).name
    code = code_dir(folder) / "<digest>"
    argv = role_argv("python3", step.module, folder, one.name, 0, 0)
    argv[argv.index("--attempt") + 1] = "<attempt>"
    folders = [scratch_of(site.containers, "<job>")]
    if site.containers is not None:
        hardware = hardware_of(manifest.hardware.accelerator)
        try:
            image = image_of(site.containers, workspace, manifest.hardware, step.role)
        except OrreryError:
            name = f"{IMAGE_OF[step.role]}-{hardware}-<missing>.sif"
            image = workspace.root / site.containers.images / name
        image = Path(workspace.shown(image))
        folders = node_folders(site.containers, "<job>", image, "<uid>")
        argv = apptainer(site.containers, image, folder, code, folders, hardware == "cuda", argv)
    component = step.component if heterogeneous else None
    nodelist = "<nodes>" if step.num_nodes > 1 else "<node>"
    return srun(step, component, nodelist, code, logs_dir(folder), folders, f"=== {one.name}", argv)


def write_plan(
    run: Run, stages: Sequence[str], site: Site, workspace: Workspace, folder: Path
) -> list[Path]:
    if folder.exists() or folder.is_symlink():
        raise OrreryError(f"{folder}: exists already. Remove it, or name a new folder")
    described = [
        line for name in stages for line in describe_stage(run.manifest, name, site, workspace)
    ]
    texts = {MANIFEST: pretty_json(run.manifest), "plan.txt": "\n".join(described) + "\n"}
    for name in stages:
        file = f"{run.stages.index(name) + 1}_{name}.sh"
        texts[file] = _script(run, name, site, workspace)
    made = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(made, ignore_errors=True)  # a killed process may have left it
    try:
        made.mkdir(parents=True)
        for name, text in texts.items():
            (made / name).write_text(text, encoding="utf-8")
            if name.endswith(".sh"):
                (made / name).chmod(0o755)
        made.rename(folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return [folder / name for name in texts]


def _script(run: Run, name: str, site: Site, workspace: Workspace) -> str:
    command, script = ["orrery", "run", run.path.name, name], None
    if site.slurm is not None:
        options = sbatch_options(run.manifest.hardware, stage_plan(run.manifest, name), site.slurm)
        shell = shlex.join(command)
        command, script = batch_job(run.path, name, options, shell, site, workspace.root)
    title = f"# {name} of {run.path.name}, from {workspace.root}"
    stdin = "" if script is None else f" <<'{END}'\n{script}{END}"
    return f"#!/bin/sh\n{title}\nexec {shlex.join(command)}{stdin}\n"


@dataclass(frozen=True)
class Pipeline:
    """The runs with checked-in manifests.

    - `folders`: target → run folders. A target is a run's name or a spec file's stem.
    - `manifests`: run folder → manifest.
    - `broken`: stem of a spec file that does not render → error.
    - `stale`: target whose manifest is missing or differs from its spec → error.
    """

    folders: dict[str, list[str]]
    manifests: dict[str, Manifest]
    broken: dict[str, str]
    stale: dict[str, str]
    workspace: Workspace
    site: Site

    def check_targets(self, targets: Iterable[str]) -> None:
        """Raise OrreryError if a target is unknown or stale, or does not fit in memory."""
        for target in targets:
            if target in self.stale:
                raise OrreryError(self.stale[target])
            for folder in self.folders.get(target, ()):
                manifest = self.manifests[folder]
                if found := [*memory_misfits(manifest), *self._host_misfits(manifest)]:
                    raise OrreryError(f"{target}: {'; '.join(found)}")
        for target in sorted({*targets} - {*self.folders}):
            marker = MARKER.fullmatch(os.path.normpath(target))
            if marker is None:
                raise OrreryError(f"run {target!r}: {self._unknown(target)}")
            run, stage = marker["run"], marker["stage"]
            if run not in self.manifests:
                hint = _near(run, self.manifests, "type a run's name in place of the path")
                raise OrreryError(
                    f"target {target}: no checked-in manifest has run folder {run!r}; {hint}"
                )
            stages = [one.name for one in plan(self.manifests[run])]
            if stage not in stages:
                raise OrreryError(
                    f"target {target}: this run has no stage {stage!r}. "
                    f"Choose from {', '.join(stages)}"
                )

    def _host_misfits(self, manifest: Manifest) -> list[str]:
        if self.site.slurm is None:
            return []
        try:
            budget = plan_run(manifest)
        except OrreryError:  # this model family's memory cannot be planned
            return []
        return list(host_misfits(budget, self.site.slurm.memory_per_node_mb))

    def _unknown(self, target: str) -> str:
        if target in self.broken:
            return f"its spec cannot be evaluated: {self.broken[target]}"
        if self.broken and self.workspace.manifest_path(target).is_file():
            return f"its spec cannot be evaluated. First correct {'; '.join(self.broken.values())}"
        hint = _near(target, self.folders, "`ls manifests jsonnet/runs` shows all names")
        return f"is neither a run nor a group of runs; {hint}"

    def before(self, run: str, stage: str) -> list[str]:
        after = stage_plan(self.manifests[run], stage).after
        return [str(done_path(RUNS / run, one)) for one in after]

    def no_slurm(self) -> str:
        try:
            cluster(self.workspace)
        except OrreryError as error:
            return f"note: no submission is shown: {error}"
        return ""

    def sbatch(self, run: str, stage: str) -> str:
        if self.site.slurm is None:
            return ""
        manifest = self.manifests[run]
        return sbatch_options(manifest.hardware, stage_plan(manifest, stage), self.site.slurm)

    def describe(self, run: str, stage: str) -> str:
        return "\n".join(describe_stage(self.manifests[run], stage, self.site, self.workspace))


def _rendered(workspace: Workspace) -> tuple[list[Rendered], dict[str, str]]:
    try:
        return render_all(workspace), {}
    except OrreryError as error:
        first = error
    whole: list[Path] = []
    broken: dict[str, str] = {}
    for path in workspace.run_files:
        try:
            render_file(workspace, path)
            whole.append(path)
        except OrreryError as error:
            file, said = workspace.shown(path), str(error)
            broken[path.stem] = said if said.startswith(file) else f"{file}: {said}"
    if not broken:  # each file renders alone, so `first` means that two files define one run
        raise first
    return render_all(workspace, whole), broken


def targets_of(argv: Sequence[str]) -> list[str]:
    """Return Snakemake's targets in `argv`, or [] for another program's command line."""
    from snakemake.cli import get_argument_parser

    if "snakemake" not in argv[0]:
        return []
    return list(get_argument_parser().parse_args(argv[1:]).targets)


def _near(name: str, known: Iterable[str], otherwise: str) -> str:
    near = nearest(name, list(known))
    return f"did you mean {near!r}?" if near else otherwise


def checked_in(workspace: Workspace | None = None) -> Pipeline:
    workspace = workspace or find_workspace()
    targets: dict[str, list[str]] = {}
    groups: dict[str, list[str]] = {}
    manifests: dict[str, Manifest] = {}
    stale: dict[str, str] = {}
    rendered, broken = _rendered(workspace)
    for run in rendered:
        name, path = run.manifest.name, workspace.manifest_path(run.manifest.name)
        if not path.is_file() or path.read_bytes() != pretty_json(run.manifest).encode():
            state = "differs from its rendered spec" if path.is_file() else "is missing"
            stale[name] = stale[run.file.stem] = (
                f"{workspace.shown(path)}: {state} ({workspace.shown(run.file)}). "
                f"Type `orrery render {name}` and review the change"
            )
            continue
        folder = run_dir(".", run.manifest).name
        targets[name] = [folder]
        groups.setdefault(run.file.stem, []).append(folder)
        manifests[folder] = run.manifest
    stale = {name: said for name, said in stale.items() if name not in targets}
    site = load_site(workspace)
    return Pipeline({**groups, **targets}, manifests, broken, stale, workspace, site)
