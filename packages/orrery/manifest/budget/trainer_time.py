"""Estimate the seconds of a trainer's step from operations, bytes and a device's rates.

Elementwise work is assumed to be fused, and communication to hide behind computation.
"""

from collections.abc import Sequence

from orrery.manifest.budget.flops import hardware_flops
from orrery.manifest.budget.parameters import block_weights, count_parameters
from orrery.manifest.devices import Measured
from orrery.manifest.schema import Model, Trainer
from orrery.manifest.schema.model import DTYPE_BYTES


def least_step_s(
    model: Model, trainer: Trainer, micro_batches: int, lengths: Sequence[int], rates: Measured
) -> dict[str, float]:
    """Return the least seconds of a step, for each kind of work and in total.

    `lengths`: the lengths of a cp group's documents in all micro-batches. Raise OrreryError for a
    network of transformers.
    """
    mesh = trainer.mesh
    work = hardware_flops(model, trainer, lengths)
    tokens = sum(lengths) / mesh.cp
    head_bytes = tokens * model.vocab_size * 22
    elementwise_bytes = tokens * model.num_layers * _elementwise_bytes(model, trainer)
    seconds = {
        "dense products": work.projections / mesh.cp / rates.dense_flops,
        "grouped products": work.experts / mesh.cp / rates.grouped_flops,
        "attention": work.attention / mesh.cp / rates.attention_flops,
        "lm head": work.lm_head / mesh.cp / rates.dense_flops + head_bytes / rates.memory_bytes,
        "elementwise": elementwise_bytes / rates.memory_bytes,
    }
    computation = sum(seconds.values())
    units = count_parameters(model, None).units
    experts = float(sum(unit.trained_experts for unit in units))
    rest = sum(unit.trained for unit in units) - experts
    shards = mesh.dp_shard * mesh.cp
    trained = (experts + rest) / shards if trainer.lora is None else 0.0
    computing_s, offloaded_s, exchange_s = 0.0, 0.0, 0.0
    if trained:
        computing_s, offloaded_s, exchange_s = _optimizer_s(model, trainer, trained, rates)
    seconds["optimizer"] = max(computing_s, offloaded_s)
    # Exposed copies of offloaded states hide Muon's all-to-alls.
    exposed_s = max(computing_s + exchange_s, offloaded_s) - seconds["optimizer"]
    communication = (
        _communication_bytes(model, trainer, micro_batches, tokens, experts, rest)
        / rates.link_bytes
    )
    return {
        **seconds,
        "communication in all": communication + exchange_s,
        "communication": max(0.0, communication - computation) + exposed_s,
        "step": max(computation, communication) + seconds["optimizer"] + exposed_s,
    }


def _communication_bytes(
    model: Model,
    trainer: Trainer,
    micro_batches: int,
    tokens: float,
    experts: float,
    rest: float,
) -> float:
    """Return the bytes that one device exchanges in a step, without Muon's all-to-alls."""
    mesh = trainer.mesh
    shards = mesh.dp_shard * mesh.cp
    from_others = (experts / mesh.ep + rest) * (shards - 1) / shards
    gathers = (2 if trainer.fsdp.reshard_after_forward else 1) * micro_batches
    total = gathers * DTYPE_BYTES[trainer.compute_dtype] * from_others
    if trainer.lora is None:
        by_micro_batch = trainer.fsdp.reduce_gradients == "micro_batch"
        reductions = micro_batches if by_micro_batch else 1
        total += reductions * DTYPE_BYTES[trainer.reduce_dtype] * from_others
    if mesh.ep > 1 and model.moe is not None:
        # Includes the recomputation.
        rows = tokens * model.moe.num_experts_per_token * (mesh.ep - 1) / mesh.ep
        passes = 4 + (2 if trainer.memory.activation_checkpointing.kind == "full" else 0)
        total += passes * rows * model.hidden_size * 2 * model.num_layers
    if mesh.cp > 1:
        width = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        total += 3 * tokens * width * 2 * model.num_layers * (mesh.cp - 1) / mesh.cp
    return total


def _optimizer_s(
    model: Model, trainer: Trainer, trained: float, rates: Measured
) -> tuple[float, float, float]:
    """Return the seconds of (kernels, copies of offloaded states, Muon's all-to-alls).

    `trained`: float32 values on this device. Bytes per value, including the gradient's norm and
    scale: AdamW 40, SGD 24 (32 with momentum), sign SGD 24 (32 with decay), Muon 48 (60 with
    Nesterov). For an m×n matrix with m ≤ n, an iteration of Muon takes 4·m²·n + 2·m³ operations.
    """
    optimizer, shards = trainer.optimizer, trainer.mesh.dp_shard * trainer.mesh.cp
    products_s = exchanged_bytes = 0.0
    if optimizer.kind == "muon":
        values, split, operations = _block_matrices(model)
        exchanged_bytes = 2 * 2 * split / shards * (shards - 1) / shards
        in_blocks = values / shards
        rest = max(trained - in_blocks, 0.0)
        products_s = optimizer.num_newton_schulz_steps * operations / shards / rates.dense_flops
        num_bytes = in_blocks * (60 if optimizer.nesterov else 48) + rest * 40
        num_states = in_blocks + 2 * rest
    elif optimizer.kind == "adamw":
        num_bytes, num_states = trained * 40, 2 * trained
    elif optimizer.kind == "sgd":
        num_bytes = trained * (32 if optimizer.momentum else 24)
        num_states = trained if optimizer.momentum else 0.0
    else:
        num_bytes, num_states = trained * (32 if optimizer.weight_decay else 24), 0.0
    offloaded_s = 0.0
    if trainer.memory.optimizer_offload:
        offloaded_s = 4 * num_states / rates.host_link_bytes
    computing_s = num_bytes / rates.memory_bytes + products_s
    return computing_s, offloaded_s, exchanged_bytes / rates.link_bytes


def _block_matrices(model: Model) -> tuple[int, int, float]:
    """Return Muon's (values, values in sharded matrices, operations per iteration)."""
    values, split, operations = 0, 0, 0.0
    for layer in range(model.num_layers):
        for weight in block_weights(model, layer):
            if weight.part in ("norm", "router", "indexer"):
                continue
            m, n = sorted((weight.shape[-2] // weight.num_matrices, weight.shape[-1]))
            values += weight.size
            # a stack is divided between whole matrices
            split += weight.size if len(weight.shape) == 2 else 0
            operations += weight.size / (m * n) * (4 * m**2 * n + 2 * m**3)
    return values, split, operations


def _elementwise_bytes(model: Model, trainer: Trainer) -> float:
    """Return the bytes that elementwise operations move per token and layer, in bfloat16.

    Each number moves once forward, twice backward, and once more if recomputed.
    """
    hidden = model.hidden_size
    numbers = 2 * 2 * hidden + 2 * 3 * hidden  # two norms, two residual sums
    # Head norms and rotary embedding, fused.
    numbers += 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    if (moe := model.moe) is not None:
        numbers += 2 * moe.num_experts_per_token * hidden
        numbers += (moe.num_experts_per_token + 1) * hidden
        numbers += 3 * moe.num_experts_per_token * moe.expert_intermediate_size  # SwiGLU
    else:
        numbers += 3 * model.intermediate_size
    passes = 3 if trainer.memory.activation_checkpointing.kind == "none" else 4
    return 2.0 * numbers * passes
