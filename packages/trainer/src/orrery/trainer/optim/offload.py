"""Optimizer state in pinned host memory, visiting the device during the step.

- A line of state (one key of a group's weights, end to end) is one block of host memory; a bucket is a window of it, so a visit is one copy
  a key each way, whatever the weights' sizes.
- Three slots on the device: while bucket i is updated, i + 1 is on its way in and i − 1 on its way out, each on a stream of its own. A slot
  is filled again once what was in it is back on the host; a window is fetched again once it is back from the step before.
- Slots exist from `prefetch` (or the step's begin) to the step's end: forward and backward of other micro-batches have that memory.
- On a CPU the same path runs without streams.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from orrery.manifest.errors import RunFailed
from orrery.models.placement import local_tensor
from orrery.trainer.host_memory import host_block

if TYPE_CHECKING:
    from orrery.trainer.optim.optimizer import Bucket, Line

NUM_SLOTS = 3


class Offload:
    """`lines[id(line)][key]` is the host block of a line's state."""

    def __init__(self, buckets: list["Bucket"]):
        self._buckets = buckets
        self._device = _device_of(buckets[0].line)
        self.lines: dict[int, dict[str, Tensor]] = {}
        for bucket in buckets:
            if id(bucket.line) not in self.lines:
                keys = bucket.group.rule.keys
                self.lines[id(bucket.line)] = {
                    key: self._host_block(bucket.line.length, bucket.line.dtype) for key in keys
                }
        self._slot_bytes = max(self._num_bytes(bucket) for bucket in buckets)
        self._slots: list[Tensor] = []
        self._num_fetched = 0  # buckets of the coming or present step that are on their way or here
        self._cuda = self._device.type == "cuda"
        if self._cuda:
            self._inward, self._outward = (
                torch.cuda.Stream(self._device),
                torch.cuda.Stream(self._device),
            )
            self._arrived = [torch.cuda.Event() for _ in buckets]
            self._returned = [torch.cuda.Event() for _ in buckets]  # one never recorded is no wait

    def prefetch(self) -> None:
        """Begin the step's first fetches; a second call adds nothing."""
        if not self._slots:
            self._slots = [
                torch.empty(self._slot_bytes, dtype=torch.uint8, device=self._device)
                for _ in range(NUM_SLOTS)
            ]
            if self._cuda:  # the slots' memory may still be in use by what is queued
                self._inward.wait_stream(torch.cuda.current_stream(self._device))
        while self._num_fetched < min(NUM_SLOTS, len(self._buckets)):
            self._fetch()

    def visits(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Each bucket's index and its windows of state on the device, by key; changed there, they are changed on the host."""
        self.prefetch()
        here = torch.cuda.current_stream(self._device) if self._cuda else None
        for index in range(len(self._buckets)):
            if here is not None:
                here.wait_event(self._arrived[index])
            yield index, self._views(index)
            self._send_back(index)
            # The slot of the bucket before is (about to be) free: its return was queued a bucket ago, so fetching overlaps with it.
            if index and self._num_fetched < len(self._buckets):
                self._fetch()
        if here is not None:
            here.wait_stream(self._outward)  # slots are given up only when they are copied
        self._slots, self._num_fetched = [], 0

    def settle(self) -> None:
        """Wait until the host blocks hold what the last step made, and forget what was fetched before they may change."""
        if self._cuda:
            self._inward.synchronize()
            self._outward.synchronize()
        self._slots, self._num_fetched = [], 0

    def _fetch(self) -> None:
        index = self._num_fetched
        self._num_fetched += 1
        if not self._cuda:
            self._copy(index, inward=True)
            return
        with torch.cuda.stream(self._inward):
            self._inward.wait_event(self._returned[index])
            if index >= NUM_SLOTS:
                self._inward.wait_event(self._returned[index - NUM_SLOTS])
            self._copy(index, inward=True)
            self._arrived[index].record(self._inward)

    def _send_back(self, index: int) -> None:
        if not self._cuda:
            self._copy(index, inward=False)
            return
        self._outward.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._outward):
            self._copy(index, inward=False)
            self._returned[index].record(self._outward)

    def _copy(self, index: int, inward: bool) -> None:
        bucket = self._buckets[index]
        for key, view in self._views(index).items():
            host = self.lines[id(bucket.line)][key][bucket.begin : bucket.end]
            (view if inward else host).copy_(host if inward else view, non_blocking=True)

    def _views(self, index: int) -> dict[str, Tensor]:
        """The bucket's windows in its slot, keys one after the other."""
        bucket, slot = self._buckets[index], self._slots[index % NUM_SLOTS]
        size = (bucket.end - bucket.begin) * bucket.line.dtype.itemsize
        return {
            key: slot[i * size : (i + 1) * size].view(bucket.line.dtype)
            for i, key in enumerate(bucket.group.rule.keys)
        }

    def _num_bytes(self, bucket: "Bucket") -> int:
        return (
            (bucket.end - bucket.begin) * bucket.line.dtype.itemsize * len(bucket.group.rule.keys)
        )

    def _host_block(self, length: int, dtype: torch.dtype) -> Tensor:
        block, error = host_block(length * dtype.itemsize, self._device)
        if error:
            raise RunFailed(
                f"trainer.memory.optimizer_offload: {block.nbytes / 2**30:.1f} GiB of host memory cannot be pinned "
                f"(CUDA error {error}); free host memory, shard over more ranks, or set it to false"
            )
        return block.view(dtype)


def _device_of(line: "Line") -> torch.device:
    return local_tensor(line.weights[0]).device
