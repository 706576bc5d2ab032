"""What travels between a group's members, and what of it one rank sees. All ranks compute the same from the same tables."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from orrery.transport.weight_wire.meeting import Holding, Member, Tensor
from orrery.transport.weight_wire.slices import Message, Rounds, schedule, transfers


@dataclass(frozen=True)
class Plan:
    """Sources are trainer ranks; targets are `members`, ranks of engines, in order."""

    tensors: Sequence[Tensor]
    holdings: Sequence[Holding]
    members: Sequence[Member]
    rounds: Rounds

    @classmethod
    def of(
        cls,
        tensors: Sequence[Tensor],
        holdings: Sequence[Holding],
        members: Sequence[Member],
        bucket_bytes: int,
    ) -> "Plan":
        itemsize = {tensor.name: dtype_of(tensor).itemsize for tensor in tensors}
        moves = transfers(
            [each.name for each in tensors],
            [each.boxes for each in holdings],
            [each.needs for each in members],
            itemsize,
        )
        return cls(tensors, holdings, members, schedule(moves, itemsize, bucket_bytes))

    @property
    def ranks(self) -> list[str]:
        """What sentences call the ranks of the group."""
        return [
            *(f"trainer {rank}" for rank in range(len(self.holdings))),
            *(f"{each.engine} (rank {each.rank})" for each in self.members),
        ]

    def of_source(self, source: int) -> list[tuple[int, dict[int, Message]]]:
        """(round, target → message) of every round in which `source` sends."""
        found = [
            (number, {t: message for (s, t), message in every.items() if s == source})
            for number, every in enumerate(self.rounds)
        ]
        return [(number, mine) for number, mine in found if mine]

    def of_target(self, target: int) -> list[tuple[int, dict[int, Message]]]:
        """(round, source → message) of every round in which `target` receives."""
        found = [
            (number, {s: message for (s, t), message in every.items() if t == target})
            for number, every in enumerate(self.rounds)
        ]
        return [(number, mine) for number, mine in found if mine]


@dataclass
class Parts:
    """Seconds by what they were spent on."""

    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, begin: float) -> float:
        """`begin` to now goes to `name`; now."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - begin
        return now


def dtype_of(tensor: Tensor) -> torch.dtype:
    dtype = getattr(torch, tensor.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
