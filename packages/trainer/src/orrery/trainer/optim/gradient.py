"""What stands between gradients and the optimizer: global norm, clipping, and naming what is not finite.

- Gradients are summed over ranks before they get here (`parallel/fsdp.py`); the norm is of the whole gradient, each shard counted once.
- Which ranks hold other parts of a weight is read from the weight itself: the axes of its own mesh that shard it. So the same lines serve
  weights on the FSDP mesh, experts on theirs, replicas, and weights that nobody shards.
- Local shards alone are read: no gradient is ever gathered, and a norm is a few kernels and a scalar a mesh axis on the wire.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from orrery.models.placement import local_tensor
from orrery.trainer.parallel.world import World


def sharding_axes(weight: Tensor) -> dict[int, int]:
    """Axes of the weight's mesh that shard it, each with the dimension that it cuts (FSDP over expert parallel cuts strided)."""
    if not isinstance(weight, DTensor):
        return {}
    return {
        axis: placement.dim
        for axis, placement in enumerate(weight.placements)
        if hasattr(placement, "dim")
    }


@torch.no_grad()
def gradient_norm(weights: Iterable[nn.Parameter], world: World) -> Tensor:
    """L2 norm of the whole gradient, float32 scalar on the ranks' device, the same on every rank.

    Squares are added in float64, once for all weights that are sharded alike. A weight without gradient counts as zero, but its kind of
    sharding still takes part in the sums over ranks: another rank may have one.
    """
    alike: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for weight in weights:
        if weight.requires_grad:
            mesh = weight.device_mesh if isinstance(weight, DTensor) else None
            axes = tuple(sharding_axes(weight))
            parts = alike.setdefault((mesh, axes) if axes else (None, ()), [])
            if weight.grad is not None and local_tensor(weight.grad).numel():
                parts.append(local_tensor(weight.grad))
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for (mesh, axes), parts in alike.items():
        # Of CPU-offloaded gradients the squares are made on the CPU; what travels is on the ranks' device, as nccl wants it.
        square = _sum_of_squares(parts).to(world.device) if parts else torch.zeros_like(total)
        for axis in axes:
            assert mesh is not None
            dist.all_reduce(square, group=mesh.get_group(axis))
        total += square
    if (replicas := world.axis_size("dp_replicate")) > 1:
        # Each replica has added in an order of its own; one number for all, or their weights would come apart bit by bit.
        dist.all_reduce(total, group=world.group("dp_replicate"))
        total /= replicas
    return total.sqrt().float()


def _sum_of_squares(tensors: list[Tensor]) -> Tensor:
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    sums = [
        torch.stack(torch._foreach_norm(alike, 2, torch.float32)).double().square().sum()
        for alike in by_device.values()
    ]
    return torch.stack([one.to(sums[0].device) for one in sums]).sum()


def clip(norm: Tensor, max_norm: float) -> Tensor:
    """What `Optimizer.step` divides gradients by so that their norm is at most `max_norm`: at least 1, decided without a sync."""
    return ((norm + 1e-6) / max_norm).clamp(min=1.0)


@torch.no_grad()
def last_not_finite(tensors: Iterable[Tensor | None]) -> int:
    """Position of the last tensor with a NaN or an infinity in this rank's part, or −1. One pass over memory, and one sync a device."""
    positions: dict[torch.device, list[int]] = {}
    ends: dict[
        torch.device, list[Tensor]
    ] = {}  # the least and the greatest value of each; a NaN is both
    for position, tensor in enumerate(tensors):
        if tensor is not None and (part := local_tensor(tensor)).numel():
            positions.setdefault(part.device, []).append(position)
            ends.setdefault(part.device, []).extend(torch.aminmax(part))
    last = -1
    for device, found in ends.items():
        finite = torch.stack(found).isfinite().view(-1, 2).all(1).tolist()
        last = max(
            [
                last,
                *(
                    position
                    for position, is_finite in zip(positions[device], finite, strict=True)
                    if not is_finite
                ),
            ]
        )
    return last
