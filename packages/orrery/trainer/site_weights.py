"""The weights and ranks of one site, as the outer loop sees them."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from orrery.elastic.ledger import Behind
from orrery.elastic.outer import Floats
from orrery.elastic.types import ElasticError, LeaseLost
from orrery.models.placement import local_tensor
from orrery.trainer.learner import Learner
from orrery.trainer.parallel.world import World

T = TypeVar("T")


class LearnerWeights:
    """This rank's shard of the trained weights, as f32[n] in the order of their names."""

    def __init__(self, learner: Learner) -> None:
        named = sorted(learner.weights.items())
        self._weights = [(name, local_tensor(weight.detach())) for name, weight in named]
        self.sizes = {name: weight.numel() for name, weight in self._weights}
        self.num_parameters = sum(self.sizes.values())

    def parts(self) -> Iterator[tuple[slice, Floats]]:
        for part, weight in self._placed():
            yield part, weight.float().cpu().reshape(-1).numpy()

    def read(self, out: Floats) -> None:
        for part, values in self.parts():
            out[part] = values

    @torch.no_grad()
    def write(self, values: Floats) -> None:
        for part, weight in self._placed():
            weight.copy_(torch.from_numpy(values[part]).view(weight.shape))

    def views(self, values: Floats) -> dict[str, torch.Tensor]:
        """Return views of f32[n] with the names and shapes of the weights."""
        names = zip(self.sizes, self._placed(), strict=True)
        return {
            name: torch.from_numpy(values[part]).view(weight.shape)
            for name, (part, weight) in names
        }

    def _placed(self) -> Iterator[tuple[slice, torch.Tensor]]:
        begin = 0
        for _, weight in self._weights:
            yield slice(begin, begin := begin + weight.numel()), weight


class WorldRanks:
    """The ranks of this site, over the trainer's process group. Messages are msgpack."""

    def __init__(self, world: World) -> None:
        self._world, self.is_first = world, world.is_first

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
        data, world = msgspec.msgpack.encode(value), self._world
        sizes = world.all_gather(len(data))
        own = torch.zeros(max(sizes), dtype=torch.uint8, device=world.device)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(world.device)
        every = [torch.empty_like(own) for _ in sizes]
        dist.all_gather(every, own)
        pairs = zip(every, sizes, strict=True)
        return [bytes(each[:size].cpu().numpy()) for each, size in pairs]


def outer_momentum(learner: Learner) -> dict[str, torch.Tensor]:
    """Return the outer momentum of a fresh site, to be filled from a checkpoint."""
    weights = LearnerWeights(learner)
    return weights.views(np.zeros(weights.num_parameters, dtype=np.float32))
