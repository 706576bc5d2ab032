"""The optimizer: groups of weights, each with a rule, stepped bucket by bucket.

- A group's weights lie end to end on a line; a bucket is a window of that line. A rule that works value by value gets windows of even
  size wherever they fall; a rule that wants whole matrices gets whole weights, the same ones on every rank at a time.
- State exists from the start, so it can be counted, saved and loaded before any step: under each key a tensor like its weight, and
  `step`, a float32 scalar, for rules that count. Without offload a sharded weight's state is sharded like it.
- With offload the lines of state lie in host memory, and their windows visit the device (`offload.py`). The arithmetic is the same.
- A weight without gradient is left alone, and does not count the step.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from orrery.models.placement import Box, local_box, local_tensor
from orrery.trainer.optim.gradient import sharding_axes
from orrery.trainer.optim.offload import Offload

# Bytes of state on this rank in a bucket (of weights, where a rule has no state).
OFFLOADED_BYTES = (
    128 << 20
)  # long enough for the bus to be at full speed; three of them are on the device
RESIDENT_BYTES = (
    1 << 30
)  # nothing has to fit, so few calls; what a rule allocates is bounded all the same
WHOLE_BYTES = (
    256 << 20
)  # enough matrices to share out evenly; offloaded or not, so that batches, and with them bits, are the same
ALIGNMENT = (
    128  # values: windows, and the weights on a line, begin where vectorised kernels like it
)


@dataclass(frozen=True)
class Piece:
    """A part of one weight, with its gradient and state, on the device: flat, or the whole local shard where the rule wants that."""

    source: nn.Parameter
    weight: Tensor
    gradient: Tensor
    state: dict[str, Tensor]


class Rule(Protocol):
    """How weights move. `keys` are its states that are like their weight; `counts`: whether it has `step`, the steps done before."""

    keys: tuple[str, ...]
    counts: bool
    whole: bool

    def update(
        self, pieces: list[Piece], lr: float, weight_decay: float, divisor: Tensor | None
    ) -> None:
        """Move the weights. Gradients are to be divided by `divisor`, and may be overwritten."""


@dataclass
class Group:
    """Weights that move by one rule; `lr` is the peak of the schedule."""

    weights: list[nn.Parameter]
    rule: Rule
    lr: float
    weight_decay: float


def decayed_apart(
    rule: Rule, lr: float, weight_decay: float, weights: dict[str, nn.Parameter]
) -> list[Group]:
    """Matrices, which decay, and biases and what has fewer than two dimensions, which do not, both by one rule."""
    decays = {name: weight.ndim >= 2 and not is_bias(name) for name, weight in weights.items()}
    return [
        Group([weight for name, weight in weights.items() if decays[name]], rule, lr, weight_decay),
        Group([weight for name, weight in weights.items() if not decays[name]], rule, lr, 0.0),
    ]


def is_bias(name: str) -> bool:
    """By its name, since those of stacked experts are stacked too: [E, width]."""
    return name.endswith("bias")


@dataclass(frozen=True)
class Cut:
    """Values `start` to `stop` of a weight's local shard; they begin at `offset` of the line."""

    weight: nn.Parameter
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    group: Group
    line: "Line"
    begin: int
    end: int
    cuts: list[Cut]


@dataclass
class Line:
    """Local shards of weights of one dtype, end to end, and where each begins."""

    weights: list[nn.Parameter]
    dtype: torch.dtype
    starts: list[int] = field(default_factory=list)
    length: int = 0

    def __post_init__(self) -> None:
        for weight in self.weights:
            self.starts.append(self.length)
            self.length += -(-local_tensor(weight).numel() // ALIGNMENT) * ALIGNMENT

    def windows(self, num_values: int) -> Iterator[tuple[int, int, list[Cut]]]:
        """Windows of at most `num_values`, which cut weights where they end."""
        shards = [
            (weight, start, local_tensor(weight).numel())
            for weight, start in zip(self.weights, self.starts, strict=True)
        ]
        position = 0
        for begin in range(0, self.length, num_values):
            end = min(begin + num_values, self.length)
            while shards[position][1] + shards[position][2] <= begin:
                position += 1
            cuts = []
            for weight, start, size in shards[position:]:
                if start >= end:
                    break
                low, high = max(begin - start, 0), min(end - start, size)
                if low < high:
                    cuts.append(Cut(weight, low, high, start + low))
            yield begin, end, cuts

    def whole_windows(self, num_values: int) -> Iterator[tuple[int, int, list[Cut]]]:
        """Windows of whole weights, closed once an even share of them would exceed `num_values`: so every rank closes at the same."""
        cuts: list[Cut] = []
        begin = share = 0
        for weight, start in zip(self.weights, self.starts, strict=True):
            one = -(-weight.numel() // _num_shards(weight))
            if cuts and share + one > num_values:
                yield begin, start, cuts
                begin, share, cuts = start, 0, []
            share += one
            cuts.append(Cut(weight, 0, local_tensor(weight).numel(), start))
        if cuts:
            yield begin, self.length, cuts


class Optimizer:
    """`set_rate`, perhaps `prefetch` and `prepare`, and `step`, once a training step. `state` is read and filled in place between steps."""

    def __init__(self, groups: list[Group], offload: bool, bucket_bytes: int | None = None):
        self.groups = [group for group in groups if group.weights]
        self._rate = 1.0
        self._state: dict[nn.Parameter, dict[str, Tensor]] = {}
        self._buckets: list[Bucket] = []
        self._prepared: list[list[Piece]] = []
        with torch.no_grad():
            for group in self.groups:
                normal = (
                    WHOLE_BYTES
                    if group.rule.whole
                    else OFFLOADED_BYTES
                    if offload
                    else RESIDENT_BYTES
                )
                self._buckets += _buckets(group, bucket_bytes or normal)
            self._offload = Offload(self._buckets) if offload and self._buckets else None
            for group in self.groups:
                self._make_state(group)

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """By weight and key. Under offload, host tensors of this rank's shard; looking at them waits until they are back."""
        if self._offload is not None:
            self._offload.settle()
        return self._state

    def set_rate(self, factor: float) -> None:
        """The schedule's factor: every group steps with this share of its peak rate."""
        self._rate = factor

    def prefetch(self) -> None:
        """Begin to fetch the first buckets of offloaded state, say while a backward pass runs. Only a hint; `step` does without."""
        if self._offload is not None:
            self._offload.prefetch()

    @torch.no_grad()
    def prepare(self) -> None:
        """Find the pieces of a step whose gradients are there, or will be once the device has done what it was told. Only a hint."""
        if self._offload is None:
            self._prepared = [self._pieces(bucket, None) for bucket in self._buckets]

    @torch.no_grad()
    def step(self, divisor: Tensor | None = None) -> None:
        """Move all weights that have a gradient, after dividing gradients by `divisor` (a float32 scalar, see `clip`)."""
        divisors: dict[torch.device, Tensor | None] = {}
        prepared, self._prepared = self._prepared, []
        for index, (bucket, windows) in enumerate(self._visits()):
            group = bucket.group
            pieces = prepared[index] if prepared else self._pieces(bucket, windows)
            if pieces:
                device = pieces[0].weight.device
                if (
                    device not in divisors
                ):  # here, and waiting: the fused kernels copy to a CPU without waiting for the value
                    divisors[device] = None if divisor is None else divisor.to(device)
                group.rule.update(
                    pieces, group.lr * self._rate, group.weight_decay, divisors[device]
                )
        counters = [
            self._state[w]["step"]
            for g in self.groups
            if g.rule.counts
            for w in g.weights
            if w.grad is not None
        ]
        if counters:
            torch._foreach_add_(counters, 1)

    def zero_grad(self) -> None:
        self._prepared = []
        for group in self.groups:
            for weight in group.weights:
                weight.grad = None

    def _visits(self) -> Iterator[tuple[Bucket, dict[str, Tensor] | None]]:
        """Every bucket, with its windows of state on the device where state is offloaded."""
        if self._offload is None:
            yield from ((bucket, None) for bucket in self._buckets)
        else:
            for index, windows in self._offload.visits():
                yield self._buckets[index], windows

    def _pieces(self, bucket: Bucket, windows: dict[str, Tensor] | None) -> list[Piece]:
        return [
            self._piece(bucket, cut, windows) for cut in bucket.cuts if cut.weight.grad is not None
        ]

    def _piece(self, bucket: Bucket, cut: Cut, windows: dict[str, Tensor] | None) -> Piece:
        weight, rule, own = cut.weight, bucket.group.rule, self._state[cut.weight]
        shard = local_tensor(weight).detach()
        first = cut.offset - bucket.begin

        def part(tensor: Tensor) -> Tensor:
            return tensor if rule.whole else tensor.view(-1)[cut.start : cut.stop]

        if windows is None:
            state = {key: part(local_tensor(own[key])) for key in rule.keys}
        else:
            state = {key: windows[key][first : first + cut.stop - cut.start] for key in rule.keys}
            state = {
                key: value.view(shard.shape) if rule.whole else value
                for key, value in state.items()
            }
        if rule.counts:
            state["step"] = own["step"]
        assert weight.grad is not None
        return Piece(weight, part(shard), part(local_tensor(weight.grad)), state)

    def _make_state(self, group: Group) -> None:
        for weight in group.weights:
            own = self._state.setdefault(weight, {})
            if self._offload is None:
                own.update(
                    {key: torch.zeros_like(weight, requires_grad=False) for key in group.rule.keys}
                )
            if group.rule.counts:
                own["step"] = torch.zeros(
                    (), dtype=torch.float32, device=local_tensor(weight).device
                )
        if self._offload is not None:
            for line in {
                id(bucket.line): bucket.line for bucket in self._buckets if bucket.group is group
            }.values():
                for weight, start in zip(line.weights, line.starts, strict=True):
                    shard = local_tensor(weight)
                    for key, values in self._offload.lines[id(line)].items():
                        self._state[weight][key] = values[start : start + shard.numel()].view(
                            shard.shape
                        )


def named_state(
    optimizer: Optimizer, weights: dict[str, nn.Parameter]
) -> Iterator[tuple[str, str, Tensor, Box]]:
    """(key, weight name, local tensor, box), in the order of `weights`, keys sorted; filling the tensors in place is loading.

    The box is the weight's own (`local_box`), or () for a scalar, which every rank holds; the tensor may be on the CPU.
    """
    state = optimizer.state
    for name, weight in weights.items():
        for key, tensor in sorted(state.get(weight, {}).items()):
            yield key, name, local_tensor(tensor), local_box(weight) if tensor.ndim else ()


def _buckets(group: Group, bucket_bytes: int) -> list[Bucket]:
    rule, found = group.rule, []
    for dtype in dict.fromkeys(weight.dtype for weight in group.weights):
        line = Line([weight for weight in group.weights if weight.dtype == dtype], dtype)
        num_values = (
            bucket_bytes // (dtype.itemsize * max(len(rule.keys), 1)) // ALIGNMENT * ALIGNMENT
        )
        windows = line.whole_windows if rule.whole else line.windows
        found += [Bucket(group, line, *window) for window in windows(max(num_values, ALIGNMENT))]
    return found


def _num_shards(weight: Tensor) -> int:
    count = 1
    for axis in sharding_axes(weight):
        count *= weight.device_mesh.size(axis)  # type: ignore[attr-defined]
    return count
