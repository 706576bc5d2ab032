"""The processes of each stage of a run, as data.

- `after`: the stages whose `DONE` a stage waits for. Without `stages.sft`, rl follows init.
- `ends`: "itself" runs to its own end. "with_stage" is a server, stopped when every "itself"
  process has exited with 0.
- Nodes are numbered within the stage. Each of several nodes belongs to one group: inference (or
  prefill, then decode), then trainer. Orchestrator, router and store are on the first node.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Manifest

StageName = Literal["init", "sft", "rl", "evaluate", "report"]
Role = Literal["trainer", "inference", "kv_store", "router", "orchestrator", "report"]


@dataclass(frozen=True)
class ProcessPlan:
    """One process: `python -m <module>` as `role` number `index` on `node`."""

    role: Role
    index: int
    module: str
    num_devices: int
    ends: Literal["itself", "with_stage"]
    node: int = 0


@dataclass(frozen=True)
class NodeGroup:
    """Nodes `first_node` .. `first_node + num_nodes - 1` of a stage."""

    name: str
    first_node: int
    num_nodes: int


ONE_NODE = (NodeGroup("all", 0, 1),)


@dataclass(frozen=True)
class StagePlan:
    """One stage. `processes`: servers first."""

    name: StageName
    after: tuple[StageName, ...]
    processes: tuple[ProcessPlan, ...]
    groups: tuple[NodeGroup, ...] = ONE_NODE

    @cached_property
    def by_node(self) -> dict[int, list[ProcessPlan]]:
        found: dict[int, list[ProcessPlan]] = {}
        for process in self.processes:
            found.setdefault(process.node, []).append(process)
        return found

    @property
    def num_nodes(self) -> int:
        return sum(group.num_nodes for group in self.groups)


def plan(manifest: Manifest) -> list[StagePlan]:
    ranks = tuple(
        ProcessPlan("trainer", i, "orrery.trainer", 1, "itself")
        for i in range(manifest.trainer.mesh.world_size)
    )
    orchestrator = ProcessPlan("orchestrator", 0, "orrery.orchestrator", 0, "itself")
    servers = _servers(manifest)
    stages = [StagePlan("init", (), ranks[:1])]
    if manifest.stages.sft is not None:
        stages.append(_placed(manifest, StagePlan("sft", ("init",), ranks)))
    stages.append(
        _placed(manifest, StagePlan("rl", (stages[-1].name,), (*servers, orchestrator, *ranks)))
    )
    stages.append(_placed(manifest, StagePlan("evaluate", ("rl",), (*servers, orchestrator))))
    report = ProcessPlan("report", 0, "orrery.observe.report", 0, "itself")
    stages.append(StagePlan("report", ("evaluate",), (report,)))
    return stages


def stage(manifest: Manifest, name: str) -> StagePlan:
    """Return one stage. Raise OrreryError for an unknown name."""
    stages = plan(manifest)
    for one in stages:
        if one.name == name:
            return one
    known = ", ".join(one.name for one in stages)
    raise OrreryError(f"stage {name!r}: {manifest.name} has no such stage; choose from {known}")


def _placed(manifest: Manifest, stage: StagePlan) -> StagePlan:
    """Place the stage on its groups' nodes. By the schema groups fill nodes."""
    if manifest.hardware.num_nodes == 1:
        return stage
    per_node = manifest.hardware.devices_per_node
    roles = {process.role for process in stage.processes}
    groups: list[NodeGroup] = []
    for name, devices in manifest.group_devices.items():
        if ("trainer" if name == "trainer" else "inference") in roles:
            groups.append(
                NodeGroup(name, sum(group.num_nodes for group in groups), devices // per_node)
            )
    trainer = groups[-1].first_node

    def node(process: ProcessPlan) -> int:
        first = trainer if process.role == "trainer" else 0
        return first + process.index * process.num_devices // per_node

    return replace(
        stage,
        processes=tuple(replace(p, node=node(p)) for p in stage.processes),
        groups=tuple(groups),
    )


def _servers(manifest: Manifest) -> tuple[ProcessPlan, ...]:
    inference = manifest.inference
    engines = tuple(
        ProcessPlan("inference", i, "orrery.inference", inference.devices_per_replica, "with_stage")
        for i in range(inference.num_replicas)
    )
    if inference.kv_offload.kind == "mooncake":
        engines = (
            ProcessPlan("kv_store", 0, "orrery.inference.kv_store", 0, "with_stage"),
            *engines,
        )
    if inference.router.kind == "none":
        return engines
    return (*engines, ProcessPlan("router", 0, "orrery.inference.router", 0, "with_stage"))
