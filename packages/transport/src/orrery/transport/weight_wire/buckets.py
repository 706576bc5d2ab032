"""Buckets: the buffers that slices travel in, and the copies between them and the tensors that they are slices of.

- A slice is dense in a bucket; in its tensor it may be any box. The copy converts the dtype where the two differ.
- Neighbours that follow one another in both places are one copy: stacked experts, a tensor each in a checkpoint, become a few.
- Two buckets a rank: one is filled while the other is on its way.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from orrery.transport.weight_wire.slices import Box


@dataclass(frozen=True)
class Held:
    """A tensor of the checkpoint as a rank of the trainer holds it: `local` is the data of `box`; `dtype` is what it travels in."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    local: Tensor

    def part(self, box: Box) -> Tensor:
        """A view of the data of `box`, which must lie inside of what is held."""
        return self.local[
            tuple(
                slice(start - first, stop - first)
                for (start, stop), (first, _) in zip(box, self.box, strict=True)
            )
        ]


Copy = tuple[
    Tensor, int, torch.dtype
]  # a view, where in the bucket its data are (bytes), in which dtype they are there


def joined(copies: Iterable[Copy]) -> list[Copy]:
    """The same copies, with neighbours made one."""
    found: list[Copy] = []
    for view, offset, dtype in copies:
        if view.is_contiguous():
            view = view.reshape(-1)
            if found:
                last, last_offset, last_dtype = found[-1]
                if (
                    last.dim() == 1
                    and last.is_contiguous()
                    and last.dtype == view.dtype
                    and last_dtype == dtype
                    and last.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
                    and last.storage_offset() + last.numel() == view.storage_offset()
                    and last_offset + last.numel() * dtype.itemsize == offset
                ):
                    whole = last.as_strided(
                        (last.numel() + view.numel(),), (1,), last.storage_offset()
                    )
                    found[-1] = (whole, last_offset, dtype)
                    continue
        found.append((view, offset, dtype))
    return found


def in_bucket(bucket: Tensor, offset: int, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    """The view of `bucket` (u8) that has this shape and dtype from byte `offset` on."""
    shape = tuple(shape)
    size = torch.Size(shape).numel() * dtype.itemsize
    return bucket[offset : offset + size].view(dtype).view(shape)


def fill(bucket: Tensor, copies: Iterable[Copy]) -> None:
    """Copy every view into the bucket."""
    for view, offset, dtype in copies:
        in_bucket(bucket, offset, view.shape, dtype).copy_(view)


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def starts_of(box: Box) -> tuple[int, ...]:
    return tuple(start for start, _ in box)
