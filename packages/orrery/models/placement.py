"""Find this rank's part of a sharded tensor.

A box describes a shard: a range `[start, stop)` per dimension. Replicas have equal boxes.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

Box = tuple[tuple[int, int], ...]


def local_tensor(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def is_sharded(module: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def full_tensor(parameter: Tensor) -> Tensor:
    """Return the unsharded tensor. A collective if `parameter` is sharded."""
    if not isinstance(parameter, DTensor):
        return parameter
    mesh, local = parameter.device_mesh, parameter.to_local()
    if local.device.type != mesh.device_type:
        parameter = DTensor.from_local(
            local.to(mesh.device_type),
            mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return parameter.full_tensor()


def local_box(parameter: Tensor) -> Box:
    """Return this rank's box. Raise NotImplementedError for unsupported placements."""
    if not isinstance(parameter, DTensor):
        return tuple((0, size) for size in parameter.shape)
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return tuple((0, 0) for _ in parameter.shape)
    axes = []
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard) or hasattr(placement, "split_factor"):
            is_strided = getattr(placement, "split_factor", 1) > 1
            axes.append((is_strided, placement.dim, mesh.size(axis), coordinate[axis]))
    box = box_of(parameter.shape, axes)
    if tuple(stop - start for start, stop in box) != tuple(parameter.to_local().shape):
        raise NotImplementedError(
            f"placements {parameter.placements} of a tensor {list(parameter.shape)} "
            "are not supported"
        )
    return box


def box_of(shape: Sequence[int], axes: Sequence[tuple[bool, int, int, int]]) -> Box:
    """Return this rank's box of a tensor. Mesh axes split `shape` like `torch.chunk`.

    An axis is (strided, tensor dim, number of parts, index of this rank's part). Strided axes
    (`_StridedShard`) split last.
    """
    box = [(0, size) for size in shape]
    for _, dim, num_parts, part in sorted(axes, key=lambda axis: axis[0]):
        start, stop = box[dim]
        step = -(-(stop - start) // num_parts)
        box[dim] = (min(start + step * part, stop), min(start + step * (part + 1), stop))
    return tuple(box)


def intersection(one: Box, other: Box) -> Box | None:
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def relative(box: Box, origin: Box) -> Box:
    pairs = zip(box, origin, strict=True)
    return tuple((start - first, stop - first) for (start, stop), (first, _) in pairs)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*side) for side in box)
