"""Estimate the seconds of a trainer's step, and the bytes of its collectives.

FSDP's collectives overlap with computation. Exchanges of context and expert parallelism do not.
Exposed time is not hidden by computation. Constants are fitted to profiled steps.
`benchmarks/trainer/planned.py` prints the errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from orrery.manifest.budget.activations import activation_bytes
from orrery.manifest.budget.parameters import (
    Flops,
    ParameterCounts,
    active_parameters,
    attends_sparsely,
    attention_forward,
    block_weights,
    count_parameters,
    hardware_flops,
    indexers,
    is_sparse,
)
from orrery.manifest.budget.trainer_memory import state_rooms
from orrery.manifest.devices import Rates
from orrery.manifest.schema import Model, Trainer
from orrery.manifest.schema.model import DTYPE_BYTES

SHARDING_SHARE = 2 / 3  # share of memory bandwidth that FSDP's copies reach
# Collectives slow kernels by this share, as they use bandwidth and 16 of 132 multiprocessors.
COLLECTIVES_SHARE = 0.2
LAUNCH_S = 0.7e-3  # minimum host time to launch a block's kernels for a micro-batch
IDLE_SHARE = 0.015  # idle share of a step
EAGER = 2.5  # ratio of elementwise operations' bytes: eager to compiled
FORWARD_SHARE = 0.3  # the forward pass's share of computation
BOTH_WAYS = 0.85  # each direction's share of the host link's rate if both are busy
QUEUED_SHARE = 0.5  # share of computation that hides FSDP's collectives, if cp > 1
MUON_SHARE = 0.7  # share of the dense rate that Newton-Schulz products reach
# Shares of the dense rate, from benchmarks/trainer/context_rank.json and glm5_rank.json
SPARSE_FORWARD_SHARE = 0.75
SPARSE_BACKWARD_SHARE = 0.5
INDEXER_SHARE = 0.89  # FP8 scores, and the choice of keys
# Shares of the FP8 rate and of memory bandwidth, from benchmarks/trainer/fp8_layers.json
FP8_GRADIENT_SHARE = 0.7  # weight gradients: both operands have 1 × 128 blocks
FP8_EXPERTS_SHARES = 0.9, 0.36  # of experts: (other products, weight gradients)
QUANTIZATION_SHARE = 0.6  # bandwidth share of quantizing activations by rows and columns
EXPERT_WAIT_S = 7e-3  # host's wait for counts of exchanged tokens, per MoE block and micro-batch
HOST_GRADIENTS = 2.7e9  # bytes/s of gradients from device to host with `fsdp.cpu_offload`
HOST_OPTIMIZER = 32e9  # bytes/s of the optimizer and of gradient sums on the host


@dataclass(frozen=True)
class Links:
    """Bytes per second of a device in collectives.

    `experts`: FSDP's collectives of experts. `shards`: FSDP's other collectives. `all`: exchanges
    among all ranks. `cp`, `ep`: exchanges along a mesh axis.
    """

    shards: float
    experts: float
    all: float
    cp: float
    ep: float


def links(trainer: Trainer, rates: Rates, devices_per_node: int, network: float) -> Links:
    """Return rates of collectives. `network`: a device's bytes/s between nodes."""

    def of(ranks: int) -> float:
        return rates.link_bytes if ranks <= devices_per_node else network

    mesh = trainer.mesh
    shards = experts = rates.collective_bytes
    if mesh.world_size > devices_per_node:
        shards = min(shards, devices_per_node * network)
        experts = min(experts, max(1, devices_per_node // mesh.ep) * network)
    return Links(shards, experts, of(mesh.world_size), of(mesh.cp), of(mesh.ep))


def step_s(
    model: Model,
    trainer: Trainer,
    micro_batches: int,
    lengths: Sequence[int],
    rates: Rates,
    link: Links | None = None,
    counted: ParameterCounts | None = None,
    device_bytes: int = 0,
    streams_state: bool = True,
    knows_routes: bool = False,
) -> dict[str, float]:
    """Return the seconds of a step by kind of work, and their sum as "step".

    "communication" is exposed time only. The sum excludes "communication in all".

    - `lengths`: tokens of each document of a context-parallel group.
    - `streams_state`: whether passes overlap with copies of offloaded state.
    - `knows_routes`: whether routes are known, so ranks need not wait for token counts.
    """
    link = link or Links(*2 * (rates.collective_bytes,), *3 * (rates.link_bytes,))
    mesh, counted = trainer.mesh, counted or count_parameters(model, trainer.lora)
    tokens = sum(lengths) / mesh.cp
    seconds = _computation(model, trainer, lengths, rates)
    seconds["elementwise"] += _quantization_s(model, trainer, micro_batches, tokens, rates)
    sharding = 0.0
    if trainer.needs_fsdp:
        sharding = micro_batches * _sharding_bytes(trainer, counted)
    seconds["sharding copies"] = sharding / (SHARDING_SHARE * rates.memory_bytes)
    seconds["copies"] = _offload_s(model, trainer, tokens, seconds, rates)
    if trainer.fsdp.cpu_offload:
        seconds["copies"] += _cpu_offload_s(trainer, counted, micro_batches, rates)
    computing = sum(seconds.values())
    moved = traffic(model, trainer, counted, tokens)
    in_all, exposed = _communication(trainer, moved, micro_batches, computing, link)
    hidden_share = 1 - 1 / mesh.ep_chunks  # share of tokens exchanged during experts' products
    exposed -= hidden_share * min(moved.ep / link.ep, seconds["grouped products"])
    slower = 1 + COLLECTIVES_SHARE * (in_all - exposed) / max(computing, 1e-9)
    seconds = {kind: s * (1 if kind == "copies" else slower) for kind, s in seconds.items()}
    computing_s, num_states, exchange_s = 0.0, 0.0, 0.0
    trained = sum(unit.trained for unit in counted.units) / (mesh.dp_shard * mesh.cp)
    if trained:
        computing_s, num_states, exchange_s = _optimizer_s(model, trainer, trained, rates, link)
    offloaded_s = 0.0
    if num_states and trainer.memory.optimizer_offload:
        room = 0
        if streams_state:
            rooms = state_rooms(model, trainer, micro_batches, device_bytes, counted)
            room = rooms.arriving[0]
        window = computing / micro_batches, micro_batches > 1
        num_bytes = 4 * num_states * (1 - trainer.memory.optimizer_offload_resident)
        offloaded_s = _state_copies_s(num_bytes, room, *window, rates)
    seconds["optimizer"] = computing_s + offloaded_s
    exposed += exchange_s
    busy = sum(seconds.values()) + exposed
    least = LAUNCH_S * model.num_layers * micro_batches
    idle = max(IDLE_SHARE * busy, least - busy)
    if mesh.ep > 1 and not (knows_routes and mesh.ep_backend == "torch"):
        idle += EXPERT_WAIT_S * _num_moe_blocks(model) * micro_batches
    return {
        **seconds,
        "communication": exposed,
        "idle": idle,
        "communication in all": in_all + exchange_s,
        "step": busy + idle,
    }


def _computation(
    model: Model, trainer: Trainer, lengths: Sequence[int], rates: Rates
) -> dict[str, float]:
    cp, work = trainer.mesh.cp, hardware_flops(model, trainer, lengths)
    tokens = sum(lengths) / cp
    dense_s, grouped_s = _products_s(model, trainer, work, sum(lengths), rates)
    scores = indexers(model, lengths)
    attention_s = _attention_s(model, work.attention - scores, lengths, cp, rates) / cp
    head_bytes = 4 * tokens * model.vocab_size
    elementwise = tokens * model.num_layers * _elementwise_bytes(model, trainer)
    adapters, routed = (
        tokens * each / rates.memory_bytes for each in _adapter_bytes(model, trainer)
    )
    return {
        "dense products": dense_s / cp + adapters,
        "grouped products": grouped_s / cp + routed,
        "attention": attention_s + scores / cp / (INDEXER_SHARE * rates.dense_flops),
        "lm head": work.lm_head / cp / rates.dense_flops + head_bytes / rates.memory_bytes,
        "elementwise": elementwise * (1 if trainer.compile else EAGER) / rates.memory_bytes,
    }


def _attention_s(
    model: Model, operations: float, lengths: Sequence[int], cp: int, rates: Rates
) -> float:
    if not attends_sparsely(model, lengths, cp):
        mean = sum(n * n for n in lengths) / max(1, sum(lengths))
        return operations / rates.attention_flops * (1 + rates.attention_half_tokens / max(1, mean))
    # Attention has 5 backward products per 2 forward products.
    backward = 2.5 * attention_forward(model, lengths, cp)
    forward_s = (operations - backward) / (SPARSE_FORWARD_SHARE * rates.dense_flops)
    return forward_s + backward / (SPARSE_BACKWARD_SHARE * rates.dense_flops)


def _adapter_bytes(model: Model, trainer: Trainer) -> tuple[float, float]:
    """Return the bytes per token of products with adapters: (outside experts, in experts).

    Memory bandwidth limits these products, because adapters are narrow. A forward and backward
    pass move each input and output four times, gradients included.
    """
    found = [0.0, 0.0]
    if trainer.lora is None:
        return 0.0, 0.0
    for layer in range(model.num_layers):
        for weight in block_weights(model, layer):
            if weight.part not in trainer.lora.targets:
                continue
            outputs, inputs = weight.shape[-2:]
            is_expert = weight.part == "experts"
            kept = "experts" if is_expert else "projections"
            values = 4 * (inputs + outputs)
            if trainer.memory.checkpoints(layer) and kept not in trainer.kept:
                values += inputs + 2 * outputs
            rows = model.mixture.num_experts_per_token if is_expert else 1
            found[is_expert] += rows * DTYPE_BYTES[trainer.compute_dtype] * values
    return found[0], found[1]


def _products_s(
    model: Model, trainer: Trainer, work: Flops, num_tokens: int, rates: Rates
) -> tuple[float, float]:
    dense_s, grouped_s = work.projections / rates.dense_flops, work.experts / rates.grouped_flops
    if not model.fp8 or rates.fp8_flops <= rates.dense_flops:
        return dense_s, grouped_s
    active = active_parameters(model)
    per_weight = 0 if trainer.lora is not None else 2 * num_tokens  # FLOPs of its gradient

    def fp8_s(operations: float, gradients: float, share: float, gradient_share: float) -> float:
        rest_s = (operations - gradients) / (share * rates.fp8_flops)
        return rest_s + gradients / (gradient_share * rates.fp8_flops)

    weights = [
        weight
        for layer in {0, model.num_layers - 1}
        for weight in block_weights(model, layer)
        if weight.part in ("attention", "feed_forward")
    ]
    in_fp8 = [each.size for each in weights if each.has_fp8 and each.part in model.fp8]
    share = sum(in_fp8) / sum(each.size for each in weights)
    gradients = per_weight * active.projections
    in_fp8_s = fp8_s(work.projections, gradients, 1.0, FP8_GRADIENT_SHARE)
    if "experts" in model.fp8:
        grouped_s = fp8_s(work.experts, per_weight * active.experts, *FP8_EXPERTS_SHARES)
    return share * in_fp8_s + (1 - share) * dense_s, grouped_s


def _quantization_s(
    model: Model, trainer: Trainer, micro_batches: int, tokens: float, rates: Rates
) -> float:
    """Return a rank's seconds of FP8's elementwise operations per step.

    - Products' inputs and output gradients are read, and written in FP8 by rows and columns.
    - Weights with the same input are joined. All are read, and written in FP8 in two layouts: in
      each pass with FSDP, otherwise once.
    - Weight gradients are zeroed and read in float32, and written.
    """
    c, is_trained = DTYPE_BYTES[trainer.compute_dtype], trainer.lora is None
    per_token = per_step = 0.0
    for layer in range(model.num_layers):
        again = trainer.memory.checkpoints(layer)
        for part in model.fp8 or ():
            found = [one for one in block_weights(model, layer) if one.part == part and one.has_fp8]
            if not found:
                continue
            is_expert = part == "experts"
            recomputes = again and ("experts" if is_expert else "projections") not in trainer.kept
            # All weights but the last have the same input.
            inputs = (1 + recomputes) * (found[0].shape[-1] + found[-1].shape[-1])
            rows = model.mixture.num_experts_per_token if is_expert else 1
            per_token += rows * (c + 2) * (inputs + sum(one.shape[-2] for one in found))
            size = sum(one.size for one in found) / (trainer.mesh.ep if is_expert else 1)
            joined = sum(one.size for one in found[:-1]) if len(found) > 2 else 0
            passes = micro_batches * (2 + recomputes) if trainer.needs_fsdp else 1
            per_step += passes * ((c + 2) * size + 2 * c * joined)
            per_step += micro_batches * is_trained * (8 + c) * size
    quantized_s = tokens * per_token / (QUANTIZATION_SHARE * rates.memory_bytes)
    return quantized_s + per_step / rates.memory_bytes


def _sharding_bytes(trainer: Trainer, counted: ParameterCounts) -> float:
    mesh, units = trainer.mesh, counted.units
    c, p = DTYPE_BYTES[trainer.compute_dtype], DTYPE_BYTES[trainer.param_dtype]
    r, shards = DTYPE_BYTES[trainer.reduce_dtype], mesh.dp_shard * mesh.cp
    gathers = 2 if trainer.fsdp.reshard_after_forward else 1
    whole = sum(unit.gathered(mesh.ep) for unit in units)
    trained = sum(unit.gathered_trained(mesh.ep) for unit in units)
    own = sum(unit.trained for unit in units) / shards
    return gathers * (2 * c * whole + (p + c) * own) + (c + r) * trained + (r + p) * own


def _offload_s(
    model: Model, trainer: Trainer, tokens: float, seconds: dict[str, float], rates: Rates
) -> float:
    """Return the exposed seconds of activation offload.

    The forward pass hides copies to the host. A block's backward pass hides copies of earlier
    blocks to the device. The last blocks in flight to the host stay on the device.
    """
    if not trainer.memory.activation_offload:
        return 0.0
    layers = range(model.num_layers - 1)
    kept = [activation_bytes(model, trainer, layer).kept for layer in layers]
    back = kept[: max(0, len(kept) - trainer.memory.activation_offload_max_in_flight)]
    computing = sum(seconds.values())
    backward = (1 - FORWARD_SHARE) * (computing - seconds["lm head"])
    beside_s = backward * len(back) / model.num_layers
    outward_s, inward_s = (tokens * sum(one) / rates.host_link_bytes for one in (kept, back))
    return max(0.0, outward_s - FORWARD_SHARE * computing) + max(0.0, inward_s - beside_s)


def _cpu_offload_s(
    trainer: Trainer, counted: ParameterCounts, micro_batches: int, rates: Rates
) -> float:
    shards = trainer.mesh.dp_shard * trainer.mesh.cp
    gathers, reductions = _collectives(trainer, micro_batches)
    weights = DTYPE_BYTES[trainer.param_dtype] * counted.total / shards
    trained = sum(unit.trained for unit in counted.units) / shards
    gradients = DTYPE_BYTES[trainer.reduce_dtype] * trained
    return gathers * weights / rates.host_link_bytes + reductions * gradients / HOST_GRADIENTS


def _communication(
    trainer: Trainer, moved: "Traffic", micro_batches: int, computing: float, link: Links
) -> tuple[float, float]:
    gather = moved.gather / link.shards + moved.gather_experts / link.experts
    reduction = moved.reduction / link.shards + moved.reduction_experts / link.experts
    by_micro_batch = trainer.fsdp.reduce_gradients == "micro_batch"
    exchange = moved.ep / link.ep + moved.cp / link.cp
    backward = gather if trainer.fsdp.reshard_after_forward else 0.0
    hiding = computing / micro_batches * (QUEUED_SHARE if trainer.mesh.cp > 1 else 1)
    exposed = in_all = exchange
    for number in range(micro_batches):
        reduces = by_micro_batch or number == micro_batches - 1
        out = backward + (reduction if reduces else 0.0)
        in_all += gather + out
        exposed += max(0.0, gather - FORWARD_SHARE * hiding)
        exposed += max(0.0, out - (1 - FORWARD_SHARE) * hiding)
    replicas = moved.replicas / link.all
    return in_all + replicas, exposed + replicas


def _optimizer_s(
    model: Model, trainer: Trainer, trained: float, rates: Rates, link: Links
) -> tuple[float, float, float]:
    """Return (seconds of kernels, values of optimizer state, seconds of Muon's all-to-alls).

    The numbers 24 to 60 are bytes moved per value, gradient norm and scaling included.
    """
    optimizer, shards = trainer.optimizer, trainer.mesh.dp_shard * trainer.mesh.cp
    products_s = exchanged_bytes = 0.0
    if optimizer.kind == "muon":
        values, split, operations = _block_matrices(model)
        exchanged_bytes = 2 * 2 * split / shards * (shards - 1) / shards
        in_blocks = values / shards
        rest = max(trained - in_blocks, 0.0)
        operations *= optimizer.num_newton_schulz_steps / shards
        products_s = operations / (MUON_SHARE * rates.dense_flops)
        num_bytes = in_blocks * (60 if optimizer.nesterov else 48) + rest * 40
        num_states = in_blocks + 2 * rest
    elif optimizer.kind == "adamw":
        num_bytes, num_states = trained * 40, 2 * trained
    elif optimizer.kind == "sgd":
        num_bytes = trained * (32 if optimizer.momentum else 24)
        num_states = trained if optimizer.momentum else 0.0
    else:
        num_bytes, num_states = trained * (32 if optimizer.weight_decay else 24), 0.0
    on_host = trainer.fsdp.cpu_offload
    computing_s = num_bytes / (HOST_OPTIMIZER if on_host else rates.memory_bytes) + products_s
    return computing_s, num_states, exchanged_bytes / link.all


def _state_copies_s(
    num_bytes: float, room: int, micro_batch_s: float, has_more: bool, rates: Rates
) -> float:
    """Return exposed seconds. `room`: device bytes for state copied before the optimizer step."""
    link, backward_s = rates.host_link_bytes, (1 - FORWARD_SHARE) * micro_batch_s
    early = min(num_bytes, room, backward_s * link)
    beside_s = micro_batch_s if has_more else micro_batch_s - backward_s
    return (num_bytes - early) / (BOTH_WAYS * link) + max(0.0, early / link - beside_s)


def _block_matrices(model: Model) -> tuple[int, int, float]:
    """Return (values that Muon updates, sharded values of these, FLOPs per Newton-Schulz step)."""
    values, split, operations = 0, 0, 0.0
    for layer in range(model.num_layers):
        for weight in block_weights(model, layer):
            if weight.part in ("norm", "router", "indexer"):
                continue
            m, n = sorted((weight.shape[-2] // weight.num_matrices, weight.shape[-1]))
            values += weight.size
            # An expert's matrix is on a single rank.
            split += weight.size if len(weight.shape) == 2 else 0
            operations += weight.size / (m * n) * (4 * m**2 * n + 2 * m**3)
    return values, split, operations


def _elementwise_bytes(model: Model, trainer: Trainer) -> float:
    """Return bytes moved per token and layer, in bfloat16."""
    hidden = model.hidden_size
    parts = {"norms": 2 * 2 * hidden}
    parts["attention_projections"] = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    numbers = 2 * 3 * hidden  # two residual sums
    if (moe := model.moe) is not None:
        numbers += 2 * moe.num_experts_per_token * hidden
        numbers += (moe.num_experts_per_token + 1) * hidden
        swiglu = 3 * moe.num_experts_per_token * moe.expert_intermediate_size
        parts["experts_activation"] = swiglu
    else:
        numbers += 3 * model.intermediate_size
    numbers += sum(parts.values())
    memory = trainer.memory
    modules = memory.recomputed_modules(0)
    again = sum(count for name, count in parts.items() if name in modules)
    passes = 4 if memory.recomputes_blocks else 3
    return 2.0 * (numbers * passes + again / memory.activation_checkpointing_every)


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends.

    - `gather`: one gather of weights. `reduction`: one reduction of gradients. Both omit experts.
    - `cp`, `ep`, `replicas`: a step's exchanges along a mesh axis.
    """

    gather: float
    gather_experts: float
    reduction: float
    reduction_experts: float
    cp: float
    ep: float
    replicas: float


def traffic(model: Model, trainer: Trainer, counted: ParameterCounts, tokens: float) -> Traffic:
    mesh, units = trainer.mesh, counted.units
    shards = mesh.dp_shard * mesh.cp
    c, r = DTYPE_BYTES[trainer.compute_dtype], DTYPE_BYTES[trainer.reduce_dtype]
    trained_experts = sum(unit.trained_experts for unit in units) / mesh.ep
    experts = trained_experts + sum(unit.frozen_experts for unit in units) / mesh.ep
    weights = sum(unit.gathered(mesh.ep) for unit in units) - experts
    trained = sum(unit.gathered_trained(mesh.ep) for unit in units) - trained_experts
    of_weights, of_experts = 1 - 1 / shards, 1 - mesh.ep / shards
    in_ep = in_cp = 0.0
    if mesh.ep > 1 and model.moe is not None:
        # expected number of ranks with a token's experts, if routing is uniform
        reached = mesh.ep * (1 - (1 - 1 / mesh.ep) ** model.moe.num_experts_per_token)
        rows = tokens * reached * (mesh.ep - 1) / mesh.ep
        recomputes = trainer.memory.activation_checkpointing.kind == "full"
        in_ep = (6 if recomputes else 4) * rows * model.hidden_size * c * _num_moe_blocks(model)
    if mesh.cp > 1:
        in_cp = tokens * (mesh.cp - 1) * c * _context_values(model, trainer)
    own = sum(unit.trained for unit in units) / shards
    return Traffic(
        gather=c * of_weights * weights,
        gather_experts=c * of_experts * experts,
        reduction=r * of_weights * trained,
        reduction_experts=r * of_experts * trained_experts,
        cp=in_cp,
        ep=in_ep,
        replicas=2 * r * own * (1 - 1 / mesh.dp_replicate),
    )


def step_bytes(
    model: Model,
    trainer: Trainer,
    counted: ParameterCounts,
    micro_batches: int,
    tokens: float,
    devices_per_node: int,
) -> dict[str, dict[str, float]]:
    """Return {collective: {link: bytes}} of all ranks in a step.

    "links" are inside nodes, "network" is between nodes.
    """
    one, mesh = traffic(model, trainer, counted, tokens), trainer.mesh
    shards = mesh.dp_shard * mesh.cp
    gathers, reductions = _collectives(trainer, micro_batches)

    def here(ranks: int, stride: int = 1) -> int:
        return max(1, min(ranks, devices_per_node // stride))

    def ring(num_bytes: float, ranks: int, stride: int = 1) -> tuple[float, float]:
        near = here(ranks, stride)
        return num_bytes, 0.0 if near == ranks else num_bytes / near

    def swap(num_bytes: float, ranks: int) -> tuple[float, float]:
        return num_bytes, num_bytes * (ranks - here(ranks)) / max(1, ranks - 1)

    experts = shards // mesh.ep, mesh.ep
    parts = {
        "gathers of weights": [
            ring(gathers * one.gather, shards),
            ring(gathers * one.gather_experts, *experts),
        ],
        "reductions of gradients": [
            ring(reductions * one.reduction, shards),
            ring(reductions * one.reduction_experts, *experts),
            ring(one.replicas, mesh.dp_replicate, shards),
        ],
        "context parallel": [swap(one.cp, mesh.cp)],
        "expert parallel": [swap(one.ep, mesh.ep)],
    }
    found = {}
    for name, rows in parts.items():
        if every := mesh.world_size * sum(num_bytes for num_bytes, _ in rows):
            network = mesh.world_size * sum(outside for _, outside in rows)
            found[name] = {"links": every - network, "network": network}
    return found


def _collectives(trainer: Trainer, micro_batches: int) -> tuple[int, int]:
    gathers = micro_batches * (2 if trainer.fsdp.reshard_after_forward else 1)
    reductions = micro_batches if trainer.fsdp.reduce_gradients == "micro_batch" else 1
    return gathers, reductions


def _num_moe_blocks(model: Model) -> int:
    return sum(is_sparse(model, layer) for layer in range(model.num_layers))


def _context_values(model: Model, trainer: Trainer) -> float:
    """Return the values per token that a rank sends to each other rank of its cp group."""
    if (mla := model.mla) is None:
        width = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        return 3 * width * model.num_layers / trainer.mesh.cp
    # The forward pass and recomputation send latent keys, the backward pass sends gradients.
    memory = trainer.memory
    is_kept = "attention" in trainer.kept and not memory.activation_offload
    passes = 2 if is_kept or not memory.recomputes_blocks else 3
    values = passes * model.num_layers * (mla.kv_lora_rank + mla.rope_head_dim)
    if mla.indexer is not None:
        learns = trainer.indexer == "train"
        values += (passes if learns else 1) * model.num_indexers * mla.indexer.head_dim
    return values
