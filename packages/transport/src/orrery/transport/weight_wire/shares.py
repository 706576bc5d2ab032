"""Fingerprints of what a trainer rank holds, in the dtype that it travels in: its shares, which add up over ranks.

A bucket at a time: the same copies as for sending, so that what is fingerprinted is what would be sent. Of replicas the first counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from orrery.transport.fingerprint_slices import SliceFingerprints, Where
from orrery.transport.weight_wire.buckets import Copy, Held, fill, joined, shape_of, starts_of
from orrery.transport.weight_wire.slices import ALIGNMENT_BYTES, PIECES_A_BUCKET, Box, cut, volume


@dataclass
class _Bucketful:
    copies: list[Copy] = field(default_factory=list)
    where: list[Where] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)


class Shares:
    """Made once for what stands where; `of` reads it anew."""

    def __init__(
        self,
        held: Sequence[Held],
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
                    Where(used, shape_of(box), one.shape, starts_of(box), one.dtype.itemsize)
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
