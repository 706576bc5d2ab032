"""CUDA IPC: an engine rank maps a trainer rank's buckets and copies out of them, where both are on one host (NVLink between GPUs).

- Only what `cudaIpcOpenMemHandle` needs goes through the store, as plain numbers and bytes.
- The memory is opened on the reader's own device, whose number is the only one that the reader sees; the copy is between peers.
- A bucket must be one allocation that a handle can name: it is made with segments that do not grow.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import torch

from orrery.transport.weight_wire.meeting import Meeting, Place


class Handle(msgspec.Struct):
    """A bucket, as `torch.UntypedStorage._share_cuda_` tells of it (torch 2.13)."""

    memory: bytes
    num_bytes: int
    offset_bytes: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_needed: bool


def is_shared(source: Place, target: Place) -> bool:
    """Whether the target may map the source's memory."""
    return source.device == target.device == "cuda" and source.host == target.host


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


def offer(meeting: Meeting, generation: int, source: int, buckets: Sequence[torch.Tensor]) -> str:
    """Say how this source's buckets are mapped; the key at which that stands."""
    key = f"ipc/{generation}/{source}"
    meeting.put(key, [handle_of(bucket) for bucket in buckets])
    return key


def handle_of(bucket: torch.Tensor) -> Handle:
    _, memory, num_bytes, offset_bytes, counter, counter_offset, event, event_needed = (
        bucket.untyped_storage()._share_cuda_()
    )
    return Handle(memory, num_bytes, offset_bytes, counter, counter_offset, event, event_needed)


def open_handle(handle: Handle, num_bytes: int, device: torch.device) -> torch.Tensor:
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
        self, meeting: Meeting, generation: int, source: int, device: torch.device
    ) -> None:
        handles = meeting.get(
            f"ipc/{generation}/{source}",
            list[Handle],
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
