"""Check constraints of latent attention, engines' sparse attention, and engines' nodes."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from orrery.manifest.schema.model import EXPERT_GROUPS, MLA, Model
from orrery.manifest.schema.trainer_constraints import divisors

if TYPE_CHECKING:
    from orrery.manifest.schema.manifest import Manifest

INDEXER_BLOCK_TOKENS = 64  # block size of vLLM's indexers
CHOSEN_KEYS_BLOCK = 128  # chosen keys that FlashMLA reads at a time
MAX_CHOICE_TOKENS = 16384  # maximum context if engines send chosen keys: 2 KiB of bits per query


def latent_misfits(model: Model, mla: MLA) -> Iterator[str]:
    if model.num_kv_heads != model.num_heads:
        yield (
            f"model.num_kv_heads {model.num_kv_heads}: latent attention has a key for each of "
            f"num_heads {model.num_heads}; set it to that"
        )
    moe, indexer = model.moe, mla.indexer
    num_groups, num_kept = EXPERT_GROUPS.get(model.family, (1, 1))
    if moe and num_groups > 1 and (moe.num_experts % num_groups or moe.num_experts == num_groups):
        yield (
            f"model.moe.num_experts {moe.num_experts}: family {model.family!r} divides experts "
            f"into {num_groups} groups of at least two; set it to {2 * num_groups} or another "
            "multiple"
        )
    elif moe and moe.num_experts_per_token > moe.num_experts // num_groups * num_kept:
        yield (
            f"model.moe.num_experts_per_token {moe.num_experts_per_token}: a token uses "
            f"{num_kept} of {num_groups} groups of experts; set it to at most "
            f"{moe.num_experts // num_groups * num_kept}"
        )
    if indexer is None:
        if model.family in ("glm5", "deepseek_v32"):
            yield (
                f"model.mla.indexer null: family {model.family!r} chooses keys with it; write it, "
                "or choose family 'deepseek_v3'"
            )
        return
    if model.family == "deepseek_v32" and indexer.types is not None:
        yield (
            "model.mla.indexer.types is set: each layer of family 'deepseek_v32' has an indexer; "
            "set it to null"
        )
    if mla.rope_head_dim > indexer.head_dim:
        yield (
            f"model.mla.indexer.head_dim {indexer.head_dim} is less than mla.rope_head_dim "
            f"{mla.rope_head_dim}, which turns in it; set it to at least that"
        )
    if indexer.types is None:
        return
    if len(indexer.types) != model.num_layers or indexer.types[0] != "full":
        yield (
            f"model.mla.indexer.types has {len(indexer.types)} layers, of which the first is "
            f"{indexer.types[:1]}; name all {model.num_layers} layers, the first 'full', or set it "
            "to null"
        )


def sparse_engine_misfits(run: "Manifest") -> Iterator[str]:
    accelerator, inference, mla = run.hardware.accelerator, run.inference, run.model.mla
    if accelerator == "cpu" or mla is None or mla.indexer is None:
        return
    for field, value, only in (
        ("model.mla.kv_lora_rank", mla.kv_lora_rank, 512),
        ("model.mla.rope_head_dim", mla.rope_head_dim, 64),
        ("model.mla.indexer.head_dim", mla.indexer.head_dim, 128),
        ("inference.dtype", inference.dtype, "bfloat16"),
    ):
        if value != only:
            yield (
                f"{field} {value!r}: engines on {accelerator} have kernels of sparse attention for "
                f"{only!r} only; set it to that"
            )
    for field, value, block in (
        ("model.mla.indexer.top_k", mla.indexer.top_k, CHOSEN_KEYS_BLOCK),
        ("inference.kv_block_tokens", inference.kv_block_tokens, INDEXER_BLOCK_TOKENS),
    ):
        if value % block:
            yield (
                f"{field} {value}: sparse attention on {accelerator} reads keys in blocks of "
                f"{block}; set it to {-(-value // block) * block}"
            )


def choice_misfits(run: "Manifest") -> Iterator[str]:
    if run.trainer.indexer_choice == "own":
        return
    what = f"trainer.indexer_choice {run.trainer.indexer_choice!r}"
    off = "set trainer.indexer_choice to 'own'"
    if not run.model.num_indexers:
        yield f"{what}: family {run.model.family!r} has no indexers here; {off}"
    if not run.transport.routed_experts:
        yield f"{what}: choices travel with routes; set transport.routed_experts to true, or {off}"
    if (longest := run.inference.max_model_len_tokens) > MAX_CHOICE_TOKENS:
        yield (
            f"{what} with inference.max_model_len_tokens {longest}: a choice has a bit for each "
            f"token, for at most {MAX_CHOICE_TOKENS} tokens; {off}"
        )


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
