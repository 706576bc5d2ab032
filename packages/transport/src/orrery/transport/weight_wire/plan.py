"""Which rank sends which part of which tensor to whom, as data: no torch, no process, no bytes.

- In: what every source (trainer rank) holds, a box a tensor; what every target (engine rank) needs, boxes of the same tensors.
- Out: `plan_moves`, the intersections of the two; `schedule`, the same cut into messages of bounded rounds.
- Always: an element that a target needs comes exactly once to it, from a source that holds it. A transfer lies inside its source's box,
  so no rank ever sends, or buffers, what is not its own or its receiver's.
- Of sources that hold the same (replicas), the one that has sent least so far sends.
- In a round a rank sends at most `bucket_bytes`, and receives at most as many: what double buffers are sized by. Rounds are no barriers:
  one in which a rank has nothing to do does not exist for it.
- Everybody derives the same schedule from the same tables, so nothing but data travels.

A box is one `[start, stop)` a dimension of the whole tensor; a scalar's is `()`.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import torch

from orrery.manifest.errors import OrreryError

Box = tuple[tuple[int, int], ...]
ALIGNMENT_BYTES = (
    16  # of every slice in a message: any dtype may be viewed there, and a device reads whole words
)
PIECES_A_BUCKET = 4  # a slice takes at most this share of a bucket, so that buckets fill


class Move(NamedTuple):
    """`box` of tensor `name` goes from `source` to `target` (ranks among their own kind)."""

    source: int
    target: int
    name: str
    box: Box


class Slice(NamedTuple):
    """A part of a message: `box` of tensor `name`, dense and in row-major order from byte `offset` on."""

    name: str
    box: Box
    offset: int


@dataclass
class SliceMessage:
    """What goes from one source to one target in one round; it begins at these bytes of their buffers of that round."""

    source_offset: int
    target_offset: int
    slices: list[Slice] = field(default_factory=list)
    num_bytes: int = 0


Rounds = list[dict[tuple[int, int], SliceMessage]]  # of each round: (source, target) → message


def volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def intersection(one: Box, other: Box) -> Box | None:
    """What two boxes of one tensor have in common; None where that is nothing."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def plan_moves(
    names: Sequence[str],
    holdings: Sequence[Mapping[str, Box]],
    needs: Sequence[Mapping[str, Sequence[Box]]],
    itemsize: Mapping[str, int],
) -> list[Move]:
    """All that must travel, in the order of `names`. Raises OrreryError where sources hold less than a target needs."""
    load = [0] * len(holdings)
    found: list[Move] = []
    for name in names:
        owners: dict[Box, list[int]] = defaultdict(list)
        for rank, held in enumerate(holdings):
            if name in held:
                owners[held[name]].append(rank)
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
                        f"weight wire: engine rank {target} needs {list(need)} of tensor {name!r}, and {missing} elements of it are with "
                        f"{'no trainer rank' if missing > 0 else 'several trainer ranks in part'}"
                    )
    return found


def cut(box: Box, itemsize: int, max_bytes: int) -> Iterator[Box]:
    """`box` in parts of at most `max_bytes`, in row-major order, each as long in its outermost dimensions as that allows."""
    if volume(box) * itemsize <= max_bytes:
        yield box
        return
    dim = next(d for d, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    rows = max(1, max_bytes // (volume(box) // (stop - start) * itemsize))
    for first in range(start, stop, rows):
        part = (*box[:dim], (first, min(first + rows, stop)), *box[dim + 1 :])
        yield from cut(part, itemsize, max_bytes) if rows == 1 else (part,)


def schedule(moves: Sequence[Move], itemsize: Mapping[str, int], bucket_bytes: int) -> Rounds:
    """`moves` in rounds: each goes into the first round, not before its ranks' last, in which both have room for it."""
    rounds: Rounds = []
    sent: dict[tuple[int, int], int] = defaultdict(int)  # (round, source) → bytes
    received: dict[tuple[int, int], int] = defaultdict(int)
    last_of_source: dict[int, int] = defaultdict(int)
    last_of_target: dict[int, int] = defaultdict(int)
    for source, target, name, whole in moves:
        for box in cut(whole, itemsize[name], bucket_bytes // PIECES_A_BUCKET):
            size = -(-volume(box) * itemsize[name] // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
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
    """The distinct boxes that the ranks of one engine hold, which must tile every tensor; OrreryError naming one that is not."""
    found: list[tuple[str, Box]] = []
    for name in names:
        boxes = sorted({box for wanted in needs for box in wanted.get(name, ())})
        whole = math.prod(shapes[name])
        if sum(map(volume, boxes)) != whole or any(
            intersection(a, b) for i, a in enumerate(boxes) for b in boxes[i + 1 :] if a
        ):
            held = sum(map(volume, boxes))
            raise OrreryError(
                f"weight wire: the ranks of an engine hold {held} elements of tensor {name!r}, in {len(boxes)} parts; it has {whole}"
            )
        found += [(name, box) for box in boxes]
    return found


class TensorInfo(msgspec.Struct, frozen=True):
    """One tensor of the checkpoint as it travels."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name of it


class Location(msgspec.Struct, frozen=True):
    """SliceSpec a rank's memory is: two ranks of one `host` may map one another's."""

    host: str
    device: str  # "cpu" or "cuda"


class Holding(msgspec.Struct):
    """What a trainer rank holds."""

    place: Location
    boxes: dict[str, Box]


class Member(msgspec.Struct):
    """What a rank of an engine needs, and who it is."""

    engine: str
    rank: int
    place: Location
    needs: dict[str, tuple[Box, ...]]


@dataclass(frozen=True)
class TransferPlan:
    """Sources are trainer ranks; targets are `members`, ranks of engines, in order."""

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
        moves = plan_moves(
            [each.name for each in tensors],
            [each.boxes for each in holdings],
            [each.needs for each in members],
            itemsize,
        )
        return cls(tensors, holdings, members, schedule(moves, itemsize, bucket_bytes))

    @property
    def ranks(self) -> list[str]:
        """What sentences call the ranks of the group."""
        return [
            *(f"trainer {rank}" for rank in range(len(self.holdings))),
            *(f"{each.engine} (rank {each.rank})" for each in self.members),
        ]

    def of_source(self, source: int) -> list[tuple[int, dict[int, SliceMessage]]]:
        """(round, target → message) of every round in which `source` sends."""
        found = [
            (number, {t: message for (s, t), message in every.items() if s == source})
            for number, every in enumerate(self.rounds)
        ]
        return [(number, mine) for number, mine in found if mine]

    def of_target(self, target: int) -> list[tuple[int, dict[int, SliceMessage]]]:
        """(round, source → message) of every round in which `target` receives."""
        found = [
            (number, {s: message for (s, t), message in every.items() if t == target})
            for number, every in enumerate(self.rounds)
        ]
        return [(number, mine) for number, mine in found if mine]


def dtype_of(tensor: TensorInfo) -> torch.dtype:
    dtype = getattr(torch, tensor.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
