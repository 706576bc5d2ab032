"""Parallelism from outside: model code is for one device; this file applies everything else, in the one order that works.

0. adapters (LoRA)           freeze weights and stand beside them
1. context parallel          replaces the core of attention
2. expert parallel           replaces the exchange of tokens, and shards experts
3. activation checkpointing  inside of what is compiled, where a block is one graph; around it where ranks exchange inside a block
4. compile                   a block at a time, inside what is sharded
5. activation offload        around both: it sends away what they leave for the backward pass
6. FSDP2                     last: its hooks must wrap all of the above

Each entry is `(policy, world, trainer) -> None` and changes the policy in place.
"""

import torch

from orrery.manifest.schema import Model, Trainer
from orrery.models import build, lora
from orrery.models.causal_lm import CausalLm
from orrery.trainer.parallel import (
    activation_checkpointing,
    activation_offload,
    compiled,
    context_parallel,
    expert_parallel,
    fsdp,
)
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy


def build_policy(model: Model, trainer: Trainer, world: World) -> Policy:
    """The manifest's policy with unset weights, parallel from outside.

    Without storage where it is sharded, so no rank ever holds it whole.
    """
    network = build_network(model, trainer, "meta" if fsdp.is_needed(trainer) else world.device)
    policy = Policy(
        network, trainer.memory.lm_head_chunk_tokens, trainer.memory.lm_head_keeps_logits
    )
    parallelize(policy, world, trainer)
    return policy


def build_network(model: Model, trainer: Trainer, device: torch.device | str) -> CausalLm:
    """What is trained, in the trainer's dtypes and with its adapters, for one device; without storage on "meta".

    Frozen weights are held in the dtype that computes: nothing is added up in them.
    """
    param_dtype, compute_dtype = (
        getattr(torch, trainer.param_dtype),
        getattr(torch, trainer.compute_dtype),
    )
    network = build(model, param_dtype if trainer.lora is None else compute_dtype, device)
    if trainer.lora is not None:
        lora.adapt(network, trainer.lora, param_dtype)
    return network


def parallelize(policy: Policy, world: World, trainer: Trainer) -> None:
    context_parallel.apply(policy, world, trainer)
    expert_parallel.apply(policy, world, trainer)
    recompute = (
        (activation_checkpointing, compiled)
        if compiled.is_whole(trainer.mesh)
        else (compiled, activation_checkpointing)
    )
    for step in (*recompute, activation_offload, fsdp):
        step.apply(policy, world, trainer)
