"""Buckets: the buffers in which slices are sent, and the copies from tensors.

- A slice is any box of a tensor, and dense in the bucket. A copy also converts the dtype.
- Copies that are adjacent in the tensor and in the bucket are joined, such as stacked experts.
- A rank fills one of its two buckets while sending the other.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from orrery.wire.fingerprint import SliceFingerprints, SliceSpec
from orrery.wire.weight_wire.plan import (
    PIECES_A_BUCKET,
    Box,
    aligned_bytes,
    cut,
    shape_of,
    starts_of,
)


@dataclass(frozen=True)
class HeldTensor:
    """A trainer rank's part of a tensor: `local` is the data of `box`, sent as `dtype`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    local: Tensor

    def part(self, box: Box) -> Tensor:
        """Return a view of the data of `box`, which lies inside `self.box`."""
        sides = zip(box, self.box, strict=True)
        return self.local[tuple(slice(a - first, b - first) for (a, b), (first, _) in sides)]


Copy = tuple[Tensor, int, torch.dtype]  # source view, byte offset and dtype in the bucket


def joined(copies: Iterable[Copy]) -> list[Copy]:
    """Join adjacent copies."""
    found: list[Copy] = []
    for view, offset, dtype in copies:
        if view.is_contiguous():
            view = view.reshape(-1)
            if found and _are_adjacent(found[-1], (view, offset, dtype)):
                last, last_offset, _ = found[-1]
                size = (last.numel() + view.numel(),)
                whole = last.as_strided(size, (1,), last.storage_offset())
                found[-1] = (whole, last_offset, dtype)
                continue
        found.append((view, offset, dtype))
    return found


def _are_adjacent(one: Copy, other: Copy) -> bool:
    (a, a_offset, a_dtype), (b, b_offset, b_dtype) = one, other
    return (
        a.dim() == 1
        and a.is_contiguous()
        and (a.dtype, a_dtype) == (b.dtype, b_dtype)
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() + a.numel() == b.storage_offset()
        and a_offset + a.numel() * a_dtype.itemsize == b_offset
    )


def in_bucket(bucket: Tensor, offset: int, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    """Return the view of `bucket` (u8) from byte `offset` on."""
    shape = tuple(shape)
    size = torch.Size(shape).numel() * dtype.itemsize
    return bucket[offset : offset + size].view(dtype).view(shape)


def fill(bucket: Tensor, copies: Iterable[Copy]) -> None:
    for view, offset, dtype in copies:
        in_bucket(bucket, offset, view.shape, dtype).copy_(view)


def allocate(num_bytes: int, device: torch.device) -> list[Tensor]:
    """Return two buckets (u8), each one allocation, as a CUDA IPC handle needs."""
    with _fixed_segments(device):
        return [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]


@contextmanager
def _fixed_segments(device: torch.device) -> Iterator[None]:
    settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if device.type != "cuda" or settings is None:
        yield
        return
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    configured = "".join(os.environ.get(name, "") for name in names)
    settings("expandable_segments:False")
    try:
        yield
    finally:
        if "expandable_segments:True" in configured:
            settings("expandable_segments:True")


@dataclass
class _Bucketful:
    copies: list[Copy] = field(default_factory=list)
    slices: list[SliceSpec] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)


class RankFingerprints:
    """A trainer rank's shares of the tensors' fingerprints, in the sent dtype.

    The shares of all ranks add up to the tensors' fingerprints. Slices are copied into a bucket as
    for sending, and hashed there. Only the first rank with a box counts it.
    """

    def __init__(
        self,
        held: Sequence[HeldTensor],
        names: Sequence[str],
        held_before: Sequence[Mapping[str, Box]],
        bucket_bytes: int,
        device: torch.device,
    ) -> None:
        """`held_before` has the boxes of lower ranks, which this rank does not count again."""
        position = {name: index for index, name in enumerate(names)}
        self._num_tensors, self._device = len(names), device
        parts, used = [_Bucketful()], 0
        for one in held:
            if any(boxes.get(one.name) == one.box for boxes in held_before):
                continue
            itemsize = one.dtype.itemsize
            for box in cut(one.box, itemsize, bucket_bytes // PIECES_A_BUCKET):
                size = aligned_bytes(box, itemsize)
                if used + size > bucket_bytes:
                    parts.append(_Bucketful())
                    used = 0
                part = parts[-1]
                part.copies.append((one.part(box), used, one.dtype))
                spec = SliceSpec(used, shape_of(box), one.shape, starts_of(box), itemsize)
                part.slices.append(spec)
                part.positions.append(position[one.name])
                used += size
        self._parts = [
            (
                joined(part.copies),
                SliceFingerprints(part.slices, device),
                torch.tensor(part.positions, device=device),
            )
            for part in parts
            if part.positions
        ]

    @torch.no_grad()
    def of(self, bucket: Tensor) -> np.ndarray:
        """Return u64 [tensors], in the order of `names`. Overwrites `bucket` (u8)."""
        total = torch.zeros(self._num_tensors, dtype=torch.int64, device=self._device)
        for copies, fingerprints, positions in self._parts:
            fill(bucket, copies)
            total.index_add_(0, positions, fingerprints.of(bucket))
        return total.cpu().numpy().view(np.uint64)
