"""FSDP2: weights sharded over dp_shard, repeated over dp_replicate (HSDP when that is more than one).

- The units are the model's own (`models/<arch>/sharding.py`); what they leave over is the root's.
- Gradients are *summed* over ranks: the loss already divides by global counts, so FSDP's averaging is switched off.
- Gradients travel once a step: micro-steps before the last accumulate locally (`synchronize_gradients`).
- One rank whose dtypes are all the same is left unwrapped (`is_needed`): there is nothing to
  shard, cast or reduce, no process group to form, and a step is a few percent faster without the hooks.
"""

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from orrery.manifest.schema import Trainer
from orrery.models import fsdp_units
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy


def is_needed(trainer: Trainer) -> bool:
    """Whether weights must be wrapped, and so whether a process group is needed."""
    return trainer.mesh.world_size > 1 or not trainer.param_dtype == trainer.compute_dtype == trainer.reduce_dtype


def apply(policy: Policy, world: World, trainer: Trainer) -> None:
    if not is_needed(trainer):
        return
    mesh = world.mesh if trainer.mesh.dp_replicate > 1 else world.mesh["dp_shard"]
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, trainer.compute_dtype), reduce_dtype=getattr(torch, trainer.reduce_dtype), cast_forward_inputs=False
    )
    for unit in fsdp_units(policy.network):
        fully_shard(unit, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # a factor alone becomes PREMUL_SUM, which gloo does not have


def synchronize_gradients(policy: Policy, now: bool) -> None:
    """Whether the next backward pass reduces gradients over ranks (the last micro-step of a step) or keeps them local."""
    if isinstance(policy, FSDPModule):
        policy.set_requires_gradient_sync(now)
