"""Plan: which processes each stage of a run consists of, as data.

- The only place that knows the table; the launcher starts what it says, the pipeline makes one job of each stage.
- `after` names the stages whose `DONE` a stage waits for; without `stages.sft` the rl stage follows init.
- `ends`: "itself" runs to its own end; "with_stage" is a server, stopped when every "itself" process has exited with 0.
"""

from dataclasses import dataclass
from typing import Literal

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Manifest

StageName = Literal["init", "sft", "rl", "evaluate", "report"]
Role = Literal["trainer", "inference", "router", "orchestrator", "report"]


@dataclass(frozen=True)
class ProcessPlan:
    """One process: `python -m <module>` as `role` number `index`, holding `num_devices` of the hardware's accelerator."""

    role: Role
    index: int
    module: str
    num_devices: int
    ends: Literal["itself", "with_stage"]


@dataclass(frozen=True)
class StagePlan:
    """One stage: what must be done before it, and its processes (servers first)."""

    name: StageName
    after: tuple[StageName, ...]
    processes: tuple[ProcessPlan, ...]


def plan(manifest: Manifest) -> list[StagePlan]:
    """The stages of a run in order."""
    ranks = tuple(ProcessPlan("trainer", i, "orrery.trainer", 1, "itself") for i in range(manifest.trainer.mesh.world_size))
    orchestrator = ProcessPlan("orchestrator", 0, "orrery.orchestrator", 0, "itself")
    servers = _servers(manifest)
    stages = [StagePlan("init", (), ranks[:1])]
    if manifest.stages.sft is not None:
        stages.append(StagePlan("sft", ("init",), ranks))
    stages.append(StagePlan("rl", (stages[-1].name,), (*servers, orchestrator, *ranks)))
    stages.append(StagePlan("evaluate", ("rl",), (*servers, orchestrator)))
    stages.append(StagePlan("report", ("evaluate",), (ProcessPlan("report", 0, "orrery.observe.report", 0, "itself"),)))
    return stages


def stage(manifest: Manifest, name: str) -> StagePlan:
    """One stage by name; raises `OrreryError` naming the stages that the run has."""
    stages = plan(manifest)
    for one in stages:
        if one.name == name:
            return one
    raise OrreryError(f"stage {name!r}: {manifest.name} has no such stage; choose from {', '.join(s.name for s in stages)}")


def _servers(manifest: Manifest) -> tuple[ProcessPlan, ...]:
    inference = manifest.inference
    engines = tuple(
        ProcessPlan("inference", i, "orrery.inference", inference.devices_per_replica, "with_stage") for i in range(inference.num_replicas)
    )
    if inference.router.kind == "none":
        return engines
    return (*engines, ProcessPlan("router", 0, "orrery.inference.router", 0, "with_stage"))
