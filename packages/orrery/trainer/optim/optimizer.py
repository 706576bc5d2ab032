"""Update weights in buckets (ranges of values). Each group of weights has an update rule.

- State is sharded like its weight. It exists before the first step, for a checkpoint to fill.
- Offloaded state lies in pinned host memory. A slot is device memory for one bucket's state.
- `StateStream` copies state to the device during a step's last backward pass. After a bucket's
  update, its state is copied back. The next step's first micro-batch waits for these copies.
- `manifest/budget/trainer_memory.py` plans the slots' memory.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from orrery.manifest.budget.trainer_memory import (
    NUM_SLOTS,
    OFFLOADED_BYTES,
    WHOLE_BYTES,
    StateRooms,
    state_rooms,
)
from orrery.manifest.errors import RunFailed
from orrery.manifest.schema import Trainer
from orrery.models.causal_lm import CausalLm
from orrery.models.placement import Box, local_box, local_tensor
from orrery.trainer.host_memory import host_block
from orrery.trainer.optim.gradient import sharding_axes
from orrery.trainer.optim.rules import ParamGroup, WeightPart

ALIGNMENT = 128  # shards start at multiples of it, for vectorised kernels
RESIDENT_BYTES = 1 << 30  # bucket size for state on the device, to bound temporary memory


def split_group(group: ParamGroup, share: float) -> tuple[ParamGroup, ParamGroup]:
    if group.rule.needs_whole_shards:  # all ranks must split alike, because they exchange buckets
        sizes = [-(-weight.numel() // _num_shards(weight)) for weight in group.weights]
    else:
        sizes = [local_tensor(weight).numel() for weight in group.weights]
    room = share * sum(sizes)
    count = sum(size <= room for size in accumulate(sizes))
    first, rest = group.weights[:count], group.weights[count:]
    return replace(group, weights=first), replace(group, weights=rest)


@dataclass(frozen=True)
class ShardSlice:
    """Values `start` to `stop` of a local shard, at `offset` in `FlatShards`."""

    weight: nn.Parameter
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    group: ParamGroup
    shards: "FlatShards"
    begin: int
    end: int
    slices: list[ShardSlice]

    @property
    def num_bytes(self) -> int:
        return (self.end - self.begin) * self.shards.dtype.itemsize


@dataclass
class FlatShards:
    """Layout of a group's local shards of one dtype in one flat tensor."""

    weights: list[nn.Parameter]
    dtype: torch.dtype
    starts: list[int] = field(default_factory=list)
    length: int = 0

    def __post_init__(self) -> None:
        for weight in self.weights:
            self.starts.append(self.length)
            self.length += -(-local_tensor(weight).numel() // ALIGNMENT) * ALIGNMENT

    def windows(self, num_values: int) -> Iterator[tuple[int, int, list[ShardSlice]]]:
        shards = [
            (weight, start, local_tensor(weight).numel())
            for weight, start in zip(self.weights, self.starts, strict=True)
        ]
        position = 0
        for begin in range(0, self.length, num_values):
            end = min(begin + num_values, self.length)
            while shards[position][1] + shards[position][2] <= begin:
                position += 1
            slices = []
            for weight, start, size in shards[position:]:
                if start >= end:
                    break
                low, high = max(begin - start, 0), min(end - start, size)
                if low < high:
                    slices.append(ShardSlice(weight, low, high, start + low))
            yield begin, end, slices

    def whole_windows(self, num_values: int) -> Iterator[tuple[int, int, list[ShardSlice]]]:
        """Yield (begin, end, slices) of whole shards, with the same parameters on all ranks."""
        slices: list[ShardSlice] = []
        begin = share = 0
        for weight, start in zip(self.weights, self.starts, strict=True):
            own = -(-weight.numel() // _num_shards(weight))
            if slices and share + own > num_values:
                yield begin, start, slices
                begin, share, slices = start, 0, []
            share += own
            slices.append(ShardSlice(weight, 0, local_tensor(weight).numel(), start))
        if slices:
            yield begin, self.length, slices


def make_buckets(group: ParamGroup, bucket_bytes: int) -> list[Bucket]:
    rule, found = group.rule, []
    for dtype in dict.fromkeys(weight.dtype for weight in group.weights):
        shards = FlatShards([weight for weight in group.weights if weight.dtype == dtype], dtype)
        num_values = bucket_bytes // (dtype.itemsize * max(len(rule.keys), 1))
        num_values = max(num_values // ALIGNMENT * ALIGNMENT, ALIGNMENT)
        windows = shards.whole_windows if rule.needs_whole_shards else shards.windows
        found += [Bucket(group, shards, *window) for window in windows(num_values)]
    return found


def _num_shards(weight: Tensor) -> int:
    count = 1
    for axis in sharding_axes(weight):
        count *= weight.device_mesh.size(axis)  # type: ignore[attr-defined]
    return count


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
        self._leaving: deque[tuple[int, Tensor]] = deque()  # (bucket, slot) on the way to the host
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
        """Copy the next buckets' state to the device while slots fit into `room_bytes`.

        Use at least `NUM_SLOTS` slots.
        """
        self._limit = max(NUM_SLOTS, room_bytes // max(1, self._slot_bytes))
        self._fetch_all()

    @torch.no_grad()
    def drain(self, room_bytes: int = 0) -> None:
        """Free slots copied to the host, oldest first, until the rest fits into `room_bytes`."""
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
                if self._cuda:  # queued kernels may still use the slot's memory
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
                "or set the field to false"
            )
        return block.view(dtype)


class StateStream:
    """Copy state while `blocks` run. `one`, `many`: plans for one and several micro-batches."""

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


class BucketedOptimizer:
    def __init__(
        self,
        groups: list[ParamGroup],
        offload: bool,
        bucket_bytes: int | None = None,
        resident: float = 0.0,
    ):
        """With `offload`, keep only the fraction `resident` of state on the device."""
        self._rate = 1.0
        self._state: dict[nn.Parameter, dict[str, Tensor]] = {}
        self._prepared: list[list[WeightPart]] = []
        parts = [split_group(group, resident if offload else 1.0) for group in groups]
        staying = [stays for stays, _ in parts if stays.weights]
        leaving = [leaves for _, leaves in parts if leaves.weights]
        self.groups = staying + leaving

        def buckets(group: ParamGroup, default: int) -> list[Bucket]:
            default = WHOLE_BYTES if group.rule.needs_whole_shards else default
            return make_buckets(group, bucket_bytes or default)

        with torch.no_grad():
            self._staying = [one for group in staying for one in buckets(group, RESIDENT_BYTES)]
            self._leaving = [one for group in leaving for one in buckets(group, OFFLOADED_BYTES)]
            self.offload = StateOffload(self._leaving) if self._leaving else None
            for group in staying:
                self._make_state(group, is_offloaded=False)
            for group in leaving:
                self._make_state(group, is_offloaded=True)

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        if self.offload is not None:
            self.offload.settle()
        return self._state

    def set_rate(self, factor: float) -> None:
        self._rate = factor

    def prefetch(self) -> None:
        if self.offload is not None:
            self.offload.fill()

    @torch.no_grad()
    def prepare(self) -> None:
        self._prepared = [self._parts(bucket, None) for bucket in self._staying]

    @torch.no_grad()
    def step(self, divisor: Tensor | None = None) -> None:
        divisors: dict[torch.device, Tensor | None] = {}
        prepared, self._prepared = self._prepared, []
        for index, (bucket, windows) in enumerate(self._visits()):
            group = bucket.group
            is_prepared = index < len(prepared)
            parts = prepared[index] if is_prepared else self._parts(bucket, windows)
            if parts:
                device = parts[0].weight.device
                if device not in divisors:  # convert once per device, because each transfer syncs
                    divisors[device] = None if divisor is None else divisor.to(device)
                rate = group.lr * self._rate
                group.rule.update(parts, rate, group.weight_decay, divisors[device])
        counters = [
            self._state[weight]["step"]
            for group in self.groups
            if group.rule.counts_steps
            for weight in group.weights
            if weight.grad is not None
        ]
        if counters:
            torch._foreach_add_(counters, 1)

    def zero_grad(self) -> None:
        self._prepared = []
        for group in self.groups:
            for weight in group.weights:
                weight.grad = None

    def _visits(self) -> Iterator[tuple[Bucket, dict[str, Tensor] | None]]:
        yield from ((bucket, None) for bucket in self._staying)
        if self.offload is not None:
            for index, windows in self.offload.visits():
                yield self._leaving[index], windows

    def _parts(self, bucket: Bucket, windows: dict[str, Tensor] | None) -> list[WeightPart]:
        return [
            self._part(bucket, one, windows) for one in bucket.slices if one.weight.grad is not None
        ]

    def _part(
        self, bucket: Bucket, piece: ShardSlice, windows: dict[str, Tensor] | None
    ) -> WeightPart:
        weight, rule, own = piece.weight, bucket.group.rule, self._state[piece.weight]
        shard = local_tensor(weight).detach()
        first = piece.offset - bucket.begin

        def part(tensor: Tensor) -> Tensor:
            if rule.needs_whole_shards:
                return tensor
            return tensor.view(-1)[piece.start : piece.stop]

        if windows is None:
            state = {key: part(local_tensor(own[key])) for key in rule.keys}
        else:
            last = first + piece.stop - piece.start
            state = {key: windows[key][first:last] for key in rule.keys}
            if rule.needs_whole_shards:
                state = {key: value.view(shard.shape) for key, value in state.items()}
        if rule.counts_steps:
            state["step"] = own["step"]
        assert weight.grad is not None
        return WeightPart(weight, part(shard), part(local_tensor(weight.grad)), state)

    def _make_state(self, group: ParamGroup, is_offloaded: bool) -> None:
        rule = group.rule
        for weight in group.weights:
            own = self._state.setdefault(weight, {})
            if not is_offloaded:
                for key in rule.keys:
                    own[key] = torch.zeros_like(weight, requires_grad=False)
            if rule.counts_steps:
                device = local_tensor(weight).device
                own["step"] = torch.zeros((), dtype=torch.float32, device=device)
        if not is_offloaded:
            return
        assert self.offload is not None
        own_buckets = (bucket for bucket in self._leaving if bucket.group is group)
        for shards in {id(bucket.shards): bucket.shards for bucket in own_buckets}.values():
            for weight, start in zip(shards.weights, shards.starts, strict=True):
                shard = local_tensor(weight)
                for key, values in self.offload.host[id(shards)].items():
                    part = values[start : start + shard.numel()].view(shard.shape)
                    self._state[weight][key] = part


def named_state(
    optimizer: BucketedOptimizer, weights: dict[str, nn.Parameter]
) -> Iterator[tuple[str, str, Tensor, Box]]:
    """Yield (state key, weight name, local tensor, box) in `weights` order, with sorted keys.

    `box`: region of the full tensor, or () for a scalar. To load state, write to the tensors.
    """
    state = optimizer.state
    for name, weight in weights.items():
        for key, tensor in sorted(state.get(weight, {}).items()):
            yield key, name, local_tensor(tensor), local_box(weight) if tensor.ndim else ()
