"""Links on which a target reads a source's bucket, by CUDA IPC here and by NIXL in `nixl`.

- The source announces a full message in the wire's store. Once the target has read and acknowledged
  it, the source may overwrite that part of its bucket.
- Messages of a pair are numbered through all transfers, so none is mistaken for an older one.
- CUDA IPC: both ranks are on one host, and the copy runs over NVLink if available. The store holds
  the arguments of `cudaIpcOpenMemHandle` as numbers and bytes. The reader maps the memory on its
  own device, the only one whose number it knows.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import msgspec
import torch

from orrery.wire.weight_wire.coordinator import StoreConnection
from orrery.wire.weight_wire.leases import ROUND_S
from orrery.wire.weight_wire.plan import Location


class MessageReady(msgspec.Struct):
    side: int
    offset: int
    num_bytes: int


class Reader(Protocol):
    """A target's access to one source's buckets."""

    def read(
        self, side: int, offset: int, into: torch.Tensor, free: torch.cuda.Event | None
    ) -> None:
        """Fill `into` (u8) from byte `offset` of bucket `side`, after `free`."""

    def close(self) -> None: ...


class PullSender:
    """A source's end. `offer` is the key of its published buckets."""

    def __init__(
        self,
        store: StoreConnection,
        generation: int,
        source: int,
        names: Sequence[str],
        device: torch.device,
        offer: str | None = None,
    ) -> None:
        self._store, self._names, self._device, self._offer = store, names, device, offer
        self._key = f"pull/{generation}/{source}"
        self._count: dict[int, int] = defaultdict(int)
        self._announced: set[str] = set()

    def send(self, side: int, target: int, offset: int, num_bytes: int) -> "_AnnouncedMessage":
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the bucket is full only then
        key = f"{self._key}.{target}/{self._count[target]}"
        self._count[target] += 1
        self._announced.add(key)
        self._store.put(f"{key}/full", MessageReady(side, offset, num_bytes))
        return _AnnouncedMessage(self, key, self._names[target])

    def await_read(self, key: str, target: str) -> None:
        self._store.get(f"{key}/read", bool, f"{target}, that it has read its slices", ROUND_S)
        self._forget(key)

    def close(self) -> None:
        """Withdraw all messages. Readers fail at the transfer's end or ROUND_S."""
        for key in list(self._announced):
            self._forget(key)
        if self._offer is not None:
            self._store.forget(self._offer)

    def _forget(self, key: str) -> None:
        self._announced.discard(key)
        self._store.forget(f"{key}/full", f"{key}/read")


class _AnnouncedMessage:
    def __init__(self, sender: PullSender, key: str, target: str) -> None:
        self._sender, self._key, self._target = sender, key, target

    def wait(self) -> None:
        self._sender.await_read(self._key, self._target)


class PullReceiver:
    """A target's end, for the sources in `readers`."""

    def __init__(
        self, store: StoreConnection, generation: int, target: int, readers: dict[int, Reader]
    ) -> None:
        self._store, self._readers = store, readers
        self._generation, self._target = generation, target
        self._count: dict[int, int] = defaultdict(int)

    def receive(self, source: int, into: torch.Tensor) -> "_AwaitedMessage":
        key = f"pull/{self._generation}/{source}.{self._target}/{self._count[source]}"
        self._count[source] += 1
        return _AwaitedMessage(self._store, key, source, self._readers[source], into)


class _AwaitedMessage:
    def __init__(
        self, store: StoreConnection, key: str, source: int, reader: Reader, into: torch.Tensor
    ) -> None:
        self._store, self._key, self._source = store, key, source
        self._reader, self._into = reader, into
        self._free = None
        if into.is_cuda:  # the device may still use these bytes
            self._free = torch.cuda.Event()
            self._free.record()

    def wait(self) -> None:
        what = f"trainer {self._source}, that its slices are there"
        ready = self._store.get(f"{self._key}/full", MessageReady, what, ROUND_S)
        self._reader.read(ready.side, ready.offset, self._into, self._free)
        self._store.put(f"{self._key}/read", True)


class IpcHandle(msgspec.Struct):
    """A bucket, as `torch.UntypedStorage._share_cuda_` describes it (torch 2.13)."""

    memory: bytes
    num_bytes: int
    offset_bytes: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_needed: bool


def is_shared(source: Location, target: Location) -> bool:
    return source.device == target.device == "cuda" and source.host == target.host


def offer(
    store: StoreConnection, generation: int, source: int, buckets: Sequence[torch.Tensor]
) -> str:
    """Publish this source's bucket handles. Return the key."""
    key = f"ipc/{generation}/{source}"
    store.put(key, [handle_of(bucket) for bucket in buckets])
    return key


def handle_of(bucket: torch.Tensor) -> IpcHandle:
    _, *described = bucket.untyped_storage()._share_cuda_()
    return IpcHandle(*described)


def open_handle(handle: IpcHandle, num_bytes: int, device: torch.device) -> torch.Tensor:
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
    def __init__(
        self, store: StoreConnection, generation: int, source: int, device: torch.device
    ) -> None:
        what = f"trainer {source}, how its buckets are mapped"
        handles = store.get(f"ipc/{generation}/{source}", list[IpcHandle], what)
        num_bytes = store.address.bucket_bytes
        self._buckets = [open_handle(handle, num_bytes, device) for handle in handles]
        self._stream = torch.cuda.Stream(device)  # runs beside the loading of earlier slices

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
