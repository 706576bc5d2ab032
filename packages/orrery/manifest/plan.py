"""List the processes of each stage, and check whether Orrery can start them.

A process with `ends` "itself" exits after its work. A "with_stage" process is a server, stopped
once all "itself" processes have exited with 0.

With several nodes, node groups are, in order: inference (or prefill, decode), trainer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from orrery.manifest.budget.options import memory_doubts, memory_misfits
from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Inference, Manifest

WEIGHT_WIRES = ("files", "adapters", "nccl", "nixl")
SERVED_RANK = 512  # vLLM's largest adapter rank
ROUTED_EXPERTS = (False, True)
QUANTIZATIONS = ("none", "fp8")
KV_TRANSFERS = ("none", "nixl", "mooncake")
ADMISSIONS = ("fixed", "adaptive")

StageName = Literal["init", "sft", "rl", "evaluate", "report"]
Role = Literal["trainer", "inference", "headless", "kv_store", "router", "orchestrator", "report"]
ENGINE_ROLES = ("inference", "headless")


@dataclass(frozen=True)
class ProcessPlan:
    """A process `python -m <module>`. `index`: number within its role.

    A "headless" process serves the multi-node engine `engine` on its node number `part` > 0.
    """

    role: Role
    index: int
    module: str
    num_devices: int
    ends: Literal["itself", "with_stage"]
    node: int = 0
    first_device: int = 0
    engine: int = 0
    part: int = 0

    @property
    def whole(self) -> str:
        """Return the name shared by processes that must restart together."""
        return (
            f"inference.{self.engine}" if self.role == "headless" else f"{self.role}.{self.index}"
        )


@dataclass(frozen=True)
class NodeGroup:
    name: str
    first_node: int
    num_nodes: int


ONE_NODE = (NodeGroup("all", 0, 1),)


@dataclass(frozen=True)
class StagePlan:
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
    return [on_devices(one, manifest.hardware.shared_devices) for one in _stages(manifest)]


def on_devices(stage: StagePlan, shared: bool) -> StagePlan:
    """Assign devices to a node's processes, in order. If `shared`, each role starts at device 0."""
    used: dict[object, int] = {}
    placed = []
    for process in stage.processes:
        owner = (process.node, process.role if shared else "")
        placed.append(replace(process, first_device=used.get(owner, 0)))
        used[owner] = used.get(owner, 0) + process.num_devices
    return replace(stage, processes=tuple(placed))


def _stages(manifest: Manifest) -> list[StagePlan]:
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
    stages = plan(manifest)
    for one in stages:
        if one.name == name:
            return one
    known = ", ".join(one.name for one in stages)
    raise OrreryError(f"stage {name!r}: {manifest.name} has no such stage. Choose from {known}")


def _placed(manifest: Manifest, stage: StagePlan) -> StagePlan:
    """Assign processes to nodes. The schema ensures that groups fill whole nodes."""
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
        if process.role != "trainer":
            return process.node
        return trainer + process.index // per_node

    return replace(
        stage,
        processes=tuple(replace(p, node=node(p)) for p in stage.processes),
        groups=tuple(groups),
    )


def _servers(manifest: Manifest) -> tuple[ProcessPlan, ...]:
    inference = manifest.inference
    engines = tuple(_engines(manifest))
    if inference.kv_offload.kind == "mooncake":
        engines = (
            ProcessPlan("kv_store", 0, "orrery.inference.kv_store", 0, "with_stage"),
            *engines,
        )
    if inference.router.kind == "none":
        return engines
    return (*engines, ProcessPlan("router", 0, "orrery.inference.router", 0, "with_stage"))


def _engines(manifest: Manifest) -> Iterator[ProcessPlan]:
    hardware = manifest.hardware
    device, num_headless = 0, 0
    for engine in range(manifest.inference.num_replicas):
        shape = manifest.inference.of_engine(engine)
        num_devices = shape.ranks_per_node * shape.tensor_parallel
        for part in range(shape.nodes_per_replica):
            node = device // hardware.devices_per_node if hardware.num_nodes > 1 else 0
            head = ProcessPlan(
                "inference", engine, "orrery.inference", num_devices, "with_stage", node
            )
            if part:
                yield replace(
                    head, role="headless", index=num_headless, module="orrery.inference.headless",
                    engine=engine, part=part,
                )  # fmt: skip
                num_headless += 1
            else:
                yield head
            device += num_devices


def check_supported(manifest: Manifest, stage: StagePlan | None = None) -> None:
    if stage is not None:
        _check_sparse_attention(manifest, stage)
    check_built(manifest)
    if found := list(memory_misfits(manifest)):
        raise OrreryError("; ".join(found))


def _check_sparse_attention(manifest: Manifest, stage: StagePlan) -> None:
    model, accelerator = manifest.model, manifest.hardware.accelerator
    if accelerator != "cpu" or model.mla is None or model.mla.indexer is None:
        return
    if any(process.role == "inference" for process in stage.processes):
        raise OrreryError(
            f"model.family {model.family!r} on cpu: vLLM has sparse attention only on GPUs. Run "
            "the stages init and sft here, or choose a hardware axis with GPUs"
        )


def check_built(manifest: Manifest) -> None:
    """Raise OrreryError if the run needs a feature that Orrery lacks."""
    accelerator, inference = manifest.hardware.accelerator, manifest.inference
    if accelerator == "cpu":
        for shape in (inference, inference.of_engine(0)):
            check_cpu_shape(shape)
    _check_adapters(manifest)
    if inference.prefill_replicas and inference.kv_offload.kind == "mooncake":
        raise OrreryError(
            "inference.kv_offload.kind 'mooncake': prefill engines send caches to decode engines, "
            "not to a store. Set inference.kv_offload.kind to 'tiers' or 'none', or "
            "inference.prefill_replicas to 0"
        )
    if manifest.transport.routed_experts and inference.kv_offload.kind == "mooncake":
        raise OrreryError(
            "inference.kv_offload.kind 'mooncake': the store does not keep the engines' choice of "
            "experts. Set inference.kv_offload.kind to 'tiers' or 'none', or "
            "transport.routed_experts to false"
        )
    most = max(inference.data_parallel, inference.of_engine(0).data_parallel)
    if inference.kv_transfer.kind == "mooncake" and most > 1:
        raise OrreryError(
            f"inference.kv_transfer.kind 'mooncake' with data_parallel {most}: it moves caches of "
            "a single rank. Set inference.kv_transfer.kind to 'nixl', or data_parallel to 1"
        )
    choices = (
        ("transport.weights", manifest.transport.weights, WEIGHT_WIRES),
        ("transport.routed_experts", manifest.transport.routed_experts, ROUTED_EXPERTS),
        ("inference.quantization", inference.quantization, QUANTIZATIONS),
        ("inference.kv_transfer.kind", inference.kv_transfer.kind, KV_TRANSFERS),
        ("orchestrator.admission.kind", manifest.orchestrator.admission.kind, ADMISSIONS),
    )
    for field, value, built in choices:
        if value not in built:
            raise OrreryError(
                f"{field} {value!r}: this is not built yet. Choose from "
                f"{', '.join(map(repr, built))}"
            )


def check_cpu_shape(inference: Inference) -> None:
    tensor, data = inference.tensor_parallel, inference.data_parallel
    if tensor > 1 or (data > 1 and not inference.expert_parallel):
        raise OrreryError(
            f"inference.data_parallel·tensor_parallel = {data * tensor} on cpu: an engine has one "
            "process, or several data-parallel ranks of a mixture of experts. Set tensor_parallel "
            "to 1, and inference.expert_parallel to true or data_parallel to 1. For as many "
            f"engines, set inference.num_replicas to {data * tensor}"
        )


def refusal(manifest: Manifest) -> str | None:
    try:
        check_supported(manifest)
    except OrreryError as error:
        return f"it cannot start: {error}"
    return None


def notes(manifest: Manifest) -> list[str]:
    told = refusal(manifest)
    said = [] if told is None else [f"  note: {told}"]
    if told is not None:
        more = (text for text in memory_misfits(manifest) if text not in told)
        said += [f"  note: it does not fit either: {text}" for text in more]
    else:
        said += [f"  note: {text}" for text in memory_doubts(manifest)]
    trainer = manifest.trainer
    keep = trainer.kept
    if set(keep) == {"experts"} and manifest.model.moe is None:
        said.append(
            "  note: trainer.memory.activation_checkpointing.keep ['experts']: family "
            f"{manifest.model.family!r} has no experts, so a whole block is recomputed; set it "
            "to ['attention'] or ['attention', 'projections'], or activation_checkpointing.kind "
            "to 'full'"
        )
    if trainer.compile and manifest.model.family == "hugging_face":
        said.append(
            "  note: trainer.compile with family 'hugging_face': the first step ends the run "
            "if torch cannot compile its blocks into one graph (experts, Mamba); set "
            "trainer.compile to false for such a model"
        )
    shapes = [manifest.inference, manifest.inference.of_engine(0)]
    named = {
        "inference.all2all_backend": any("deepep" in one.all2all_backend for one in shapes),
        "trainer.mesh.ep_backend": trainer.mesh.ep_backend == "deepep",
    }
    said += [
        f"  note: {field}: the images hold no DeepEP; containers/README.md has untried steps that "
        "build it"
        for field, is_deepep in named.items()
        if is_deepep
    ]
    if manifest.model.init.kind == "pretrained" and not manifest.model.init.sha256.strip("0"):
        said.append(
            "  note: model.init.sha256 has only zeros, so stage init refuses all weights; type "
            "`orrery fetch model NAME`, and import the model axis that it writes"
        )
    has_file = any(use.kind == "dataset" for use in manifest.tasks.train)
    if has_file and manifest.model.init.kind == "random" and manifest.stages.sft is None:
        said.append(
            "  note: model.init 'random' and stages.sft null: RL on a file of problems starts from "
            "random weights, which earn no reward; take the model axis that `orrery fetch model` "
            "writes, or a warm start"
        )
    return said


def _check_adapters(manifest: Manifest) -> None:
    lora, wire = manifest.trainer.lora, manifest.transport.weights
    if lora is None or wire != "adapters":
        return
    if "experts" in lora.targets:
        raise OrreryError(
            f"transport.weights 'adapters' with trainer.lora.targets {list(lora.targets)}: engines "
            "take no adapters of experts. Leave experts out, or set transport.weights to 'nccl' or "
            "'files', which merge adapters"
        )
    if lora.rank > SERVED_RANK:
        raise OrreryError(
            f"transport.weights 'adapters' with trainer.lora.rank {lora.rank}: engines take at "
            f"most rank {SERVED_RANK}. Lower the rank, or set transport.weights to 'nccl' or "
            "'files', which merge adapters"
        )
    if manifest.inference.quantization != "none":
        raise OrreryError(
            "transport.weights 'adapters' with inference.quantization "
            f"{manifest.inference.quantization!r}: adapters with quantized weights are untested. "
            "Set inference.quantization to 'none', or transport.weights to 'nccl' or 'files', "
            "which merge adapters"
        )
