"""Keep optimizer state in pinned host memory, and copy it during computation.

- A slot is device memory for a bucket's state during the bucket's update.
- `StateStream` copies state to the device during a step's last backward pass, and back during the
  next step's first micro-batch. `manifest/budget/state_rooms.py` plans the slots' memory.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from orrery.manifest.budget.state_rooms import StateRooms, state_rooms
from orrery.manifest.budget.trainer_memory import NUM_SLOTS
from orrery.manifest.errors import RunFailed
from orrery.manifest.schema import Trainer
from orrery.models.causal_lm import CausalLm
from orrery.models.placement import local_tensor
from orrery.trainer.host_memory import host_block
from orrery.trainer.optim.buckets import Bucket


class StateOffload:
    def __init__(self, buckets: list[Bucket]):
        self._buckets = buckets
        self.device = local_tensor(buckets[0].shards.weights[0]).device
        self.host: dict[int, dict[str, Tensor]] = {}
        for bucket in buckets:
            shards = bucket.shards
            if id(shards) not in self.host:
                self.host[id(shards)] = {
                    key: self._host_block(shards.length, shards.dtype)
                    for key in bucket.group.rule.keys
                }
        self._slot_bytes = max(bucket.num_bytes * len(bucket.group.rule.keys) for bucket in buckets)
        self.drains_late = False  # whether slots stay allocated until `drain`
        self._limit = NUM_SLOTS
        self._slots: dict[int, Tensor] = {}
        self._leaving: deque[tuple[int, Tensor]] = deque()  # (bucket, slot), oldest first
        self._num_fetched = 0
        self._cuda = self.device.type == "cuda"
        if self._cuda:
            self._inward = torch.cuda.Stream(self.device)
            self._outward = torch.cuda.Stream(self.device)
            self._arrived = [torch.cuda.Event() for _ in buckets]
            # A wait for an unrecorded event returns at once.
            self._returned = [torch.cuda.Event() for _ in buckets]

    @property
    def held_bytes(self) -> int:
        return (len(self._slots) + len(self._leaving)) * self._slot_bytes

    @torch.no_grad()
    def fill(self, room_bytes: int = 0) -> None:
        """Copy the next buckets' state to the device while slots fit into `room_bytes`."""
        self._limit = max(NUM_SLOTS, room_bytes // max(1, self._slot_bytes))
        self._fetch_all()

    @torch.no_grad()
    def drain(self, room_bytes: int = 0) -> None:
        """Free slots that are copied to the host, until the others fit into `room_bytes`."""
        while self._leaving and self.held_bytes > room_bytes:
            index, _ = self._leaving.popleft()
            if self._cuda:
                torch.cuda.current_stream(self.device).wait_event(self._returned[index])

    def visits(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield each bucket's index and device state, to be changed in place."""
        self._fetch_all()
        for index in range(len(self._buckets)):
            if self._cuda:
                torch.cuda.current_stream(self.device).wait_event(self._arrived[index])
            yield index, self._views(index)
            self._send_back(index)
            self._fetch_all()
        self._num_fetched, self._limit = 0, NUM_SLOTS
        if not self.drains_late:
            self.drain()

    def settle(self) -> None:
        """Wait until the host has the newest state. Discard prefetched state."""
        if self._cuda:
            self._inward.synchronize()
            self._outward.synchronize()
        self._slots, self._num_fetched = {}, 0
        self._leaving.clear()

    def _fetch_all(self) -> None:
        while self._num_fetched < len(self._buckets):
            if len(self._slots) + len(self._leaving) < self._limit:
                slot = torch.empty(self._slot_bytes, dtype=torch.uint8, device=self.device)
                if self._cuda:  # queued kernels may still use this memory
                    self._inward.wait_stream(torch.cuda.current_stream(self.device))
            elif self._leaving:
                index, slot = self._leaving.popleft()
                if self._cuda:
                    self._inward.wait_event(self._returned[index])
            else:
                return
            self._slots[self._num_fetched] = slot
            self._fetch(self._num_fetched)
            self._num_fetched += 1

    def _fetch(self, index: int) -> None:
        if not self._cuda:
            self._copy(index, inward=True)
            return
        with torch.cuda.stream(self._inward):
            self._inward.wait_event(self._returned[index])
            self._copy(index, inward=True)
            self._arrived[index].record(self._inward)

    def _send_back(self, index: int) -> None:
        if self._cuda:
            self._outward.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._outward):
                self._copy(index, inward=False)
                self._returned[index].record(self._outward)
        else:
            self._copy(index, inward=False)
        self._leaving.append((index, self._slots.pop(index)))

    def _copy(self, index: int, inward: bool) -> None:
        bucket = self._buckets[index]
        for key, view in self._views(index).items():
            host = self.host[id(bucket.shards)][key][bucket.begin : bucket.end]
            (view if inward else host).copy_(host if inward else view, non_blocking=True)

    def _views(self, index: int) -> dict[str, Tensor]:
        bucket, slot = self._buckets[index], self._slots[index]
        size = bucket.num_bytes
        return {
            key: slot[i * size : (i + 1) * size].view(bucket.shards.dtype)
            for i, key in enumerate(bucket.group.rule.keys)
        }

    def _host_block(self, length: int, dtype: torch.dtype) -> Tensor:
        block, error = host_block(length * dtype.itemsize, self.device)
        if error:
            raise RunFailed(
                f"trainer.memory.optimizer_offload: {block.nbytes / 2**30:.1f} GiB of host memory "
                f"cannot be pinned (CUDA error {error}); free host memory, shard over more ranks, "
                "or set it to false"
            )
        return block.view(dtype)


class StateStream:
    """Copy optimizer state while `blocks` compute.

    `one`, `many`: memory plans for one and for several micro-batches.
    """

    def __init__(
        self, offload: StateOffload, blocks: Sequence[nn.Module], one: StateRooms, many: StateRooms
    ):
        self._offload, self._rooms, self._one, self._many = offload, one, one, many
        self._is_first = self._is_last = False
        offload.drains_late = True
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._before_forward, index))
            block.register_forward_hook(partial(self._after_forward, index))

    def begin(self, index: int, count: int) -> None:
        self._is_first, self._is_last = index == 0, index == count - 1
        self._rooms = self._one if count == 1 else self._many
        if not self._is_first:
            self._offload.drain()

    def _before_forward(self, index: int, *_: Any) -> None:
        trains = torch.is_grad_enabled() and self._is_first
        self._offload.drain(self._rooms.forward[index] if trains else 0)

    def _after_forward(self, index: int, block: nn.Module, inputs: Any, outputs: Any) -> None:
        hidden = outputs[0]
        if not hidden.requires_grad:
            return
        if index == len(self._rooms.forward) - 1:
            self._offload.drain(self._rooms.head)
        hidden.register_hook(partial(self._before_backward, index))

    def _before_backward(self, index: int, gradient: Tensor) -> None:
        if self._is_first:
            self._offload.drain(self._rooms.backward[index])
        if self._is_last:
            self._offload.fill(self._rooms.arriving[index])


def stream_state(
    offload: StateOffload | None, network: CausalLm, trainer: Trainer
) -> StateStream | None:
    if offload is None or network.config.family == "hugging_face":
        return None
    capacity = 0
    if offload.device.type == "cuda":
        capacity = torch.cuda.get_device_properties(offload.device).total_memory
    one, many = (state_rooms(network.config, trainer, count, capacity) for count in (1, 2))
    return StateStream(offload, list(network.layers), one, many)
