"""Apply parallelism to single-device model code, in this order (kind: the parts that it changes).

1. Context parallel: attention cores, or key modules of latent attention
2. Expert parallel: experts and their token exchange
3. Compilation and activation checkpointing: blocks, or modules in them
4. Activation offload: tensors that blocks save
5. FSDP2: weights. Its hooks must run outside all other wrappers.
"""

import torch

from orrery.kernels.attention import prefer
from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Model, Trainer
from orrery.models import build, fp8, lora
from orrery.models.causal_lm import CausalLm
from orrery.models.latent_attention import replay_choices, train_indexers
from orrery.trainer.parallel import (
    activation_offload,
    blocks,
    context_parallel,
    expert_parallel,
    fsdp,
)
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy


def build_policy(model: Model, trainer: Trainer, world: World) -> Policy:
    """Return the policy with unset weights, on "meta" if FSDP shards it without `cpu_offload`.

    Raise OrreryError if `trainer.attention` is not installed.
    """
    try:
        prefer(trainer.attention)
    except ValueError as error:
        raise OrreryError(f"trainer.attention {trainer.attention!r}: {error}") from None
    network = build_network(model, trainer, "meta" if trainer.needs_fsdp else world.device)
    memory = trainer.memory
    policy = Policy(network, memory.lm_head_chunk_tokens, memory.lm_head_keeps_logits)
    parallelize(policy, world, trainer)
    return policy


def build_network(model: Model, trainer: Trainer, device: torch.device | str) -> CausalLm:
    """Return the unsharded network. With adapters, frozen weights have compute dtype."""
    param_dtype = getattr(torch, trainer.param_dtype)
    if trainer.lora is None:
        network = build(model, param_dtype, device)
        if trainer.indexer == "train":
            train_indexers(network)
    else:
        network = build(model, getattr(torch, trainer.compute_dtype), device)
        lora.adapt(network, trainer.lora, param_dtype)
    if trainer.indexer_choice == "replay":
        replay_choices(network)
    return network


def parallelize(policy: Policy, world: World, trainer: Trainer) -> None:
    context_parallel.apply(policy, world, trainer)
    expert_parallel.apply(policy, world, trainer)
    blocks.apply(policy, trainer)
    blocks.recompute_modules(policy, trainer)
    activation_offload.apply(policy, world, trainer)
    fsdp.apply(policy, world, trainer)
    # The FP8 cache detects changed weights by the `_version` of compute-dtype copies.
    if trainer.has_compute_copies:
        policy.network.register_forward_pre_hook(fp8.WeightCache(policy.network).refresh)
