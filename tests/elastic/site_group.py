"""Sites in the threads of one process: a membership and an exchange without sockets or clocks."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from orrery.elastic.loop import (
    Floats,
    Fragment,
    OuterLoop,
    OuterOptimizer,
    RoundRow,
    is_within,
    weighted_mean,
)
from orrery.elastic.types import Epoch, OuterRound, SiteMember

NESTEROV = OuterOptimizer(0.7, 0.9, True)
PLAIN = OuterOptimizer(1.0, 0.0, False)
DEADLINE_S = 20.0


class ArrayWeights:
    """Weights as named arrays. `frozen` names are not exchanged."""

    def __init__(self, arrays: dict[str, np.ndarray], frozen: Iterable[str] = ()) -> None:
        self.arrays = arrays
        self._names = sorted(arrays.keys() - set(frozen))
        self.num_parameters = sum(arrays[name].size for name in self._names)

    def parts(self, within: Fragment | None = None) -> Iterator[tuple[slice, Floats]]:
        # Inner steps change them meanwhile.
        assert threading.current_thread().name != "outer round"
        begin = 0
        for name in self._names:
            values = self.arrays[name].ravel()
            part = slice(begin, begin := begin + values.size)
            if is_within(part, within):
                yield part, values

    def write(self, values: Floats, within: Fragment | None = None) -> None:
        for part, own in self.parts(within):
            own[:] = values[part]


class SiteGroup:
    """`size` sites that meet at every call. The first thread at a meeting acts for all."""

    def __init__(
        self,
        size: int,
        codec: Any = None,
        fails: Callable[[str, int, int, int], None] | None = None,
    ) -> None:
        members = (SiteMember(f"{rank:032x}", "127.0.0.1", 4000 + rank) for rank in range(size))
        self.epoch = Epoch(1, tuple(members))
        self._meeting = threading.Barrier(size, timeout=DEADLINE_S)
        self._given: dict[int, Any] = {}
        self._codec, self._fails = codec, fails or (lambda what, rank, number, attempt: None)
        self.attempts = 0

    def meet(self, rank: int, value: Any) -> list[Any]:
        self._given[rank] = value
        self._meeting.wait()
        found = [self._given[one] for one in range(len(self.epoch.members))]
        self._meeting.wait()
        return found

    def site(self, rank: int) -> "GroupSite":
        return GroupSite(self, rank)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self.epoch.members)) as threads:
            return list(threads.map(work, range(len(self.epoch.members))))


class GroupSite:
    def __init__(self, group: SiteGroup, rank: int) -> None:
        self._group, self.rank, self._attempt, self._number = group, rank, 0, -1

    @property
    def id(self) -> str:
        return self._group.epoch.members[self.rank].id

    def loop(
        self, optimizer: OuterOptimizer, weights: ArrayWeights, fragments: Sequence[Fragment] = ()
    ) -> OuterLoop:
        parts = [optimizer, weights, self, self.exchange, self.id, DEADLINE_S]
        return OuterLoop(*parts, fragments=fragments)

    def begin_round(self, number: int, tokens: int, deadline_s: float) -> OuterRound:
        self._attempt = self._attempt + 1 if number == self._number else 0
        self._number = number
        return OuterRound(number, self._group.epoch, tuple(self._group.meet(self.rank, tokens)))

    def exchange(self, delta: Floats, outer_round: OuterRound, rank: int) -> int:
        group = self._group
        sent = delta.copy() if group._codec is None else group._codec(delta)
        deltas = group.meet(self.rank, sent)
        mean = weighted_mean(deltas, list(outer_round.weights))
        group.meet(self.rank, None)
        delta[: len(delta) // 2] = mean[: len(delta) // 2]
        group._fails("exchange", rank, outer_round.number, self._attempt)
        delta[:] = mean
        return delta.nbytes

    def commit(self, outer_round: OuterRound, digest: str) -> bool:
        found = self._group.meet(self.rank, digest)
        return "" not in found and len(set(found)) == 1

    def abort(self, outer_round: OuterRound, lost: Iterable[int]) -> OuterRound:
        self._group.meet(self.rank, "")  # the others wait in `commit`
        return self.begin_round(outer_round.number, outer_round.weights[self.rank], DEADLINE_S)


def run_rounds(loop: OuterLoop, num_rounds: int, inner: Callable[[int], int]) -> list[RoundRow]:
    """Run round 0, then `inner(number)` (which returns tokens) before every further round."""
    rows = [loop.exchange()]
    for number in range(1, num_rounds + 1):
        loop.count(inner(number))
        rows.append(loop.exchange())
    return rows
