"""The Slurm job of a stage: its components, and its `sbatch` command.

A node group is a component. Several are one heterogeneous job. On partly used nodes a component's
processors and memory are proportional to its devices (on CPUs, cores). The launcher runs on the
first node of component 0.
"""

import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from orrery.launcher.site import Site, Slurm
from orrery.launcher.slurm.queue import job_name
from orrery.manifest.plan import NodeGroup, StagePlan
from orrery.manifest.schema import Hardware
from orrery.runtime.run_directory import log_path

IN_JOB = "ORRERY_SLURM"  # set only in our jobs
MEMORY_MB = 6000  # the minimum for a stage
LAUNCHER_CPUS = 2  # for launcher, orchestrator and router


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
    return max(sum(process.num_devices for process in each) for each in processes)


def nodes(group: NodeGroup) -> range:
    return range(group.first_node, group.first_node + group.num_nodes)


def gres(slurm: Slurm, count: int) -> str:
    return f"gpu:{slurm.gpu_type}:{count}" if slurm.gpu_type else f"gpu:{count}"


def sbatch_options(hardware: Hardware, plan: StagePlan, slurm: Slurm) -> str:
    parts = []
    for number, one in enumerate(components(hardware, plan, slurm)):
        partition = slurm.partition if one.gpus else slurm.cpu_partition or slurm.partition
        options = [
            f"--partition={partition}",
            *([f"--account={slurm.account}"] if slurm.account else []),
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


def batch_command(
    run_dir: Path, stage: str, options: str, shell_command: str, site: Site, root: Path
) -> list[str]:
    path = shlex.quote(str(Path(sys.executable).parent))
    modules = site.containers.modules if site.containers else ()
    load = f"module load {shlex.join(modules)} && " if modules else ""
    inner = f'{load}export PATH={path}:"$PATH" {IN_JOB}=1 && exec {shell_command}'
    # USR1 is for the launcher and must not end the shell first
    script = f"trap '' USR1; exec bash {'-lc' if modules else '-c'} {shlex.quote(inner)}"
    return [
        *("sbatch", "--parsable", f"--job-name={job_name(run_dir, stage)}"),
        *(f"--output={log_path(run_dir.resolve(), 'slurm.%j')}", "--open-mode=append"),
        *(f"--chdir={root}", *shlex.split(options), f"--wrap={script}"),
    ]
