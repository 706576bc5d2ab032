"""Optimizer state in pinned host memory that visits the device during the step.

The state of `FlatShards` under one key is one host block, and a bucket is a window of it. The
device has three slots, from `prefetch` to the end of the step: bucket i is updated, i + 1 copied in
and i − 1 copied out, each direction on its own stream.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from orrery.manifest.errors import RunFailed
from orrery.models.placement import local_tensor
from orrery.trainer.host_memory import host_block

if TYPE_CHECKING:
    from orrery.trainer.optim.optimizer import Bucket

NUM_SLOTS = 3


class StateOffload:
    """`host[id(shards)][key]` is the host block of one `FlatShards`' state."""

    def __init__(self, buckets: list["Bucket"]):
        self._buckets = buckets
        self._device = local_tensor(buckets[0].shards.weights[0]).device
        self.host: dict[int, dict[str, Tensor]] = {}
        for bucket in buckets:
            shards = bucket.shards
            if id(shards) not in self.host:
                self.host[id(shards)] = {
                    key: self._host_block(shards.length, shards.dtype)
                    for key in bucket.group.rule.keys
                }
        self._slot_bytes = max(bucket.num_bytes * len(bucket.group.rule.keys) for bucket in buckets)
        self._slots: list[Tensor] = []
        self._num_fetched = 0  # of this step, or ahead of the next
        self._cuda = self._device.type == "cuda"
        if self._cuda:
            self._inward = torch.cuda.Stream(self._device)
            self._outward = torch.cuda.Stream(self._device)
            self._arrived = [torch.cuda.Event() for _ in buckets]
            self._returned = [torch.cuda.Event() for _ in buckets]  # no wait until recorded

    def prefetch(self) -> None:
        if not self._slots:
            self._slots = [
                torch.empty(self._slot_bytes, dtype=torch.uint8, device=self._device)
                for _ in range(NUM_SLOTS)
            ]
            if self._cuda:  # queued work may use the slots' memory
                self._inward.wait_stream(torch.cuda.current_stream(self._device))
        while self._num_fetched < min(NUM_SLOTS, len(self._buckets)):
            self._fetch()

    def visits(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield each bucket's index and its state on the device, to be changed in place."""
        self.prefetch()
        stream = torch.cuda.current_stream(self._device) if self._cuda else None
        for index in range(len(self._buckets)):
            if stream is not None:
                stream.wait_event(self._arrived[index])
            yield index, self._views(index)
            self._send_back(index)
            # The previous bucket's return is queued, so its slot can take the next fetch.
            if index and self._num_fetched < len(self._buckets):
                self._fetch()
        if stream is not None:
            stream.wait_stream(self._outward)
        self._slots, self._num_fetched = [], 0

    def settle(self) -> None:
        """Wait until the host has the newest state, and drop fetched windows."""
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
            host = self.host[id(bucket.shards)][key][bucket.begin : bucket.end]
            (view if inward else host).copy_(host if inward else view, non_blocking=True)

    def _views(self, index: int) -> dict[str, Tensor]:
        bucket, slot = self._buckets[index], self._slots[index % NUM_SLOTS]
        size = bucket.num_bytes
        return {
            key: slot[i * size : (i + 1) * size].view(bucket.shards.dtype)
            for i, key in enumerate(bucket.group.rule.keys)
        }

    def _host_block(self, length: int, dtype: torch.dtype) -> Tensor:
        block, error = host_block(length * dtype.itemsize, self._device)
        if error:
            raise RunFailed(
                f"trainer.memory.optimizer_offload: {block.nbytes / 2**30:.1f} GiB of host memory "
                f"cannot be pinned (CUDA error {error}); free host memory, shard over more ranks, "
                "or set it to false"
            )
        return block.view(dtype)
