"""Submission: from a stage's plan and the site to what Slurm is asked for. Pure.

- A node group is a component: one component is a plain job, several are one heterogeneous job, started together or not at all.
- A component takes as many nodes as its group has; of a node that it does not fill it takes the share of processors and memory that goes
  with its devices. On a machine without accelerators a device is a core.
- Component 0 leads: the launcher runs on its first node.
"""

import math
import shlex
from dataclasses import dataclass

from orrery.launcher.site import Slurm
from orrery.manifest.plan import NodeGroup, StagePlan
from orrery.manifest.schema import Hardware

MEMORY_MB = 6000  # of a node that a stage only needs a corner of; an engine starts in 2000, and every container costs some
LAUNCHER_CPUS = 2  # the launcher, orchestrator and router beside the roles that compute


@dataclass(frozen=True)
class Component:
    """What one node of a component has, and how many there are."""

    group: NodeGroup
    gpus: int
    cpus: int
    memory_mb: int


def components(hardware: Hardware, plan: StagePlan, slurm: Slurm) -> list[Component]:
    """The job's components in order."""
    return [_component(hardware, plan, group, slurm) for group in plan.groups]


def _component(hardware: Hardware, plan: StagePlan, group: NodeGroup, slurm: Slurm) -> Component:
    devices = max(
        sum(process.num_devices for process in plan.by_node.get(node, ())) for node in nodes(group)
    )
    if hardware.accelerator == "cpu":
        gpus, cpus = 0, max(hardware.devices_per_node, devices)
    else:
        gpus, cpus = devices, math.ceil(slurm.cpus_per_node * devices / hardware.devices_per_node)
    cpus = min(slurm.cpus_per_node, max(cpus, LAUNCHER_CPUS))
    memory_mb = min(
        slurm.memory_per_node_mb,
        max(MEMORY_MB, slurm.memory_per_node_mb * cpus // slurm.cpus_per_node),
    )
    return Component(group, gpus, cpus, memory_mb)


def nodes(group: NodeGroup) -> range:
    return range(group.first_node, group.first_node + group.num_nodes)


def gres(slurm: Slurm, count: int) -> str:
    return f"gpu:{slurm.gpu_type}:{count}" if slurm.gpu_type else f"gpu:{count}"


def sbatch_options(hardware: Hardware, plan: StagePlan, slurm: Slurm) -> str:
    """The options of every component, ` : ` between them. The first has what holds for the whole job."""
    parts = []
    for number, one in enumerate(components(hardware, plan, slurm)):
        options = [
            f"--partition={slurm.partition if one.gpus else slurm.cpu_partition or slurm.partition}",
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
