"""Check constraints of multi-node engines, and that roles fill whole nodes."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from orrery.manifest.schema.trainer_constraints import divisors

if TYPE_CHECKING:
    from orrery.manifest.schema.manifest import Manifest


def span_misfits(run: "Manifest") -> Iterator[str]:
    num_nodes, per_node = run.hardware.num_nodes, run.hardware.devices_per_node
    inference = run.inference
    backend, plain = inference.all2all_backend, "allgather_reducescatter"
    is_exchanging = inference.expert_parallel and inference.data_parallel > 1
    if backend != plain and (run.hardware.accelerator == "cpu" or not is_exchanging):
        yield (
            f"inference.all2all_backend {backend!r}: DeepEP exchanges tokens between GPUs of "
            "data-parallel ranks that share experts; set expert_parallel and data_parallel, or "
            f"inference.all2all_backend to {plain!r}"
        )
    if inference.dual_batch_overlap and backend == plain:
        yield (
            f"inference.dual_batch_overlap: vLLM overlaps no exchange of {plain!r}; set "
            "inference.all2all_backend to 'deepep_high_throughput' or 'deepep_low_latency', or "
            "inference.dual_batch_overlap to false"
        )
    if (nodes := inference.nodes_per_replica) > 1:
        if inference.data_parallel % nodes:
            yield (
                f"inference.nodes_per_replica {nodes} does not divide data_parallel "
                f"{inference.data_parallel}; each node has equally many data-parallel ranks, so "
                f"choose from {divisors(inference.data_parallel)}"
            )
        if not inference.expert_parallel:
            yield (
                f"inference.nodes_per_replica {nodes}: only experts span nodes; set "
                "inference.expert_parallel to true, or inference.nodes_per_replica to 1 and "
                "inference.num_replicas to more"
            )
    devices, nodes_each = run.inference.devices_per_replica, run.inference.nodes_per_replica
    if num_nodes == 1:
        if nodes_each > 1 and run.hardware.accelerator != "cpu":
            yield (
                f"inference.nodes_per_replica {nodes_each} with hardware.num_nodes 1: an engine "
                "has no more nodes than the run; set inference.nodes_per_replica to 1"
            )
        return
    if nodes_each == 1 and per_node % devices:
        yield (
            f"inference.data_parallel·tensor_parallel = {devices} does not divide "
            f"hardware.devices_per_node {per_node}; choose from {divisors(per_node)}, or set "
            f"inference.nodes_per_replica to {-(-devices // per_node)} for an engine over nodes"
        )
    if nodes_each > 1 and devices != nodes_each * per_node:
        yield (
            f"inference.data_parallel·tensor_parallel = {devices} on {nodes_each} nodes: "
            f"an engine fills its nodes of {per_node} devices; set inference.data_parallel to "
            f"{max(1, nodes_each * per_node // run.inference.tensor_parallel)}"
        )


def group_misfits(run: "Manifest") -> Iterator[str]:
    num_nodes, per_node = run.hardware.num_nodes, run.hardware.devices_per_node
    if num_nodes == 1:
        return
    groups = run.group_devices
    left = num_nodes * per_node - sum(groups.values()) + groups["trainer"]
    for name, devices in groups.items():
        if devices % per_node:
            whole = devices // per_node * per_node or per_node
            if name == "trainer" and left > 0:
                whole = left
            yield (
                f"hardware.devices_per_node {per_node}: {name} has {devices} devices, which fill "
                f"no whole number of nodes; try {whole}"
            )
    nodes = {name: devices // per_node for name, devices in groups.items()}
    if (needed := sum(nodes.values())) != num_nodes:
        shares = " + ".join(f"{name} {count}" for name, count in nodes.items())
        yield (
            f"hardware.num_nodes {num_nodes}: {shares} nodes are {needed}; set hardware.num_nodes "
            f"to {needed}"
            + (f", or trainer.mesh's dp_replicate·dp_shard·cp to {left}" if left > 0 else "")
        )
