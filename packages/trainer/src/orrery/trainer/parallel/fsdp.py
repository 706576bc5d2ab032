"""FSDP2: weights sharded over dp_shard · cp, repeated over dp_replicate (HSDP when that is more than one).

- The units are the model's own (`models/<arch>/sharding.py`); what they leave over is the root's. Where experts are spread over ranks, a
  layer's experts are a unit of their own, sharded over the ranks that hold the same experts.
- Gradients are *summed* over ranks: the loss already divides by global counts, so FSDP's averaging is switched off.
- Gradients travel once a step (`reduce_gradients: step`): micro-steps before the last accumulate whole gradients on every rank. Where those
  do not fit, they travel after each micro-batch, beside its backward pass, and only HSDP's all-reduce waits for the last.
- The last unit stays whole between forward and backward: it is the first that the backward pass reads.
- One rank is left unwrapped (`is_needed`): there is nothing to shard or reduce, no process group to form, and a step is a few percent
  faster without the hooks. What computes in another dtype has `Copies`. FSDP is there too where only a unit's copies are to be held
  at a time.
"""

import itertools

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from orrery.manifest.schema import Fsdp, Trainer
from orrery.models import expert_modules, fsdp_units
from orrery.trainer.parallel.copies import Copies
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy


def is_needed(trainer: Trainer) -> bool:
    """Whether weights must be wrapped, and so whether a process group is needed."""
    by_unit = trainer.param_dtype != trainer.compute_dtype and trainer.fsdp.reshard_after_forward
    return trainer.mesh.world_size > 1 or by_unit or trainer.fsdp.cpu_offload


def has_copies(trainer: Trainer) -> bool:
    """Whether one rank, left unwrapped, computes on copies of its weights."""
    return not is_needed(trainer) and trainer.param_dtype != trainer.compute_dtype


def apply(policy: Policy, world: World, trainer: Trainer) -> None:
    if has_copies(trainer):
        policy.copies = Copies(policy, getattr(torch, trainer.compute_dtype))
    if not is_needed(trainer):
        return
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, trainer.compute_dtype),
        reduce_dtype=getattr(torch, trainer.reduce_dtype),
        cast_forward_inputs=False,
    )
    offload = (
        CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
        if trainer.fsdp.cpu_offload
        else OffloadPolicy()
    )
    reshard = trainer.fsdp.reshard_after_forward

    def shard(unit: nn.Module | list[nn.Module], mesh: object, reshard: bool) -> None:
        fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=precision,
            offload_policy=offload,
        )

    mesh = world.fsdp_mesh
    if world.expert_mesh is not None:
        for experts in expert_modules(policy.network):
            shard(experts, world.expert_fsdp_mesh, reshard)
    units = fsdp_units(policy.network)
    for unit in units:
        shard(unit, mesh, reshard and unit is not units[-1])
    shard(policy, mesh, False)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(
                True
            )  # a factor alone becomes PREMUL_SUM, which gloo does not have
    if trainer.mesh.ep > 1:
        _prefetch(policy)
    if trainer.fsdp.cpu_offload:
        _give_storage(policy, world.device)


def _give_storage(policy: Policy, device: torch.device) -> None:
    """Host memory for weights, which FSDP wants there from the start; buffers go where they are read."""
    policy.to_empty(device="cpu")
    for module in policy.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = (
                None if buffer is None else torch.empty_like(buffer, device=device)
            )
    policy.network.compute_buffers()


def _prefetch(policy: Policy) -> None:
    """Gather the next layer's weights by name: an exchange of tokens stops the host, which would ask for them in time if it ran ahead."""
    layers = [_units_of(layer) for layer in policy.network.layers]
    for previous, current in itertools.pairwise(layers):
        previous[0].set_modules_to_forward_prefetch(current)
        current[0].set_modules_to_backward_prefetch(list(reversed(previous)))


def _units_of(layer: nn.Module) -> list[FSDPModule]:
    return [module for module in layer.modules() if isinstance(module, FSDPModule)]


def set_gradient_sync(policy: Policy, last: bool, spec: Fsdp) -> None:
    """Whether the next backward pass, the `last` of its step or not, reduces gradients over ranks or keeps them local."""
    if not isinstance(policy, FSDPModule):
        return
    if spec.reduce_gradients == "step":
        policy.set_requires_gradient_sync(last)
    else:
        policy.set_requires_all_reduce(last)


def reshard_all(policy: Policy) -> None:
    """After a pass: what stands whole, for a backward pass that may not come, is sharded again.

    Until then the policy has those weights as they were gathered, in the compute dtype, and an export would take them so.
    """
    if policy.copies is not None:
        policy.copies.put_back()
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
