"""Links on which a target reads out of a source's bucket: who may read and overwrite when is said in the store, bytes go by `Reader`s.

- A source says that a message is full, with the place of it; the target reads it, and says so; then the source may fill the place again.
- Messages of a pair are numbered through, over takes too, so no word is taken for an older one.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import msgspec
import torch

from orrery.transport.weight_wire.coordinator import StoreConnection
from orrery.transport.weight_wire.leases import ROUND_S
from orrery.transport.weight_wire.plan import Location


class MessageReady(msgspec.Struct):
    """SliceSpec a message lies: which of the source's buckets, and which bytes of it."""

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


class PullSender:
    """A source's end. `offer`: the key at which it has said how its buckets are read."""

    def __init__(
        self,
        meeting: StoreConnection,
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

    def send(
        self, side: int, number: int, target: int, offset: int, num_bytes: int
    ) -> "_OfferedMessage":
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # it is full only then
        key = f"{self._key}.{target}/{self._count[target]}"
        self._count[target] += 1
        self._offered.add(key)
        self._meeting.put(f"{key}/full", MessageReady(side, offset, num_bytes))
        return _OfferedMessage(self, key, self._names[target])

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


class _OfferedMessage:
    def __init__(self, source: PullSender, key: str, target: str) -> None:
        self._source, self._key, self._target = source, key, target

    def wait(self) -> None:
        self._source.is_read(self._key, self._target)


class PullReceiver:
    """A target's end, for the sources that it has a reader of."""

    def __init__(
        self, meeting: StoreConnection, generation: int, target: int, readers: dict[int, Reader]
    ) -> None:
        self._meeting, self._generation, self._target, self._readers = (
            meeting,
            generation,
            target,
            readers,
        )
        self._count: dict[int, int] = defaultdict(int)

    def receive(self, source: int, into: torch.Tensor) -> "_AwaitedMessage":
        key = f"pull/{self._generation}/{source}.{self._target}/{self._count[source]}"
        self._count[source] += 1
        return _AwaitedMessage(self._meeting, key, source, self._readers[source], into)


class _AwaitedMessage:
    def __init__(
        self, meeting: StoreConnection, key: str, source: int, reader: Reader, into: torch.Tensor
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
            f"{self._key}/full",
            MessageReady,
            f"trainer {self._source}, that its slices are there",
            ROUND_S,
        )
        self._reader.read(full.side, full.offset, self._into, self._free)
        self._meeting.put(f"{self._key}/read", True)


class IpcHandle(msgspec.Struct):
    """A bucket, as `torch.UntypedStorage._share_cuda_` tells of it (torch 2.13)."""

    memory: bytes
    num_bytes: int
    offset_bytes: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_needed: bool


def is_shared(source: Location, target: Location) -> bool:
    """Whether the target may map the source's memory."""
    return source.device == target.device == "cuda" and source.host == target.host


def offer(
    meeting: StoreConnection, generation: int, source: int, buckets: Sequence[torch.Tensor]
) -> str:
    """Say how this source's buckets are mapped; the key at which that stands."""
    key = f"ipc/{generation}/{source}"
    meeting.put(key, [handle_of(bucket) for bucket in buckets])
    return key


def handle_of(bucket: torch.Tensor) -> IpcHandle:
    _, memory, num_bytes, offset_bytes, counter, counter_offset, event, event_needed = (
        bucket.untyped_storage()._share_cuda_()
    )
    return IpcHandle(memory, num_bytes, offset_bytes, counter, counter_offset, event, event_needed)


def open_handle(handle: IpcHandle, num_bytes: int, device: torch.device) -> torch.Tensor:
    """The bucket that `handle` is of, mapped into this process."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    return rebuild_cuda_tensor(
        torch.Tensor,
        (num_bytes,),
        (1,),
        0,
        torch.UntypedStorage,
        torch.uint8,
        device.index or 0,
        handle.memory,
        handle.num_bytes,
        handle.offset_bytes,
        False,
        handle.counter,
        handle.counter_offset,
        handle.event,
        handle.event_needed,
    )


class IpcReader:
    """A target's access to one source."""

    def __init__(
        self, meeting: StoreConnection, generation: int, source: int, device: torch.device
    ) -> None:
        handles = meeting.get(
            f"ipc/{generation}/{source}",
            list[IpcHandle],
            f"trainer {source}, how its buckets are mapped",
        )
        self._buckets = [
            open_handle(handle, meeting.address.bucket_bytes, device) for handle in handles
        ]
        self._stream = torch.cuda.Stream(device)  # beside the loading of what came before

    def read(
        self, side: int, offset: int, into: torch.Tensor, free: torch.cuda.Event | None
    ) -> None:
        if free is not None:
            self._stream.wait_event(free)
        with torch.cuda.stream(self._stream):
            into.copy_(self._buckets[side][offset : offset + into.numel()])
        self._stream.synchronize()

    def close(self) -> None:
        self._buckets = []
