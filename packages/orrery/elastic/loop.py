"""Exchange what a site has learned after every H inner steps, and step the outer optimizer.

- A round begins, exchanges Δ, and commits the digest of the next θ and m. Only then do they
  change. Inner optimizer state stays.
- After a broken link the round goes on without the lost sites. Δ is computed again, because the
  exchange may have overwritten half of it.
- No site steps alone with its Δ. After MAX_ATTEMPTS the site ends, with θ_start and m as before.
- Round 0 exchanges nothing. It shows that all sites start from equal weights.
- All ranks of a site call `exchange` in lock-step. The first talks to the membership.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

import msgspec
import numpy as np

from orrery.elastic.outer import Floats, OuterOptimizer, OuterState, Step, dot, no_step, take_step
from orrery.elastic.types import ElasticError, LinkBroken, OuterRound, SiteMember

MAX_ATTEMPTS = 16
T = TypeVar("T")


class Weights(Protocol):
    """The trained weights of this rank, as f32[n] in the order of their names."""

    num_parameters: int

    def parts(self) -> Iterator[tuple[slice, Floats]]:
        """Yield each part of the weights as they are now, on the host."""

    def write(self, values: Floats) -> None: ...


class Exchange(Protocol):
    def __call__(self, delta: Floats, outer_round: OuterRound, rank: int) -> int:
        """Replace `delta` by the weighted mean over sites. Return the bytes sent.

        Raise LinkBroken if a peer is lost.
        """


class Rounds(Protocol):
    """The part of a membership that a round needs."""

    def begin_round(self, number: int, tokens: int, deadline_s: float) -> OuterRound: ...

    def commit(self, outer_round: OuterRound, digest: str) -> bool: ...

    def abort(self, outer_round: OuterRound, lost: Iterable[int]) -> OuterRound: ...


class Ranks(Protocol):
    """The ranks of one site."""

    is_first: bool

    def from_first(self, make: Callable[[], T], kind: type[T]) -> T:
        """Return the first rank's value on every rank, or raise its error. A collective."""

    def gather(self, value: T, kind: type[T]) -> list[T]:
        """Return every rank's value. A collective."""


class OneRank:
    is_first = True

    def from_first(self, make: Callable[[], T], kind: type[T]) -> T:
        return make()

    def gather(self, value: T, kind: type[T]) -> list[T]:
        return [value]


class RoundRow(msgspec.Struct, frozen=True):
    """A round as one site saw it."""

    round: int
    epoch: int
    members: tuple[SiteMember, ...]
    weights: tuple[int, ...]
    num_attempts: int
    delta_norm: float
    delta_cosine: float | None  # cos(Δᵢ, Δ), None if either is 0
    num_bytes: int
    sync_s: float
    digest: str


class OuterLoop:
    """`round` is the number of the next round. `tokens` were trained since the last commit."""

    def __init__(
        self,
        optimizer: OuterOptimizer,
        weights: Weights,
        rounds: Rounds | None,
        exchange: Exchange,
        site_id: str,
        deadline_s: float,
        ranks: Ranks | None = None,
    ) -> None:
        self.state = OuterState(weights.num_parameters)
        self.round, self.tokens = 0, 0
        self._optimizer, self._weights, self.rounds = optimizer, weights, rounds
        self._exchange, self.site_id, self._deadline_s = exchange, site_id, deadline_s
        self._ranks = ranks or OneRank()
        self.read_weights()

    def read_weights(self) -> None:
        """Take the weights as they are now as θ_start."""
        for part, values in self._weights.parts():
            self.state.start[part] = values

    def digest(self) -> str:
        """Return the digest of θ_start and m. All ranks call it."""
        return self._digest(no_step)

    def exchange(self) -> RoundRow:
        """Run a round at a step boundary.

        Raise LeaseLost if this site must take the state of its peers, and ElasticError if the
        round cannot be finished.
        """
        begin_s, num_bytes = time.monotonic(), 0
        number = self.round
        outer_round = self._begin()
        num_attempts, is_committed = 0, False
        while not is_committed:
            if (num_attempts := num_attempts + 1) > MAX_ATTEMPTS:
                raise ElasticError(
                    f"round {number}: broke {MAX_ATTEMPTS} times, so this site ends; read the "
                    f"logs, and start it again with `orrery join`"
                )
            rank = outer_round.epoch.rank(self.site_id)
            squared_norm = self._read_delta()
            lost, sent = self._try_exchange(outer_round, rank)
            num_bytes += sent
            digest, cosine = "", None
            if not lost:
                cosine, step = self._cosine(squared_norm), self._step_of(outer_round)
                digest = self._digest(step)
                commit = self._commit(outer_round, digest)
                is_committed = self._ranks.from_first(commit, bool)
            if is_committed:
                self.state.step(step)
                if step == self._optimizer.step:
                    self._weights.write(self.state.start)
                self.round, self.tokens = number + 1, 0
            else:
                outer_round = self._aborted(outer_round, lost) if lost else self._begin()
        return RoundRow(
            round=number,
            epoch=outer_round.epoch.number,
            members=outer_round.epoch.members,
            weights=outer_round.weights,
            num_attempts=num_attempts,
            delta_norm=math.sqrt(squared_norm),
            delta_cosine=cosine,
            num_bytes=sum(self._ranks.gather(num_bytes, int)),
            sync_s=time.monotonic() - begin_s,
            digest=digest,
        )

    def _begin(self) -> OuterRound:
        return self._agreed(lambda it: it.begin_round(self.round, self.tokens, self._deadline_s))

    def _agreed(self, call: Callable[[Rounds], OuterRound]) -> OuterRound:
        def make() -> OuterRound:
            assert self.rounds is not None, "the first rank has the membership"
            return call(self.rounds)

        return self._ranks.from_first(make, OuterRound)

    def _commit(self, outer_round: OuterRound, digest: str) -> Callable[[], bool]:
        def commit() -> bool:
            assert self.rounds is not None, "the first rank has the membership"
            return self.rounds.commit(outer_round, digest)

        return commit

    def _aborted(self, outer_round: OuterRound, lost: list[int]) -> OuterRound:
        return self._agreed(lambda it: it.abort(outer_round, lost))

    def _read_delta(self) -> float:
        """Compute Δ of this rank. Return ‖Δᵢ‖² over all ranks of the site."""
        state = self.state
        for part, values in self._weights.parts():
            np.subtract(state.start[part], values, out=state.delta[part])
        return sum(self._ranks.gather(dot(state.delta, state.delta), float))

    def _try_exchange(self, outer_round: OuterRound, rank: int) -> tuple[list[int], int]:
        """Return (ranks of lost sites, bytes sent). Sites need no links if one alone has weight."""
        lost, sent = -1, 0
        if len(outer_round.weights) > 1 and any(outer_round.weights):
            try:
                sent = self._exchange(self.state.delta, outer_round, rank)
            except LinkBroken as broken:
                lost = broken.rank
        found = set(self._ranks.gather(lost, int)) - {-1}
        return sorted(found), sent

    def _step_of(self, outer_round: OuterRound) -> Step:
        if not any(outer_round.weights):
            return no_step
        is_mean = self._optimizer.lr == 1 and self._optimizer.momentum == 0
        if is_mean and len(outer_round.weights) == 1:
            for part, values in self._weights.parts():
                self.state.delta[part] = values
            return take_step
        return self._optimizer.step

    def _digest(self, step: Step) -> str:
        """Return the digest of θ and m after `step`, the same on every rank."""
        every = self._ranks.gather(self.state.digest(step), str)
        return every[0] if len(every) == 1 else hashlib.sha256("".join(every).encode()).hexdigest()

    def _cosine(self, squared_norm: float) -> float | None:
        state, products = self.state, [0.0, dot(self.state.delta, self.state.delta)]
        for part, values in self._weights.parts():
            products[0] += dot(state.start[part] - values, state.delta[part])
        both, mean = map(sum, zip(*self._ranks.gather(products, list[float]), strict=True))
        return both / math.sqrt(squared_norm * mean) if squared_norm * mean > 0 else None
