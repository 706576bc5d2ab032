"""Links on which a target reads out of a source's bucket: who may read and overwrite when is said in the store, bytes go by `Reader`s.

- A source says that a message is full, with the place of it; the target reads it, and says so; then the source may fill the place again.
- Messages of a pair are numbered through, over takes too, so no word is taken for an older one.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import msgspec
import torch

from orrery.transport.weight_wire.contract import ROUND_S
from orrery.transport.weight_wire.meeting import Meeting


class Full(msgspec.Struct):
    """Where a message lies: which of the source's buckets, and which bytes of it."""

    side: int
    offset: int
    num_bytes: int


class Reader(Protocol):
    """How a target gets at one source's buckets."""

    def read(
        self, side: int, offset: int, into: torch.Tensor, free: torch.cuda.Event | None
    ) -> None:
        """Fill `into` (u8) with the bytes of bucket `side` from `offset` on, once `free` has happened; they are there when this returns."""

    def close(self) -> None: ...


class PullSource:
    """A source's end. `offer`: the key at which it has said how its buckets are read."""

    def __init__(
        self,
        meeting: Meeting,
        generation: int,
        source: int,
        names: Sequence[str],
        device: torch.device,
        offer: str | None = None,
    ) -> None:
        self._offer = offer
        self._meeting, self._key, self._names, self._device = (
            meeting,
            f"pull/{generation}/{source}",
            names,
            device,
        )
        self._count: dict[int, int] = defaultdict(int)
        self._offered: set[str] = set()

    def send(self, side: int, number: int, target: int, offset: int, num_bytes: int) -> "_Offered":
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # it is full only then
        key = f"{self._key}.{target}/{self._count[target]}"
        self._count[target] += 1
        self._offered.add(key)
        self._meeting.put(f"{key}/full", Full(side, offset, num_bytes))
        return _Offered(self, key, self._names[target])

    def is_read(self, key: str, target: str) -> None:
        self._meeting.get(f"{key}/read", bool, f"{target}, that it has read its slices", ROUND_S)
        self._forget(key)

    def close(self) -> None:
        """Readers hear of it when the take is given up, or at their deadline."""
        for key in list(self._offered):
            self._forget(key)
        if self._offer is not None:
            self._meeting.forget(self._offer)

    def _forget(self, key: str) -> None:
        self._offered.discard(key)
        self._meeting.forget(f"{key}/full", f"{key}/read")


class _Offered:
    def __init__(self, source: PullSource, key: str, target: str) -> None:
        self._source, self._key, self._target = source, key, target

    def wait(self) -> None:
        self._source.is_read(self._key, self._target)


class PullTarget:
    """A target's end, for the sources that it has a reader of."""

    def __init__(
        self, meeting: Meeting, generation: int, target: int, readers: dict[int, Reader]
    ) -> None:
        self._meeting, self._generation, self._target, self._readers = (
            meeting,
            generation,
            target,
            readers,
        )
        self._count: dict[int, int] = defaultdict(int)

    def receive(self, source: int, into: torch.Tensor) -> "_Awaited":
        key = f"pull/{self._generation}/{source}.{self._target}/{self._count[source]}"
        self._count[source] += 1
        return _Awaited(self._meeting, key, source, self._readers[source], into)


class _Awaited:
    def __init__(
        self, meeting: Meeting, key: str, source: int, reader: Reader, into: torch.Tensor
    ) -> None:
        self._meeting, self._key, self._source, self._reader, self._into = (
            meeting,
            key,
            source,
            reader,
            into,
        )
        self._free = None
        if into.is_cuda:  # of what the device still does with these bytes; the other bucket may be at work for longer
            self._free = torch.cuda.Event()
            self._free.record()

    def wait(self) -> None:
        full = self._meeting.get(
            f"{self._key}/full", Full, f"trainer {self._source}, that its slices are there", ROUND_S
        )
        self._reader.read(full.side, full.offset, self._into, self._free)
        self._meeting.put(f"{self._key}/read", True)
