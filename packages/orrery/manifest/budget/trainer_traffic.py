"""Count the bytes of the trainer's collectives inside and between nodes."""

from dataclasses import dataclass

from orrery.manifest.budget.parameters import ParameterCounts, is_sparse
from orrery.manifest.schema import Model, Trainer
from orrery.manifest.schema.model import DTYPE_BYTES


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends.

    - `gather`: one FSDP all-gather of all weights except experts.
    - `reduction`: one FSDP reduce-scatter of all gradients except experts'.
    - `cp`, `ep`: exchanges of context or expert parallelism in one step.
    - `replicas`: all-reduce of gradients over replicas in one step.
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
        layers = sum(is_sparse(model, layer) for layer in range(model.num_layers))
        # Expected number of ranks that hold a token's experts, if routing is uniform.
        reached = mesh.ep * (1 - (1 - 1 / mesh.ep) ** model.moe.num_experts_per_token)
        rows = tokens * reached * (mesh.ep - 1) / mesh.ep
        recomputes = trainer.memory.activation_checkpointing.kind == "full"
        in_ep = (6 if recomputes else 4) * rows * model.hidden_size * c * layers
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
    """Return {collective: {link: bytes}}, the bytes that all ranks send in a step.

    The link "links" is inside nodes, "network" between nodes.
    """
    one, mesh = traffic(model, trainer, counted, tokens), trainer.mesh
    shards = mesh.dp_shard * mesh.cp
    gathers = micro_batches * (2 if trainer.fsdp.reshard_after_forward else 1)
    by_micro_batch = trainer.fsdp.reduce_gradients == "micro_batch"
    reductions = micro_batches if by_micro_batch else 1

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


def _context_values(model: Model, trainer: Trainer) -> float:
    """Return the number of values that a rank sends per token to each of the other cp ranks."""
    if (mla := model.mla) is None:
        width = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        return 3 * width * model.num_layers / trainer.mesh.cp
    # Forward pass and recomputation send latent keys. The backward pass sends their gradients.
    memory = trainer.memory
    is_kept = "attention" in trainer.kept and not memory.activation_offload
    passes = 2 if is_kept or not memory.recomputes_blocks else 3
    values = passes * model.num_layers * (mla.kv_lora_rank + mla.rope_head_dim)
    if mla.indexer is not None:
        learns = trainer.indexer == "train"
        values += (passes if learns else 1) * model.num_indexers * mla.indexer.head_dim
    return values
