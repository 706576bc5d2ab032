"""Buckets: the buffers that slices travel in, and the copies between them and the tensors that they are slices of.

- A slice is dense in a bucket; in its tensor it may be any box. The copy converts the dtype where the two differ.
- Neighbours that follow one another in both places are one copy: stacked experts, a tensor each in a checkpoint, become a few.
- Two buckets a rank: one is filled while the other is on its way.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from orrery.transport.fingerprint import SliceFingerprints, SliceSpec
from orrery.transport.weight_wire.plan import ALIGNMENT_BYTES, PIECES_A_BUCKET, Box, cut, volume


@dataclass(frozen=True)
class HeldTensor:
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


@dataclass
class _Bucketful:
    copies: list[Copy] = field(default_factory=list)
    where: list[SliceSpec] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)


class RankFingerprints:
    """Made once for what stands where; `of` reads it anew."""

    def __init__(
        self,
        held: Sequence[HeldTensor],
        names: Sequence[str],
        held_before: Sequence[Mapping[str, Box]],
        bucket_bytes: int,
        device: torch.device,
    ) -> None:
        """`held_before` are the boxes of ranks before this one: what one of them holds too is theirs to count."""
        position = {name: index for index, name in enumerate(names)}
        self._num_tensors, self._device = len(names), device
        parts, used = [_Bucketful()], 0
        for one in held:
            if any(boxes.get(one.name) == one.box for boxes in held_before):
                continue
            for box in cut(one.box, one.dtype.itemsize, bucket_bytes // PIECES_A_BUCKET):
                size = -(-volume(box) * one.dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
                if used + size > bucket_bytes:
                    parts.append(_Bucketful())
                    used = 0
                parts[-1].copies.append((one.part(box), used, one.dtype))
                parts[-1].where.append(
                    SliceSpec(used, shape_of(box), one.shape, starts_of(box), one.dtype.itemsize)
                )
                parts[-1].positions.append(position[one.name])
                used += size
        self._parts = [
            (
                joined(part.copies),
                SliceFingerprints(part.where, device),
                torch.tensor(part.positions, device=device),
            )
            for part in parts
            if part.positions
        ]

    @torch.no_grad()
    def of(self, bucket: torch.Tensor) -> np.ndarray:
        """u64 [tensors], in the order of `names`; `bucket` (u8) is overwritten."""
        total = torch.zeros(self._num_tensors, dtype=torch.int64, device=self._device)
        for copies, fingerprints, positions in self._parts:
            fill(bucket, copies)
            total.index_add_(0, positions, fingerprints.of(bucket))
        return total.cpu().numpy().view(np.uint64)


def allocate(num_bytes: int, device: torch.device) -> list[torch.Tensor]:
    """Two buckets (u8) that a handle can name."""
    with _segments_that_stay(device):
        return [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]


@contextmanager
def _segments_that_stay(device: torch.device) -> Iterator[None]:
    settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if device.type != "cuda" or settings is None:
        yield
        return
    grows = "expandable_segments:True" in _configured()
    settings("expandable_segments:False")
    try:
        yield
    finally:
        if grows:
            settings("expandable_segments:True")


def _configured() -> str:
    import os

    return os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
