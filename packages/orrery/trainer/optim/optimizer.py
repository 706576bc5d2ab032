"""Update groups of weights in buckets, each group by its own rule.

`FlatShards` concatenates a group's local shards. A bucket is a window of it. State exists before
the first step so that checkpoints can load it. State is sharded like its weight. Offloaded state is
a host tensor of the local shard. A weight without a gradient does not change.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from orrery.manifest.budget.trainer_memory import NUM_SLOTS, OFFLOADED_BYTES, WHOLE_BYTES
from orrery.manifest.errors import RunFailed
from orrery.models.placement import Box, local_box, local_tensor
from orrery.trainer.host_memory import host_block
from orrery.trainer.optim.gradient import sharding_axes

RESIDENT_BYTES = 1 << 30  # size of resident state's buckets, bounds temporary memory
ALIGNMENT = 128  # in values, for vectorised kernels


@dataclass(frozen=True)
class WeightPart:
    """A part of one weight, with its gradient and state on the device.

    Tensors are flat, or whole local shards if the rule needs these.
    """

    source: nn.Parameter
    weight: Tensor
    gradient: Tensor
    state: dict[str, Tensor]


class UpdateRule:
    """An update of weights. `keys` names its state tensors, each with the weight's shape.

    With `counts_steps`, state also has `step`, a float32 scalar that counts earlier steps.
    """

    keys: tuple[str, ...] = ()
    counts_steps = False
    needs_whole_shards = False

    def __init__(self, spec: Any):
        self.spec = spec

    def update(
        self, parts: list[WeightPart], lr: float, weight_decay: float, divisor: Tensor | None
    ) -> None:
        """Move the weights by gradient / divisor. Gradients may be overwritten."""
        raise NotImplementedError


@dataclass
class ParamGroup:
    """Weights that share a rule. `lr` is the schedule's peak."""

    weights: list[nn.Parameter]
    rule: UpdateRule
    lr: float
    weight_decay: float


def is_bias(name: str) -> bool:
    """Return whether the name is a bias's. Stacked experts' biases have two dimensions."""
    return name.endswith("bias")


@dataclass(frozen=True)
class ShardSlice:
    """Values `start` to `stop` of a weight's local shard, stored at `offset` in `FlatShards`."""

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
    """The local shards of a group's weights of one dtype, concatenated into one flat tensor."""

    weights: list[nn.Parameter]
    dtype: torch.dtype
    starts: list[int] = field(default_factory=list)
    length: int = 0

    def __post_init__(self) -> None:
        for weight in self.weights:
            self.starts.append(self.length)
            self.length += -(-local_tensor(weight).numel() // ALIGNMENT) * ALIGNMENT

    def windows(self, num_values: int) -> Iterator[tuple[int, int, list[ShardSlice]]]:
        """Yield windows of at most `num_values`. A window may cut a weight."""
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
        """Yield windows of whole weights, the same on all ranks despite different local sizes."""
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


class BucketedOptimizer:
    """Update weights bucket by bucket.

    Call `set_rate` and `step` once per training step. `prefetch` and `prepare` are optional.
    """

    def __init__(self, groups: list[ParamGroup], offload: bool, bucket_bytes: int | None = None):
        self.groups = [group for group in groups if group.weights]
        self._rate = 1.0
        self._state: dict[nn.Parameter, dict[str, Tensor]] = {}
        self._buckets: list[Bucket] = []
        self._prepared: list[list[WeightPart]] = []
        with torch.no_grad():
            for group in self.groups:
                default = OFFLOADED_BYTES if offload else RESIDENT_BYTES
                if group.rule.needs_whole_shards:
                    default = WHOLE_BYTES
                self._buckets += _buckets(group, bucket_bytes or default)
            self._offload = StateOffload(self._buckets) if offload and self._buckets else None
            for group in self.groups:
                self._make_state(group)

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """Return state by weight and key. Offloaded state is a host tensor of the local shard."""
        if self._offload is not None:
            self._offload.settle()
        return self._state

    def set_rate(self, factor: float) -> None:
        self._rate = factor

    def prefetch(self) -> None:
        if self._offload is not None:
            self._offload.prefetch()

    @torch.no_grad()
    def prepare(self) -> None:
        if self._offload is None:
            self._prepared = [self._parts(bucket, None) for bucket in self._buckets]

    @torch.no_grad()
    def step(self, divisor: Tensor | None = None) -> None:
        """Update each weight that has a gradient. `divisor` (float32 scalar) divides gradients."""
        divisors: dict[torch.device, Tensor | None] = {}
        prepared, self._prepared = self._prepared, []
        for index, (bucket, windows) in enumerate(self._visits()):
            group = bucket.group
            parts = prepared[index] if prepared else self._parts(bucket, windows)
            if parts:
                device = parts[0].weight.device
                if device not in divisors:  # fused kernels would copy it with a sync
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
        if self._offload is None:
            yield from ((bucket, None) for bucket in self._buckets)
        else:
            for index, windows in self._offload.visits():
                yield self._buckets[index], windows

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

    def _make_state(self, group: ParamGroup) -> None:
        rule = group.rule
        for weight in group.weights:
            own = self._state.setdefault(weight, {})
            if self._offload is None:
                for key in rule.keys:
                    own[key] = torch.zeros_like(weight, requires_grad=False)
            if rule.counts_steps:
                device = local_tensor(weight).device
                own["step"] = torch.zeros((), dtype=torch.float32, device=device)
        if self._offload is None:
            return
        own_buckets = (bucket for bucket in self._buckets if bucket.group is group)
        for shards in {id(bucket.shards): bucket.shards for bucket in own_buckets}.values():
            for weight, start in zip(shards.weights, shards.starts, strict=True):
                shard = local_tensor(weight)
                for key, values in self._offload.host[id(shards)].items():
                    part = values[start : start + shard.numel()].view(shard.shape)
                    self._state[weight][key] = part


def named_state(
    optimizer: BucketedOptimizer, weights: dict[str, nn.Parameter]
) -> Iterator[tuple[str, str, Tensor, Box]]:
    """Yield (key, weight name, local tensor, box) in the order of `weights`, with keys sorted.

    Fill a tensor in place to load it. Scalars have the box () and are equal on all ranks.
    """
    state = optimizer.state
    for name, weight in weights.items():
        for key, tensor in sorted(state.get(weight, {}).items()):
            yield key, name, local_tensor(tensor), local_box(weight) if tensor.ndim else ()


def _buckets(group: ParamGroup, bucket_bytes: int) -> list[Bucket]:
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


# State in host memory


class StateOffload:
    """Keep optimizer state in pinned host memory, and copy it to the device for the step.

    `host[id(shards)][key]` is the host block of one `FlatShards`. From `prefetch` to the end of the
    step the device has three slots: while bucket i is updated, i + 1 is copied in and i − 1 out,
    each direction on its own stream.
    """

    def __init__(self, buckets: list[Bucket]):
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
        self._num_fetched = 0  # since the last step ended, or since `settle`
        self._cuda = self._device.type == "cuda"
        if self._cuda:
            self._inward = torch.cuda.Stream(self._device)
            self._outward = torch.cuda.Stream(self._device)
            self._arrived = [torch.cuda.Event() for _ in buckets]
            # a wait for an unrecorded event returns at once
            self._returned = [torch.cuda.Event() for _ in buckets]

    def prefetch(self) -> None:
        if not self._slots:
            self._slots = [
                torch.empty(self._slot_bytes, dtype=torch.uint8, device=self._device)
                for _ in range(NUM_SLOTS)
            ]
            if self._cuda:
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
            # The previous bucket's copy out is queued, so its slot is free for the next.
            if index and self._num_fetched < len(self._buckets):
                self._fetch()
        if stream is not None:
            stream.wait_stream(self._outward)
        self._slots, self._num_fetched = [], 0

    def settle(self) -> None:
        """Wait until the host has the newest state. Discard state prefetched to the device."""
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
