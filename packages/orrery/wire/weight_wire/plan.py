"""Plan which trainer rank sends which slices to which engine rank, in buckets.

- Sources are trainer ranks, targets engine ranks. A box is a range `[start, stop)` per
  tensor dimension.
- Each target receives every needed element exactly once.
- In a round, a rank sends or receives at most one bucket, a buffer of `bucket_bytes`.
"""

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from orrery.manifest.errors import OrreryError
from orrery.wire.fingerprint import SliceFingerprints, SliceSpec

Box = tuple[tuple[int, int], ...]
ALIGNMENT_BYTES = 16  # so that any dtype can view a slice
PIECES_A_BUCKET = 4  # slices of at most 1/4 bucket waste little space


class TensorInfo(msgspec.Struct, frozen=True):
    name: str
    shape: tuple[int, ...]
    dtype: str


class Location(msgspec.Struct, frozen=True):
    host: str
    device: str  # "cpu" or "cuda"


class Holding(msgspec.Struct):
    place: Location
    boxes: dict[str, Box]


class Member(msgspec.Struct):
    engine: str
    rank: int
    place: Location
    needs: dict[str, tuple[Box, ...]]


class Move(NamedTuple):
    source: int
    target: int
    name: str
    box: Box


class Slice(NamedTuple):
    """Elements `box` of tensor `name`, dense and row-major at byte `offset` of a bucket."""

    name: str
    box: Box
    offset: int


@dataclass
class SliceMessage:
    source_offset: int
    target_offset: int
    slices: list[Slice] = field(default_factory=list)
    num_bytes: int = 0


Rounds = list[dict[tuple[int, int], SliceMessage]]  # per round: (source, target) → message


@dataclass(frozen=True)
class TransferPlan:
    """A transfer's schedule. Source i is `holdings[i]`, target i is `members[i]`."""

    tensors: Sequence[TensorInfo]
    holdings: Sequence[Holding]
    members: Sequence[Member]
    rounds: Rounds

    @classmethod
    def of(
        cls,
        tensors: Sequence[TensorInfo],
        holdings: Sequence[Holding],
        members: Sequence[Member],
        bucket_bytes: int,
    ) -> "TransferPlan":
        itemsize = {tensor.name: dtype_of(tensor).itemsize for tensor in tensors}
        boxes, needs = [each.boxes for each in holdings], [each.needs for each in members]
        moves = plan_moves([each.name for each in tensors], boxes, needs, itemsize)
        return cls(tensors, holdings, members, schedule(moves, itemsize, bucket_bytes))

    @property
    def ranks(self) -> list[str]:
        sources = [f"trainer {rank}" for rank in range(len(self.holdings))]
        return [*sources, *(f"{each.engine} (rank {each.rank})" for each in self.members)]

    def of_source(self, source: int) -> list[tuple[int, dict[int, SliceMessage]]]:
        return self._of_rank(source, own=0)

    def of_target(self, target: int) -> list[tuple[int, dict[int, SliceMessage]]]:
        return self._of_rank(target, own=1)

    def _of_rank(self, rank: int, own: int) -> list[tuple[int, dict[int, SliceMessage]]]:
        found = []
        for number, messages in enumerate(self.rounds):
            mine = {pair[1 - own]: each for pair, each in messages.items() if pair[own] == rank}
            if mine:
                found.append((number, mine))
        return found


def dtype_of(tensor: TensorInfo) -> torch.dtype:
    dtype = getattr(torch, tensor.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def starts_of(box: Box) -> tuple[int, ...]:
    return tuple(start for start, _ in box)


def intersection(one: Box, other: Box) -> Box | None:
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def plan_moves(
    names: Sequence[str],
    holdings: Sequence[Mapping[str, Box]],
    needs: Sequence[Mapping[str, Sequence[Box]]],
    itemsize: Mapping[str, int],
) -> list[Move]:
    """Return all moves from sources to targets, in the order of `names`.

    Raise OrreryError if a needed element is in no source's box, or if two different boxes overlap.
    """
    load = [0] * len(holdings)
    found: list[Move] = []
    for name in names:
        owners: dict[Box, list[int]] = defaultdict(list)
        for rank, held in enumerate(holdings):
            if name in held:
                owners[held[name]].append(rank)
        _raise_if_overlapping(name, owners)
        for target, wanted in enumerate(needs):
            for need in dict.fromkeys(wanted.get(name, ())):
                missing = volume(need)
                for box, ranks in owners.items():
                    if (common := intersection(box, need)) is not None:
                        source = min(ranks, key=lambda rank: (load[rank], rank))
                        load[source] += volume(common) * itemsize[name]
                        missing -= volume(common)
                        found.append(Move(source, target, name, common))
                if missing:
                    raise OrreryError(
                        f"weight wire: engine rank {target} needs {list(need)} of tensor {name!r}, "
                        f"but no trainer rank holds {missing} of these elements"
                    )
    return found


def _raise_if_overlapping(name: str, boxes: Iterable[Box]) -> None:
    active: list[Box] = []  # earlier boxes that reach into this one's rows
    for box in sorted(boxes):
        active = [each for each in active if each[0][1] > box[0][0]]
        for each in active:
            if intersection(each, box) is not None:
                raise OrreryError(
                    f"weight wire: trainer ranks hold overlapping parts {list(each)} and "
                    f"{list(box)} of tensor {name!r}"
                )
        active.append(box)


def cut(box: Box, itemsize: int, max_bytes: int) -> Iterator[Box]:
    if volume(box) * itemsize <= max_bytes:
        yield box
        return
    dim = next(d for d, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    rows = max(1, max_bytes // (volume(box) // (stop - start) * itemsize))
    for first in range(start, stop, rows):
        part = (*box[:dim], (first, min(first + rows, stop)), *box[dim + 1 :])
        yield from cut(part, itemsize, max_bytes) if rows == 1 else (part,)


def aligned_bytes(box: Box, itemsize: int) -> int:
    return -(-volume(box) * itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def schedule(moves: Sequence[Move], itemsize: Mapping[str, int], bucket_bytes: int) -> Rounds:
    """Put each slice into the first round with space. Each rank's slices keep their order."""
    rounds: Rounds = []
    sent: dict[tuple[int, int], int] = defaultdict(int)
    received: dict[tuple[int, int], int] = defaultdict(int)
    last_of_source: dict[int, int] = defaultdict(int)
    last_of_target: dict[int, int] = defaultdict(int)
    for source, target, name, whole in moves:
        for box in cut(whole, itemsize[name], bucket_bytes // PIECES_A_BUCKET):
            size = aligned_bytes(box, itemsize[name])
            number = max(last_of_source[source], last_of_target[target])
            while max(sent[number, source], received[number, target]) + size > bucket_bytes:
                number += 1
            last_of_source[source] = last_of_target[target] = number
            sent[number, source] += size
            received[number, target] += size
            rounds += [{} for _ in range(number + 1 - len(rounds))]
            message = rounds[number].setdefault((source, target), SliceMessage(0, 0))
            message.slices.append(Slice(name, box, message.num_bytes))
            message.num_bytes += size
    for messages in rounds:
        at_source: dict[int, int] = defaultdict(int)
        at_target: dict[int, int] = defaultdict(int)
        for (source, target), message in messages.items():
            message.source_offset, message.target_offset = at_source[source], at_target[target]
            at_source[source] += message.num_bytes
            at_target[target] += message.num_bytes
    return rounds


def pieces(
    names: Sequence[str],
    shapes: Mapping[str, Sequence[int]],
    needs: Sequence[Mapping[str, Sequence[Box]]],
) -> list[tuple[str, Box]]:
    """Return the distinct boxes that one engine's ranks need.

    Raise OrreryError if the boxes do not tile each tensor.
    """
    found: list[tuple[str, Box]] = []
    for name in names:
        boxes = sorted({box for wanted in needs for box in wanted.get(name, ())})
        whole, held = math.prod(shapes[name]), sum(map(volume, boxes))
        pairs = ((a, b) for i, a in enumerate(boxes) for b in boxes[i + 1 :] if a)
        if held != whole or any(intersection(a, b) for a, b in pairs):
            raise OrreryError(
                f"weight wire: the {len(boxes)} boxes of tensor {name!r} at an engine's ranks have "
                f"{held} elements, but the tensor has {whole}"
            )
        found += [(name, box) for box in boxes]
    return found


# Buckets


@dataclass(frozen=True)
class HeldTensor:
    """A trainer rank's part of a tensor: `local` is the data of `box`, sent as `dtype`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    local: Tensor

    def part(self, box: Box) -> Tensor:
        sides = zip(box, self.box, strict=True)
        return self.local[tuple(slice(a - first, b - first) for (a, b), (first, _) in sides)]


# (view of weights, byte offset in a bucket, sent dtype)
Copy = tuple[Tensor, int, torch.dtype]


def joined(copies: Iterable[Copy]) -> list[Copy]:
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
    shape = tuple(shape)
    size = torch.Size(shape).numel() * dtype.itemsize
    return bucket[offset : offset + size].view(dtype).view(shape)


def fill(bucket: Tensor, copies: Iterable[Copy]) -> None:
    for view, offset, dtype in copies:
        in_bucket(bucket, offset, view.shape, dtype).copy_(view)


def allocate(num_bytes: int, device: torch.device) -> list[Tensor]:
    """Return two buckets (u8), each one allocation, as CUDA IPC requires."""
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
    """A trainer rank's shares of fingerprints. Only the lowest rank with a box includes it."""

    def __init__(
        self,
        held: Sequence[HeldTensor],
        names: Sequence[str],
        held_before: Sequence[Mapping[str, Box]],
        bucket_bytes: int,
        device: torch.device,
    ) -> None:
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
        """Return the shares, u64 [tensors] in the order of `names`. Overwrite `bucket` (u8)."""
        total = torch.zeros(self._num_tensors, dtype=torch.int64, device=self._device)
        for copies, fingerprints, positions in self._parts:
            fill(bucket, copies)
            total.index_add_(0, positions, fingerprints.of(bucket))
        return total.cpu().numpy().view(np.uint64)
