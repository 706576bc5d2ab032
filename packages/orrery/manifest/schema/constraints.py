"""Check constraints between fields.

Each function yields a sentence (field, value, rule, remedy) per broken constraint.
"""

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from orrery.manifest.devices import find_device
from orrery.manifest.schema.inference import (
    EngineShape,
    Inference,
    disk_block_bytes,
    longest_blocks,
    longest_device_bytes,
    longest_host_bytes,
    shard_widths,
)
from orrery.manifest.schema.model import FP8_BLOCK, MAX_COUNT, Model
from orrery.manifest.schema.trainer import has_state
from orrery.manifest.schema.trainer_constraints import (
    divisors,
    elastic_misfits,
    head_divisors,
    model_misfits,
    trainer_field_misfits,
    trainer_misfits,
)

if TYPE_CHECKING:
    from orrery.manifest.schema.manifest import Hardware, Manifest, Orchestrator, Tasks

TARGETS = ("init", "sft", "rl", "evaluate", "report", "all")  # names of Snakemake rules
SEGMENT_BYTES = 16 << 20  # minimum size of a Mooncake segment per device
KV_BLOCK_TOKENS = {"cpu": 32, "gpu": 16}  # `kv_block_tokens` must be a multiple of this
INDEXER_BLOCK_TOKENS = 64  # tokens in a cache block of vLLM's indexers
CHOSEN_KEYS_BLOCK = 128  # `top_k` must be a multiple of this on GPUs (FlashMLA)
MAX_CHOICE_TOKENS = 16384  # maximum context if `indexer_choice` is "replay"


def misfits(run: "Manifest") -> Iterator[str]:
    """Check all constraints. Later checks rely on earlier checks."""
    yield from model_misfits(run.model)
    yield from trainer_field_misfits(run.trainer)
    yield from _inference_misfits(run.inference)
    yield from _orchestrator_misfits(run.orchestrator)
    yield from _task_misfits(run.tasks)
    if run.name in TARGETS:
        yield (
            f"name: no run is called {run.name!r}, because a rule of the pipeline has this name; "
            f"try {'my_' + run.name!r}"
        )
    yield from _node_misfits(run)
    yield from _length_misfits(run)
    yield from _expert_misfits(run)
    yield from _sparse_engine_misfits(run)
    yield from _choice_misfits(run)
    yield from _engine_misfits(run)
    yield from _offload_misfits(run.model, run.inference, run.route_bytes)
    yield from _fp8_misfits(run)
    yield from _transport_misfits(run)
    yield from _span_misfits(run)
    yield from _prefill_misfits(run)
    yield from _group_misfits(run)
    yield from elastic_misfits(run)
    yield from _guest_misfits(run)
    mesh = run.trainer.mesh
    if found := list(
        trainer_misfits(run.trainer, run.model, run.hardware.accelerator, mesh.world_size)
    ):
        yield "; ".join(found)


def _inference_misfits(inference: Inference) -> Iterator[str]:
    router, prefill = inference.router, inference.prefill_replicas
    replicas, transfer = inference.num_replicas, inference.kv_transfer.kind
    if router.kind != "none":
        for name in ("balance_abs_threshold", "balance_rel_threshold"):
            value = getattr(router, name)
            if router.policy == "cache_aware" and value is None:
                yield (
                    f"inference.router.{name} is null: policy 'cache_aware' reads it; set it to a "
                    "number"
                )
            if router.policy != "cache_aware" and value is not None:
                yield (
                    f"inference.router.{name} {value}: policy '{router.policy}' ignores it; set "
                    "it to null, or policy to 'cache_aware'"
                )
    if (devices := inference.num_devices) > MAX_COUNT:
        yield (
            f"inference.num_replicas·data_parallel·tensor_parallel = {devices}: engines have at "
            f"most {MAX_COUNT} devices together; set them to less"
        )
    if replicas > 1 and router.kind == "none" and not prefill:
        yield (
            f"inference.num_replicas {replicas} needs a router; set inference.router.kind to "
            "'vllm_router'"
        )
    if prefill and router.kind != "none":
        yield (
            f"inference.router {router.kind!r} with prefill_replicas {prefill}: the "
            "orchestrator itself sends requests to a prefill and a decode engine; set "
            "inference.router.kind to 'none', or inference.prefill_replicas to 0"
        )
    if prefill >= replicas:
        yield (
            f"inference.prefill_replicas {prefill} of num_replicas {replicas} leave no engine to "
            f"decode; choose from 0 to {replicas - 1}"
        )
    if prefill and transfer == "none":
        yield (
            f"inference.prefill_replicas {prefill} must send caches to other engines; set "
            "inference.kv_transfer.kind to 'nixl' or 'mooncake', or inference.prefill_replicas "
            "to 0"
        )
    if not prefill and transfer != "none":
        yield (
            f"inference.kv_transfer {transfer!r} without engines that only prefill; set "
            "inference.prefill_replicas, or inference.kv_transfer.kind to 'none'"
        )
    if not prefill and inference.max_local_prefill_tokens:
        yield (
            f"inference.max_local_prefill_tokens {inference.max_local_prefill_tokens} without "
            "engines that only prefill; set it to 0, or inference.prefill_replicas to 1 or more"
        )


def _orchestrator_misfits(orchestrator: "Orchestrator") -> Iterator[str]:
    admission, group = orchestrator.admission, orchestrator.algorithm.group_size
    most, batch = admission.max_in_flight, orchestrator.rollouts_per_batch
    ahead, bound = orchestrator.max_batches_ahead, orchestrator.max_off_policy_steps
    if admission.kind == "adaptive" and admission.min_in_flight > most:
        yield (
            f"orchestrator.admission.min_in_flight {admission.min_in_flight} exceeds "
            f"max_in_flight {most}; set it to at most that"
        )
    if most < group:
        yield (
            f"orchestrator.admission.max_in_flight {most} cannot hold one group of "
            f"algorithm.group_size {group}; set it to at least that"
        )
    if ahead > bound:
        yield (
            f"orchestrator.max_batches_ahead {ahead} exceeds max_off_policy_steps {bound}: "
            f"tokens of a batch further ahead are too old; set it to at most {bound}"
        )
    if batch % group:
        yield (
            f"orchestrator.rollouts_per_batch {batch} is not a multiple of algorithm.group_size "
            f"{group}; try {batch // group * group or group}"
        )


def _task_misfits(tasks: "Tasks") -> Iterator[str]:
    for part in ("train", "evaluation"):
        names = [task.name for task in getattr(tasks, part)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield (
                f"tasks.{part}: {twice} name more than one task each; give every task another name"
            )


def _node_misfits(run: "Manifest") -> Iterator[str]:
    hardware, trainer = run.hardware, run.trainer.mesh.world_size
    engines = sum(run.group_devices.values()) - trainer
    if hardware.shared_devices:
        yield from _sharing_misfits(hardware, trainer, engines)
        return
    devices, used = hardware.devices_per_node, trainer + engines
    if hardware.accelerator == "cpu" or hardware.num_nodes > 1 or used <= devices:
        return
    ranks = devices - engines
    replicas = (devices - trainer) // run.inference.devices_per_replica
    fits = []
    if ranks > 0:
        fits.append(f"trainer.mesh's dp_replicate·dp_shard·cp to at most {ranks}")
    if replicas > run.inference.prefill_replicas:
        fits.append(f"inference.num_replicas to at most {replicas}")
    yield (
        f"trainer {trainer} + inference {engines} devices do not fit "
        f"{devices}; set {', or '.join([*fits, f'hardware.devices_per_node to {used}'])}"
    )


def _sharing_misfits(hardware: "Hardware", trainer: int, engines: int) -> Iterator[str]:
    if hardware.accelerator == "cpu" or hardware.num_nodes > 1:
        yield (
            f"hardware.shared_devices: roles share the GPUs of one node, and this run has "
            f"{hardware.num_nodes} of {hardware.accelerator}; set hardware.shared_devices to false"
        )
    most = hardware.devices_per_node
    for field, devices in (
        ("trainer.mesh's dp_replicate·dp_shard·cp", trainer),
        ("inference's devices of all replicas", engines),
    ):
        if devices > most:
            yield (
                f"{field} {devices} exceeds hardware.devices_per_node {most}, even "
                f"with hardware.shared_devices; set it to at most {most}"
            )


def _length_misfits(run: "Manifest") -> Iterator[str]:
    longest, most = run.inference.max_model_len_tokens, run.model.max_positions
    if longest > most:
        yield (
            f"inference.max_model_len_tokens {longest} exceeds model.max_positions {most}; set it "
            "to at most that (in Jsonnet context_tokens)"
        )
    if (turn := run.orchestrator.sampling.max_tokens_per_turn) >= longest:
        yield (
            f"orchestrator.sampling.max_tokens_per_turn {turn} leave no room for a prompt in "
            f"inference.max_model_len_tokens {longest}; set it to less"
        )
    if (held := run.trainer.memory.max_tokens_per_micro_batch) < longest:
        yield (
            f"trainer.memory.max_tokens_per_micro_batch {held} cannot hold one rollout of "
            f"inference.max_model_len_tokens {longest}; set it to at least that"
        )


def _expert_misfits(run: "Manifest") -> Iterator[str]:
    family, moe, inference = run.model.family, run.model.moe, run.inference
    if moe is None and run.transport.routed_experts:
        yield (
            f"transport.routed_experts: family {family!r} has no experts to choose; set "
            "transport.routed_experts to false"
        )
    if not inference.expert_parallel:
        return
    if moe is None:
        yield (
            f"inference.expert_parallel: family {family!r} has no experts to spread; set "
            "inference.expert_parallel to false"
        )
        return
    if (devices := inference.devices_per_replica) == 1:
        yield (
            "inference.expert_parallel: the only device of an engine has all experts; set "
            "inference.expert_parallel to false, or data_parallel or tensor_parallel to more"
        )
    if moe.num_experts % devices:
        yield (
            f"inference.expert_parallel: {devices} devices of a replica do not divide "
            f"{moe.num_experts} experts; choose data_parallel·tensor_parallel from "
            f"{divisors(moe.num_experts, devices)}, or set inference.expert_parallel to false"
        )


def _sparse_engine_misfits(run: "Manifest") -> Iterator[str]:
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


def _choice_misfits(run: "Manifest") -> Iterator[str]:
    if run.trainer.indexer_choice == "own":
        return
    what = f"trainer.indexer_choice {run.trainer.indexer_choice!r}"
    off = "set trainer.indexer_choice to 'own'"
    if not run.model.num_indexers:
        yield f"{what}: family {run.model.family!r} has no indexers here; {off}"
    if not run.transport.routed_experts:
        yield (
            f"{what}: choices of keys are sent with choices of experts; set "
            f"transport.routed_experts to true, or {off}"
        )
    longest = run.inference.max_model_len_tokens
    if run.trainer.indexer_choice == "replay" and longest > MAX_CHOICE_TOKENS:
        yield (
            f"{what} with inference.max_model_len_tokens {longest}: a choice has a bit for each "
            f"token, for at most {MAX_CHOICE_TOKENS} tokens; set trainer.indexer_choice to "
            "'compare', which sends samples, or to 'own'"
        )


def _span_misfits(run: "Manifest") -> Iterator[str]:
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


def _group_misfits(run: "Manifest") -> Iterator[str]:
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


def _engine_misfits(run: "Manifest") -> Iterator[str]:
    model, inference, accelerator = run.model, run.inference, run.hardware.accelerator
    if inference.tensor_parallel not in (heads := head_divisors(model)):
        yield (
            f"inference.tensor_parallel {inference.tensor_parallel}: {model.num_heads} query "
            f"heads and {model.num_kv_heads} key heads do not divide among as many devices; "
            f"choose from {heads}"
        )
    for field, width, by, devices in shard_widths(model, inference):
        if width % devices:
            fits, more = divisors(width, devices), ""
            if by == "tensor_parallel":
                fits = [n for n in fits if n in heads]
            else:
                more = ", or set inference.expert_parallel to true"
            yield (
                f"inference.{by} {devices}: {field} {width} does not divide among as many "
                f"devices; choose {by} from {fits}{more}"
            )
    if (block := inference.kv_block_tokens) % (
        least := KV_BLOCK_TOKENS["cpu" if accelerator == "cpu" else "gpu"]
    ):
        yield (
            f"inference.kv_block_tokens {block}: attention on {accelerator} reads blocks of a "
            f"multiple of {least} tokens; try {-(-block // least) * least}"
        )
    if inference.max_batched_tokens < inference.max_num_sequences:
        yield (
            f"inference.max_batched_tokens {inference.max_batched_tokens} cannot hold one token "
            f"of each of inference.max_num_sequences {inference.max_num_sequences}; set it to at "
            "least that"
        )
    needed = longest_device_bytes(model, inference)
    if inference.kv_cache_bytes < needed:
        yield _cannot_hold("kv_cache_bytes", inference.kv_cache_bytes, inference, needed)
    device = find_device(accelerator)
    if device is not None and inference.kv_cache_bytes >= device.memory_bytes:
        yield (
            f"inference.kv_cache_bytes {inference.kv_cache_bytes}: one {accelerator} has "
            f"{device.memory_bytes} bytes, and weights need a part of them. "
            "Set it to less"
        )


def _cannot_hold(field: str, held: int, inference: Inference, needed: int) -> str:
    return (
        f"inference.{field} {held} cannot hold one rollout of inference.max_model_len_tokens "
        f"{inference.max_model_len_tokens}, which needs {needed}; set it to at least that"
    )


def _offload_misfits(model: Model, inference: Inference, route_bytes: int) -> Iterator[str]:
    offload, longest = inference.kv_offload, longest_host_bytes(model, inference)
    if offload.kind == "tiers":
        host, disk = offload.host_bytes, offload.disk_bytes
        if host < longest:
            told = _cannot_hold("kv_offload.host_bytes", host, inference, longest)
            yield f"{told}, or inference.kv_offload.kind to 'none'"
        files = longest_blocks(inference) * sum(disk_block_bytes(model, inference, route_bytes))
        if 0 < disk < files:
            told = _cannot_hold("kv_offload.disk_bytes", disk, inference, files)
            yield f"{told}, or to 0 for no files"
    if offload.kind == "mooncake":
        devices = inference.devices_per_replica
        if offload.segment_bytes < (needed := max(SEGMENT_BYTES * devices, longest)):
            yield (
                f"inference.kv_offload.segment_bytes {offload.segment_bytes}: Mooncake takes at "
                f"least {SEGMENT_BYTES} of each of an engine's {devices} devices, and one rollout "
                f"of inference.max_model_len_tokens {inference.max_model_len_tokens} needs "
                f"{longest}; set it to at least {needed}, or inference.kv_offload.kind to 'none'"
            )


def _fp8_misfits(run: "Manifest") -> Iterator[str]:
    """Check FP8. Weight updates do not fill vLLM's padding, so experts need whole blocks."""
    model, moe, inference = run.model, run.model.moe, run.inference
    accelerator = run.hardware.accelerator
    if inference.quantization != "fp8":
        if model.fp8 is not None:
            yield (
                f"model.fp8 {list(model.fp8)} with inference.quantization "
                f"{inference.quantization!r}: engines would sample from other products than the "
                "trainer's; set inference.quantization to 'fp8', or model.fp8 to null"
            )
        return
    if accelerator == "cpu" or inference.dtype != "bfloat16":
        yield (
            f"inference.quantization 'fp8' with dtype {inference.dtype!r} on {accelerator}: vLLM "
            "makes FP8 weights from bfloat16, and multiplies them on GPUs alone; set "
            "inference.quantization to 'none'"
        )
    if moe is not None:
        width = moe.expert_intermediate_size
        for field, size in (
            ("model.hidden_size", model.hidden_size),
            ("model.moe.expert_intermediate_size", width),
        ):
            if size % FP8_BLOCK:
                yield (
                    f"inference.quantization 'fp8' with {field} {size}: experts in FP8 are blocks "
                    f"of {FP8_BLOCK} × {FP8_BLOCK}, and {size} is no multiple of {FP8_BLOCK}; set "
                    "inference.quantization to 'none'"
                )
        devices = 1 if inference.expert_parallel else inference.devices_per_replica
        if width % (FP8_BLOCK * devices):
            yield (
                "inference.quantization 'fp8' with inference.expert_parallel false: "
                f"model.moe.expert_intermediate_size {width} over data_parallel·tensor_parallel = "
                f"{devices} devices is no multiple of {FP8_BLOCK}, the width of a block in FP8; "
                "set inference.expert_parallel to true"
            )
    for field, size, devices in _fp8_inputs(model, inference):
        if size % (FP8_BLOCK * devices):
            over = f" over inference.tensor_parallel {devices}" if devices > 1 else ""
            yield (
                f"inference.quantization 'fp8' with {field} {size}{over}: a layer in FP8 takes "
                f"inputs of a multiple of {FP8_BLOCK} on each device; set inference.quantization "
                f"to 'none'{', or inference.tensor_parallel to less' if over else ''}"
            )


def _fp8_inputs(model: Model, inference: Inference) -> Iterator[tuple[str, int, int]]:
    """Yield (field, width, number of shards) for each input of dense layers."""
    yield "model.hidden_size", model.hidden_size, 1
    if model.family != "hugging_face":
        field, size = "head_dim", model.head_dim
        if model.mla is not None:
            field, size = "mla.value_head_dim", model.mla.value_head_dim
        yield f"model.num_heads·{field}", model.num_heads * size, inference.tensor_parallel
    for field, width, by, devices in shard_widths(model, inference):
        if by == "tensor_parallel":
            yield field, width, devices


def _transport_misfits(run: "Manifest") -> Iterator[str]:
    trainer, sft = run.trainer, run.stages.sft
    kinds = {
        "transport.weights": run.transport.weights,
        "inference.kv_transfer.kind": run.inference.kv_transfer.kind,
        "inference.kv_offload.kind": run.inference.kv_offload.kind,
    }
    nixl, mooncake = (
        [field for field, kind in kinds.items() if kind == library]
        for library in ("nixl", "mooncake")
    )
    if nixl and mooncake:  # two copies of rdma-core crash engines at exit
        yield (
            f"{nixl[0]} 'nixl' with {mooncake[0]} 'mooncake': no engine can load both, because "
            "each has its own copy of rdma-core; set one of them to another kind"
        )
    if run.transport.weights == "adapters" and trainer.lora is None:
        yield (
            "transport.weights 'adapters': the trainer has no adapters; set trainer.lora, or "
            "transport.weights to 'files'"
        )
    used = [trainer.optimizer, *([] if sft is None else [sft.optimizer])]
    if (share := trainer.memory.optimizer_offload_resident) and "muon" in [
        one.kind for one in used
    ]:
        yield (
            f"trainer.memory.optimizer_offload_resident {share:g} with optimizer 'muon': its state "
            "is offloaded whole; set it to 0"
        )
    if trainer.memory.optimizer_offload and not any(map(has_state, used)):
        kinds_used = " and ".join(sorted({one.kind for one in used}))
        yield (
            f"trainer.memory.optimizer_offload: no state to offload ({kinds_used}); set "
            "trainer.memory.optimizer_offload to false"
        )


def _prefill_misfits(run: "Manifest") -> Iterator[str]:
    inference = run.inference
    if inference.prefill is None:
        return
    if not inference.prefill_replicas:
        yield (
            "inference.prefill: no engine only prefills; set inference.prefill_replicas to 1 or "
            "more, or inference.prefill to null"
        )
    shaped = inference.of_engine(0).model_copy(update={"prefill": None})
    one = run.model_copy(update={"inference": shaped})
    if shaped.kv_transfer.kind == "nixl" and run.model.mla is None:
        tensor, others = shaped.tensor_parallel, inference.tensor_parallel
        if max(tensor, others) % min(tensor, others):
            yield (
                f"inference.prefill.tensor_parallel {tensor} and inference.tensor_parallel "
                f"{others}: NIXL reads whole shares of heads; set one to a multiple of the other"
            )
    fields = re.compile(rf"\binference\.(?={'|'.join(EngineShape.model_fields)})")
    for check in (_expert_misfits, _engine_misfits, _fp8_misfits, _span_misfits):
        for sentence in check(one):
            yield fields.sub("inference.prefill.", sentence)


def _guest_misfits(run: "Manifest") -> Iterator[str]:
    guests = run.orchestrator.guests
    if guests is None:
        return
    most = run.orchestrator.max_off_policy_steps
    if guests.max_versions_behind > most:
        yield (
            f"orchestrator.guests.max_versions_behind {guests.max_versions_behind} exceeds "
            f"max_off_policy_steps {most}; set it to at most that"
        )
    for field, found, wanted in (
        ("transport.weights", run.transport.weights, "files"),
        ("transport.routed_experts", run.transport.routed_experts, False),
        ("inference.prefill_replicas", run.inference.prefill_replicas, 0),
        ("inference.nodes_per_replica", run.inference.nodes_per_replica, 1),
        ("hardware.num_nodes", run.hardware.num_nodes, 1),
        ("trainer.elastic", run.trainer.elastic, None),
    ):
        if found != wanted:
            yield (
                f"{field} with orchestrator.guests: engines of other sites need "
                f"{json.dumps(wanted)}; set it to that, or orchestrator.guests to null"
            )
