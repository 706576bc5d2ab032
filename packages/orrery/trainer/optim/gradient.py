"""Compute the gradient norm and clipping divisor, and find NaN and infinity.

Gradients must already be summed over replicas.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from orrery.models.placement import local_tensor
from orrery.trainer.parallel.world import World

CPU_PART = 1 << 16  # maximum number of values in a float32 sum


def sharding_axes(weight: Tensor) -> dict[int, int]:
    """Return {mesh axis: tensor dimension that it shards}."""
    if not isinstance(weight, DTensor):
        return {}
    return {
        axis: placement.dim
        for axis, placement in enumerate(weight.placements)
        if hasattr(placement, "dim")
    }


@torch.no_grad()
def gradient_norm(weights: Iterable[nn.Parameter], world: World) -> Tensor:
    """Return the global L2 norm, a float32 scalar equal on all ranks. A collective."""
    alike: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for weight in weights:
        if weight.requires_grad:
            mesh = weight.device_mesh if isinstance(weight, DTensor) else None
            axes = tuple(sharding_axes(weight))
            shards = alike.setdefault((mesh, axes) if axes else (None, ()), [])
            if weight.grad is not None and local_tensor(weight.grad).numel():
                shards.append(local_tensor(weight.grad))
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for (mesh, axes), shards in alike.items():
        # Offloaded gradients are on the CPU, but NCCL needs GPU tensors.
        square = _sum_of_squares(shards).to(world.device) if shards else torch.zeros_like(total)
        for axis in axes:
            assert mesh is not None
            dist.all_reduce(square, group=mesh.get_group(axis))
        total += square
    if (replicas := world.axis_size("dp_replicate")) > 1:
        # Average over replicas, because rounding differences would let them diverge.
        dist.all_reduce(total, group=world.group("dp_replicate"))
        total /= replicas
    return total.sqrt().float()


def _sum_of_squares(tensors: list[Tensor]) -> Tensor:
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        # On a CPU, torch's float32 sum of 600 M squares is 10 % too small.
        parts = tensor.reshape(-1).split(CPU_PART) if tensor.device.type == "cpu" else [tensor]
        by_device.setdefault(tensor.device, []).extend(parts)
    sums = [
        torch.stack(torch._foreach_norm(alike, 2, torch.float32)).double().square().sum()
        for alike in by_device.values()
    ]
    return torch.stack([one.to(sums[0].device) for one in sums]).sum()


def clip(norm: Tensor, max_norm: float) -> Tensor:
    """Return the divisor (at least 1) that clips gradients to `max_norm`."""
    return ((norm + 1e-6) / max_norm).clamp(min=1.0)


@torch.no_grad()
def last_not_finite(tensors: Iterable[Tensor | None]) -> int:
    """Return the index of the last tensor with a local NaN or infinity, or −1. Sync the device."""
    positions: dict[torch.device, list[int]] = {}
    extremes: dict[torch.device, list[Tensor]] = {}
    for position, tensor in enumerate(tensors):
        if tensor is not None and (part := local_tensor(tensor)).numel():
            positions.setdefault(part.device, []).append(position)
            extremes.setdefault(part.device, []).extend(torch.aminmax(part))
    last = -1
    for device, found in extremes.items():
        are_finite = torch.stack(found).isfinite().view(-1, 2).all(1).tolist()
        for position, is_finite in zip(positions[device], are_finite, strict=True):
            if not is_finite:
                last = max(last, position)
    return last
