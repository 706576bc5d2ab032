"""Divide weights into buckets (ranges of values) that optimizers update one at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from orrery.models.placement import local_tensor
from orrery.trainer.optim.gradient import sharding_axes

ALIGNMENT = 128  # in values, for vectorised kernels


@dataclass(frozen=True)
class WeightPart:
    """Flat slices of a weight, its gradient and its state.

    If the rule has `needs_whole_shards`, they are whole shards in their own shape.
    """

    source: nn.Parameter
    weight: Tensor
    gradient: Tensor
    state: dict[str, Tensor]


class UpdateRule:
    """`keys` names a rule's state tensors, each with the weight's shape.

    `counts_steps` adds `step`, a float32 scalar that counts earlier steps.
    """

    keys: tuple[str, ...] = ()
    counts_steps = False
    needs_whole_shards = False

    def __init__(self, spec: Any):
        self.spec = spec

    def update(
        self, parts: list[WeightPart], lr: float, weight_decay: float, divisor: Tensor | None
    ) -> None:
        """Update weights in place with gradients / `divisor`. Gradients may be overwritten."""
        raise NotImplementedError


@dataclass
class ParamGroup:
    """Weights that share an update rule. `lr` is the peak learning rate."""

    weights: list[nn.Parameter]
    rule: UpdateRule
    lr: float
    weight_decay: float


def split_group(group: ParamGroup, share: float) -> tuple[ParamGroup, ParamGroup]:
    if group.rule.needs_whole_shards:  # all ranks must split alike, since they exchange buckets
        sizes = [-(-weight.numel() // _num_shards(weight)) for weight in group.weights]
    else:
        sizes = [local_tensor(weight).numel() for weight in group.weights]
    room = share * sum(sizes)
    count = sum(size <= room for size in accumulate(sizes))
    first, rest = group.weights[:count], group.weights[count:]
    return replace(group, weights=first), replace(group, weights=rest)


def is_bias(name: str) -> bool:
    return name.endswith("bias")  # by name, because stacked biases have `ndim` 2


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
        """Yield (begin, end, slices) like `windows`, without splitting shards.

        A window has the same parameters on all ranks.
        """
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
