"""Connect DiLoCo's outer loop to a site's weights and ranks."""

from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from orrery.elastic.ledger import Behind
from orrery.elastic.loop import Floats, Fragment, is_within
from orrery.elastic.types import ElasticError, LeaseLost
from orrery.models.placement import local_tensor
from orrery.trainer.learner import Learner
from orrery.trainer.parallel.world import World

T = TypeVar("T")


class LearnerWeights:
    """This rank's trained weights, sorted by name, as one vector f32 [n]."""

    def __init__(self, learner: Learner) -> None:
        named = sorted(learner.weights.items())
        self._weights = [(name, local_tensor(weight.detach())) for name, weight in named]
        self.sizes = {name: weight.numel() for name, weight in self._weights}
        self.num_parameters = sum(self.sizes.values())

    def parts(self, within: Fragment | None = None) -> Iterator[tuple[slice, Floats]]:
        for part, weight in self._placed(within):
            yield part, weight.float().cpu().reshape(-1).numpy()

    def read(self, out: Floats) -> None:
        for part, values in self.parts():
            out[part] = values

    @torch.no_grad()
    def write(self, values: Floats, within: Fragment | None = None) -> None:
        for part, weight in self._placed(within):
            weight.copy_(torch.from_numpy(values[part]).view(weight.shape))

    def views(self, values: Floats) -> dict[str, torch.Tensor]:
        names = zip(self.sizes, self._placed(), strict=True)
        return {
            name: torch.from_numpy(values[part]).view(weight.shape)
            for name, (part, weight) in names
        }

    def filled(self, values: Floats, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        views = self.views(values)
        for name, tensor in held.items():
            views[name].copy_(tensor)
        return {name: views[name] for name in held}

    def _placed(self, within: Fragment | None = None) -> Iterator[tuple[slice, torch.Tensor]]:
        begin = 0
        for _, weight in self._weights:
            part = slice(begin, begin := begin + weight.numel())
            if is_within(part, within):
                yield part, weight


class WorldRanks:
    """Exchange msgpack messages among a site's ranks.

    A separate process group lets threads call this during the trainer's collectives. Its timeout
    `limit_s` must exceed rank 0's wait for other sites.
    """

    def __init__(self, world: World, limit_s: float) -> None:
        self._world, self.is_first, self._group = world, world.is_first, None
        if world.size > 1:
            self._group = dist.new_group(timeout=timedelta(seconds=limit_s), backend="gloo")

    def from_first(self, make: Callable[[], T], kind: type[T]) -> T:
        if self._world.size == 1:
            return make()
        answer: tuple[str, Any] = ("", None)
        if self.is_first:
            try:
                answer = ("", make())
            except Behind as error:
                answer = ("behind", error.committed)
            except (LeaseLost, ElasticError) as error:
                answer = (type(error).__name__, str(error))
        failure, value = self._decode(self._all(answer)[0], tuple[str, Any])
        if failure == "behind":
            raise Behind("", value)
        if failure:
            raise (LeaseLost if failure == "LeaseLost" else ElasticError)(value)
        return msgspec.convert(value, kind)

    def gather(self, value: T, kind: type[T]) -> list[T]:
        if self._world.size == 1:
            return [value]
        return [self._decode(each, kind) for each in self._all(value)]

    def _decode(self, data: bytes, kind: type[T]) -> T:
        return msgspec.msgpack.decode(data, type=kind)

    def _all(self, value: Any) -> list[bytes]:
        data = msgspec.msgpack.encode(value)
        sizes = [int(each) for each in self._gathered(torch.tensor([len(data)]))]
        own = torch.zeros(max(sizes), dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        every = self._gathered(own)
        pairs = zip(every, sizes, strict=True)
        return [bytes(each[:size].numpy()) for each, size in pairs]

    def _gathered(self, own: torch.Tensor) -> list[torch.Tensor]:
        every = [torch.empty_like(own) for _ in range(self._world.size)]
        dist.all_gather(every, own, group=self._group)
        return every


def fresh_outer(learner: Learner) -> dict[str, torch.Tensor]:
    """Return DiLoCo's first outer state, f32 zeros by weight name."""
    weights = LearnerWeights(learner)
    return weights.views(np.zeros(weights.num_parameters, dtype=np.float32))
