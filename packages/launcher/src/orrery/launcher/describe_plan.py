"""What a stage will be on this site, as text: nodes, devices, images, submission, command lines. Nothing is started or asked for.

`orrery plan` and the pipeline's dry run print it; a run folder, image or job that is not there yet stands as a word in <>.
"""

import shlex
from collections.abc import Iterable
from functools import partial
from itertools import groupby
from pathlib import Path

from orrery.launcher import images
from orrery.launcher.containers import apptainer, image_of, scratch_of
from orrery.launcher.process import role_argv
from orrery.launcher.site import Site
from orrery.launcher.slurm.job_script import Component, components, nodes, sbatch_options
from orrery.launcher.slurm.steps import StepPlan, srun, step_plans
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import run_dir
from orrery.manifest.plan import NodeGroup, ProcessPlan, StagePlan, stage
from orrery.manifest.schema import Manifest
from orrery.manifest.support import notes
from orrery.manifest.workspace import Workspace
from orrery.runtime.health import listed


def describe_stage(manifest: Manifest, name: str, site: Site, workspace: Workspace) -> list[str]:
    """Return lines about one stage; at a site without Slurm only its nodes and processes."""
    one, hardware = stage(manifest, name), manifest.hardware
    if site.slurm is None:
        how = (
            "processes here"
            if one.num_nodes == 1
            else "needs a cluster, and there is no site file with [slurm]"
        )
        return [
            _head(manifest, one, how),
            *map(partial(_group, manifest, one), one.groups),
            *notes(manifest),
        ]
    parts = components(hardware, one, site.slurm)
    steps = step_plans(one, parts, site.slurm)
    job = (
        "one Slurm job"
        if len(parts) == 1
        else f"one heterogeneous Slurm job of {len(parts)} components"
    )
    lines = [_head(manifest, one, job)]
    for number, part in enumerate(parts):
        held = ", ".join(
            _names(process for step in each for process in step.processes)
            for each in _alike(steps, number)
        )
        lines.append(
            f"  component {number} ({part.group.name}): {_nodes(part, hardware.accelerator)}: {held}"
        )
    lines += notes(manifest)
    if one.num_nodes > 1 and site.network is None:
        lines.append(
            "  note: network.interface: the site file has none, so nodes cannot reach one another: the stage is refused"
        )
    lines.append(f"  sbatch {sbatch_options(hardware, one, site.slurm)}")
    for number in range(len(parts)):
        for first, *more in _alike(steps, number):
            lines.append(
                f"  {shlex.join(_line(first, len(parts) > 1, manifest, one, site, workspace))}"
            )
            if more:
                lines.append(
                    f"  likewise, a step each: {_names(process for step in more for process in step.processes)}"
                )
    return lines


def _alike(steps: Iterable[StepPlan], component: int) -> list[list[StepPlan]]:
    """The steps of this component by role."""
    return [
        list(each)
        for _, each in groupby(
            (step for step in steps if step.component == component), lambda step: step.role
        )
    ]


def _head(manifest: Manifest, one: StagePlan, how: str) -> str:
    nodes = f"{one.num_nodes} node" + ("s" if one.num_nodes > 1 else "")
    return f"{one.name} of {run_dir('', manifest).name}: {how}, {nodes}, {len(one.processes)} process{'es' if len(one.processes) > 1 else ''}"


def _group(manifest: Manifest, one: StagePlan, group: NodeGroup) -> str:
    """Return a line about the nodes of one shape: number, used devices per node, processes."""
    processes = [process for node in nodes(group) for process in one.by_node.get(node, ())]
    devices = max(
        sum(process.num_devices for process in one.by_node.get(node, ())) for node in nodes(group)
    )
    kind = (
        "core" if manifest.hardware.accelerator == "cpu" else manifest.hardware.accelerator.upper()
    )
    each = f" × {devices} {kind}{'s' if devices > 1 and kind == 'core' else ''}" if devices else ""
    return f"  {group.name}: {_count(group.num_nodes, 'node')}{each}: {_names(processes)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"


def _nodes(part: Component, accelerator: str) -> str:
    count = part.group.num_nodes
    what = f"{part.gpus} {accelerator.upper()}" if part.gpus else f"{part.cpus} cores"
    return f"{count} node{'s' if count > 1 else ''} × {what}"


def _names(processes: Iterable[ProcessPlan]) -> str:
    return listed(f"{process.role}.{process.index}" for process in processes)


def _line(
    step: StepPlan,
    heterogeneous: bool,
    manifest: Manifest,
    one: StagePlan,
    site: Site,
    workspace: Workspace,
) -> list[str]:
    folder = Path("runs") / run_dir("", manifest).name
    argv = role_argv("python3", step.module, folder, one.name, 0, 0)
    argv[argv.index("--attempt") + 1] = "<attempt>"
    scratch = scratch_of(site.containers, "<job>")
    if site.containers is not None:
        hardware = images.hardware_of(manifest.hardware.accelerator)
        try:
            image = image_of(site.containers, workspace, manifest.hardware, step.role)
        except OrreryError:
            image = (
                workspace.root
                / site.containers.images
                / f"{images.IMAGE_OF[step.role]}-{hardware}-<missing>.sif"
            )
        image = Path(workspace.shown(image))
        argv = apptainer(
            site.containers,
            image,
            folder,
            folder / "code" / "<digest>",
            scratch,
            hardware == "cuda",
            argv,
        )
    component, code = step.component if heterogeneous else None, folder / "code" / "<digest>"
    nodelist = "<nodes>" if step.num_nodes > 1 else "<node>"
    return srun(step, component, nodelist, code, folder / "logs", scratch, f"=== {one.name}", argv)
