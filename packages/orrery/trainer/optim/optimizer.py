"""Update weights in buckets, by the rule of their group.

State is sharded like its weight, and exists before the first step, so that checkpoints fill it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from orrery.manifest.budget.trainer_memory import OFFLOADED_BYTES, WHOLE_BYTES
from orrery.models.placement import Box, local_box, local_tensor
from orrery.trainer.optim.buckets import (
    Bucket,
    ParamGroup,
    ShardSlice,
    WeightPart,
    make_buckets,
    split_group,
)
from orrery.trainer.optim.state_offload import StateOffload

RESIDENT_BYTES = 1 << 30  # bucket size, to bound temporary memory


class BucketedOptimizer:
    def __init__(
        self,
        groups: list[ParamGroup],
        offload: bool,
        bucket_bytes: int | None = None,
        resident: float = 0.0,
    ):
        """With `offload`, keep only the fraction `resident` of the state on the device."""
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
                if device not in divisors:  # at most one sync per device
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

    `box`: region of the full tensor, or () for a scalar. Fill these tensors in place to load state.
    """
    state = optimizer.state
    for name, weight in weights.items():
        for key, tensor in sorted(state.get(weight, {}).items()):
            yield key, name, local_tensor(tensor), local_box(weight) if tensor.ndim else ()
