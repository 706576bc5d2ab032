"""FSDP2: shard weights over dp_shard · cp ranks, and replicate them over dp_replicate (HSDP).

- With expert parallelism, an expert is sharded only over the ranks that compute it.
- Gradients are summed, because the loss already divides by global counts.
"""

import itertools
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from orrery.manifest.schema import Fsdp, Trainer
from orrery.models import expert_modules, fsdp_units
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy


def apply(policy: Policy, world: World, trainer: Trainer) -> None:
    if trainer.has_compute_copies:
        policy.copies = ComputeCopies(policy, getattr(torch, trainer.compute_dtype))
    if not trainer.needs_fsdp:
        return
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, trainer.compute_dtype),
        reduce_dtype=getattr(torch, trainer.reduce_dtype),
        cast_forward_inputs=False,
    )
    offload = OffloadPolicy()
    if trainer.fsdp.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    shard = partial(fully_shard, mp_policy=precision, offload_policy=offload)
    reshard = trainer.fsdp.reshard_after_forward
    if world.expert_mesh is not None:
        for experts in expert_modules(policy.network):
            shard(experts, mesh=world.expert_fsdp_mesh, reshard_after_forward=reshard)
            register_fsdp_forward_method(experts, "forward_chunks")
    units = fsdp_units(policy.network)
    for unit in units:
        is_last = unit is units[-1]  # stays gathered, because the backward pass needs it first
        shard(unit, mesh=world.fsdp_mesh, reshard_after_forward=reshard and not is_last)
    shard(policy, mesh=world.fsdp_mesh, reshard_after_forward=False)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Avoid FSDP's reduction PREMUL_SUM, because gloo lacks it.
            module.set_force_sum_reduction_for_comms(True)
    if trainer.mesh.ep > 1:
        _prefetch(policy)
    if trainer.fsdp.cpu_offload:
        _allocate_on_host(policy, world.device)


def _allocate_on_host(policy: Policy, device: torch.device) -> None:
    policy.to_empty(device="cpu")
    for module in policy.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    policy.network.compute_buffers()


def _prefetch(policy: Policy) -> None:
    """Tell FSDP which layers to prefetch, because token exchanges delay its own prefetches."""
    layers = [
        [module for module in layer.modules() if isinstance(module, FSDPModule)]
        for layer in policy.network.layers
    ]
    for previous, current in itertools.pairwise(layers):
        previous[0].set_modules_to_forward_prefetch(current)
        current[0].set_modules_to_backward_prefetch(list(reversed(previous)))


def set_gradient_sync(policy: Policy, last: bool, spec: Fsdp) -> None:
    if not isinstance(policy, FSDPModule):
        return
    if spec.reduce_gradients == "step":
        policy.set_requires_gradient_sync(last)
    else:
        policy.set_requires_all_reduce(last)


def reshard_all(policy: Policy) -> None:
    """Reshard all weights. Otherwise exports would read compute-dtype weights."""
    if policy.copies is not None:
        policy.copies.restore()
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class ComputeCopies:
    """Compute-dtype copies of weights, without FSDP. Results are bit-equal to FSDP on one rank.

    Modules hold the copies from a forward pass until `restore`.
    """

    def __init__(self, policy: nn.Module, dtype: torch.dtype):
        self._copies: dict[nn.Parameter, nn.Parameter] = {}  # tied weights share a copy
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._are_filled = False
        for module in policy.modules():
            for name, weight in module.named_parameters(recurse=False):
                if weight.dtype != dtype and weight.is_floating_point():
                    if weight not in self._copies:
                        self._copies[weight] = _copy_of(weight, dtype)
                    self._places.append((module, name, weight))
        policy.register_forward_pre_hook(self._fill)

    @torch.no_grad()
    def _fill(self, *_: object) -> None:
        if self._are_filled:
            return
        for copy in self._copies.values():
            copy.untyped_storage().resize_(copy.numel() * copy.itemsize)
        torch._foreach_copy_(list(self._copies.values()), list(self._copies))
        for module, name, weight in self._places:
            module._parameters[name] = self._copies[weight]
        self._are_filled = True

    def restore(self) -> None:
        if not self._are_filled:
            return
        for module, name, weight in self._places:
            module._parameters[name] = weight
        for copy in self._copies.values():
            copy.untyped_storage().resize_(0)
        self._are_filled = False


def _copy_of(weight: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    copy = nn.Parameter(torch.empty_like(weight, dtype=dtype), requires_grad=weight.requires_grad)
    copy.untyped_storage().resize_(0)
    if weight.requires_grad:
        copy.register_post_accumulate_grad_hook(partial(_move_gradient, weight))
    return copy


def _move_gradient(weight: nn.Parameter, copy: torch.Tensor) -> None:
    assert copy.grad is not None
    gradient, copy.grad = copy.grad, None
    if weight.grad is None:
        weight.grad = gradient.to(weight.dtype)
    else:
        weight.grad += gradient
