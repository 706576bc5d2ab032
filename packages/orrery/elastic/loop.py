"""Run DiLoCo's outer loop (arXiv 2311.08105, Algorithm 1) at a site, in float32 on the host.

    Δᵢ = θ_start − θ_now      Δ = Σ wᵢΔᵢ / Σ wᵢ      m ← μm + Δ      θ ← θ_start − η(Δ + μm)

- θ: weights (θ_start after the last round, θ_now after inner steps). wᵢ: tokens or steps of site i.
- m: outer momentum, η: learning rate, μ: momentum factor. Without Nesterov, θ ← θ_start − ηm.
- Round 0 only compares weight digests. Round n exchanges fragment (n − 1) mod F of F fragments.
- Inner steps may run between `send` and `apply` (arXiv 2501.18512). `apply` then sets weights to
  αθ_now + (1 − α)θ. Rounds do not change the inner optimizer's state.
- numpy rounds every operation to float32, so equal Δ give equal bits. Memory: 12 bytes a parameter.
"""

import copy
import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from orrery.elastic.types import ElasticError, LinkBroken, OuterRound, SiteMember

T = TypeVar("T")
Floats = NDArray[np.float32]
Step = Callable[[Floats, Floats, Floats], tuple[Floats, Floats]]  # (θ_start, m, Δ) → next (θ, m)
Fragment = tuple[slice, ...]
BLOCK = 1 << 15  # values per block, so that temporaries fit the cache
DOTTED = 1 << 12  # values per BLAS call. Longer calls start threads and slow down.
MAX_ATTEMPTS = 16


@dataclass(frozen=True)
class OuterOptimizer:
    lr: float
    momentum: float
    nesterov: bool

    def step(self, start: Floats, momentum: Floats, delta: Floats) -> tuple[Floats, Floats]:
        lr, mu = np.float32(self.lr), np.float32(self.momentum)
        next_momentum = mu * momentum
        next_momentum += delta
        if self.nesterov:
            step = mu * next_momentum
            step += delta
            step *= lr
        else:
            step = lr * next_momentum
        return np.subtract(start, step, out=step), next_momentum


def no_step(start: Floats, momentum: Floats, delta: Floats) -> tuple[Floats, Floats]:
    return start, momentum


def take_step(start: Floats, momentum: Floats, now: Floats) -> tuple[Floats, Floats]:
    """Return θ_now (`now`), the exact next θ of a single site with η = 1 and μ = 0."""
    return now, momentum


class OuterState:
    """θ_start, m and Δ of a rank's weights, f32[n] each. `fragments`: slices that cover them."""

    def __init__(self, num_parameters: int, fragments: Sequence[Fragment] = ()) -> None:
        self.start, self.momentum, self.delta = (
            np.zeros(num_parameters, dtype=np.float32) for _ in range(3)
        )
        self.fragments = fragments or [(slice(0, num_parameters),)]
        self._next = ""
        self.forget()

    def step(self, step: Step, fragment: int = 0) -> None:
        """Apply `step` to a fragment. First call `digest` with the same arguments."""
        for block in self._blocks(fragment):
            self.start[block], self.momentum[block] = self._stepped(step, block)
        self._digests[fragment], self._next = self._next, ""

    def forget(self) -> None:
        """Drop cached digests. Call this after writing to the arrays."""
        self._digests = [""] * len(self.fragments)

    def replaced(self, start: Floats, momentum: Floats) -> "OuterState":
        other = copy.copy(self)
        other.start, other.momentum = start, momentum
        other.forget()
        return other

    def digest(self, step: Step, fragment: int = 0) -> str:
        """Return the digest that θ and m would have after `step` updates `fragment`."""
        for other, known in enumerate(self._digests):
            if not known and other != fragment:
                self._digests[other] = self._digest(no_step, other)
        found = [*self._digests]
        found[fragment] = self._next = self._digest(step, fragment)
        return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()

    def _digest(self, step: Step, fragment: int) -> str:
        digest = hashlib.sha256()
        for block in self._blocks(fragment):
            for part in self._stepped(step, block):
                digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()

    def _stepped(self, step: Step, block: slice) -> tuple[Floats, Floats]:
        return step(self.start[block], self.momentum[block], self.delta[block])

    def _blocks(self, fragment: int) -> Iterator[slice]:
        for part in self.fragments[fragment]:
            yield from blocks(part)


def blocks(part: slice) -> Iterator[slice]:
    for begin in range(part.start, part.stop, BLOCK):
        yield slice(begin, min(begin + BLOCK, part.stop))


def make_fragments(layers: Sequence[slice], count: int) -> list[Fragment]:
    """Return fragments: layer i is in fragment i mod `count` (arXiv 2501.18512, strided)."""
    return [tuple(layers[first::count]) for first in range(count)]


def is_within(part: slice, within: Fragment | None) -> bool:
    return within is None or any(each.start <= part.start < each.stop for each in within)


def weighted_mean(deltas: list[Floats], weights: list[int]) -> Floats:
    total, mean = sum(weights), np.zeros_like(deltas[0])
    for delta, weight in zip(deltas, weights, strict=True):
        if weight:
            mean += np.float32(weight / total) * delta
    return mean


def dot(one: Floats, other: Floats) -> float:
    """Return the inner product: sums of DOTTED products in float32, and their total in float64."""
    runs = (slice(begin, begin + DOTTED) for begin in range(0, len(one), DOTTED))
    return sum(float(np.dot(one[run], other[run])) for run in runs)


class Weights(Protocol):
    """This rank's trained weights, f32[n], ordered by name."""

    num_parameters: int

    def parts(self, within: Fragment | None = None) -> Iterator[tuple[slice, Floats]]:
        """Yield (slice, values on the host) of all weights, or of fragment `within`."""

    def write(self, values: Floats, within: Fragment | None = None) -> None:
        """Replace all weights, or fragment `within`, by `values` f32[n]."""


class Exchange(Protocol):
    def __call__(self, delta: Floats, outer_round: OuterRound, rank: int) -> int:
        """Replace the round's fragment of `delta` by the weighted mean. Return the bytes sent.

        Raise LinkBroken if a peer is lost.
        """


class Rounds(Protocol):
    def begin_round(self, number: int, tokens: int, deadline_s: float) -> OuterRound: ...

    def commit(self, outer_round: OuterRound, digest: str) -> bool: ...

    def abort(self, outer_round: OuterRound, lost: Iterable[int]) -> OuterRound: ...


class Ranks(Protocol):
    """A site's ranks. The methods are collectives."""

    is_first: bool

    def from_first(self, make: Callable[[], T], kind: type[T]) -> T:
        """Call `make` on the first rank. Return its result, or raise its error, on all ranks."""

    def gather(self, value: T, kind: type[T]) -> list[T]: ...


class OneRank:
    is_first = True

    def from_first(self, make: Callable[[], T], kind: type[T]) -> T:
        return make()

    def gather(self, value: T, kind: type[T]) -> list[T]:
        return [value]


class RoundRow(msgspec.Struct, frozen=True):
    round: int
    epoch: int
    members: tuple[SiteMember, ...]
    weights: tuple[int, ...]
    num_attempts: int
    delta_norm: float
    delta_cosine: float | None  # cosine of own and mean Δ, None if one is 0
    num_bytes: int
    sync_s: float
    digest: str


class _Result(NamedTuple):
    row: RoundRow
    step: Step


class OuterLoop:
    """Run rounds on one rank. `round`: the next round's number. `fragment`: its weights."""

    def __init__(
        self,
        optimizer: OuterOptimizer,
        weights: Weights,
        rounds: Rounds | None,
        exchange: Exchange,
        site_id: str,
        deadline_s: float,
        ranks: Ranks | None = None,
        fragments: Sequence[Fragment] = (),
    ) -> None:
        self.state = OuterState(weights.num_parameters, fragments)
        self.round, self.fragment_tokens = 0, [0] * len(self.state.fragments)
        self._optimizer, self._weights, self.rounds = optimizer, weights, rounds
        self._exchange, self.site_id, self._deadline_s = exchange, site_id, deadline_s
        self._ranks = ranks or OneRank()
        self._sent: list[tuple[slice, Floats]] | None = None  # this rank's Δ at `send`
        self._sent_tokens = 0
        self._thread: threading.Thread | None = None
        self._outcome: _Result | Exception | None = None
        self.read_weights()

    def fragment_of(self, number: int) -> int:
        return (number - 1) % len(self.state.fragments) if number > 0 else 0

    @property
    def fragment(self) -> Fragment:
        return self.state.fragments[self.fragment_of(self.round)]

    @property
    def tokens(self) -> int:
        return self.fragment_tokens[self.fragment_of(self.round)]

    @property
    def is_in_flight(self) -> bool:
        return self._thread is not None

    def count(self, num_tokens: int) -> None:
        self.fragment_tokens = [each + num_tokens for each in self.fragment_tokens]

    def read_weights(self) -> None:
        for part, values in self._weights.parts():
            self.state.start[part] = values
        self.state.forget()

    def digest(self) -> str:
        """Return the digest of θ_start and m. A collective."""
        return self._digest(no_step)

    def digest_of(self, start: Floats, momentum: Floats) -> str:
        """Return the digest for θ_start = `start` and m = `momentum`. A collective."""
        return self._joined(self.state.replaced(start, momentum).digest(no_step))

    def exchange(self, has_weight: bool = True) -> RoundRow:
        """Run a round while inner steps pause, with weight 0 unless `has_weight`. A collective.

        Raise LeaseLost if the site must fetch its peers' state, ElasticError if the round fails.
        """
        return self._apply(self._run(self.tokens if has_weight else 0), 0.0)

    def send(self) -> None:
        assert self._thread is None, "one round at a time"
        self._sent = list(self._own_delta())
        self._sent_tokens, self.fragment_tokens[self.fragment_of(self.round)] = self.tokens, 0

        def run() -> None:
            try:
                self._outcome = self._run(self._sent_tokens)
            except Exception as error:
                self._outcome = error

        self._thread = threading.Thread(target=run, name="outer round", daemon=True)
        self._thread.start()

    def apply(self, merge: float) -> RoundRow:
        """Wait for the round that `send` started, and apply its outer step.

        `merge`: α. Raise the errors of `exchange`.
        """
        assert self._thread is not None, "send first"
        self._thread.join()
        outcome, self._thread, self._outcome, self._sent = self._outcome, None, None, None
        if isinstance(outcome, _Result):
            return self._apply(outcome, merge, is_late=True)
        assert outcome is not None
        self.fragment_tokens[self.fragment_of(self.round)] += self._sent_tokens
        raise outcome

    def _apply(self, result: _Result, merge: float, is_late: bool = False) -> RoundRow:
        state, within, index = self.state, self.fragment, self.fragment_of(self.round)
        state.step(result.step, index)
        if result.step == self._optimizer.step:
            values = state.start
            if merge:
                values, kept = state.delta, np.float32(merge)
                for part, now in self._weights.parts(within):
                    values[part] = kept * now + (np.float32(1) - kept) * state.start[part]
            self._weights.write(values, within)
        if not is_late and result.step != no_step:
            self.fragment_tokens[index] = 0
        self.round = result.row.round + 1
        return result.row

    def _run(self, tokens: int) -> _Result:
        """Run a round without changing weights, because inner steps may run."""
        begin_s, num_bytes = time.monotonic(), 0
        number = self.round
        outer_round = self._begin(tokens)
        num_attempts, is_committed = 0, False
        while not is_committed:
            if (num_attempts := num_attempts + 1) > MAX_ATTEMPTS:
                raise ElasticError(
                    f"round {number}: {MAX_ATTEMPTS} attempts failed; read the logs, then type "
                    "`orrery join` again"
                )
            rank = outer_round.epoch.rank(self.site_id)
            squared_norm = self._read_delta()
            lost, sent = self._try_exchange(outer_round, rank)
            num_bytes += sent
            digest, cosine = "", None
            step: Step = no_step
            if not lost:
                cosine, step = self._cosine(squared_norm), self._step_of(outer_round)
                digest = self._digest(step)
                commit = self._commit(outer_round, digest)
                is_committed = self._ranks.from_first(commit, bool)
            if not is_committed:
                outer_round = self._aborted(outer_round, lost) if lost else self._begin(tokens)
        row = RoundRow(
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
        return _Result(row, step)

    def _begin(self, tokens: int) -> OuterRound:
        return self._agreed(lambda it: it.begin_round(self.round, tokens, self._deadline_s))

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
        """Recompute Δ, because exchanges overwrite it. Return the site's ‖Δ‖²."""
        norm = 0.0
        for part, values in self._own_delta():
            self.state.delta[part] = values
            norm += dot(values, values)
        return sum(self._ranks.gather(norm, float))

    def _own_delta(self) -> Iterator[tuple[slice, Floats]]:
        if self._sent is not None:
            yield from self._sent
            return
        for part, values in self._weights.parts(self.fragment):
            for block in blocks(part):
                now = values[block.start - part.start : block.stop - part.start]
                yield block, self.state.start[block] - now

    def _try_exchange(self, outer_round: OuterRound, rank: int) -> tuple[list[int], int]:
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
        if is_mean and len(outer_round.weights) == 1 and self._sent is None:
            for part, values in self._weights.parts(self.fragment):
                self.state.delta[part] = values
            return take_step
        return self._optimizer.step

    def _digest(self, step: Step) -> str:
        return self._joined(self.state.digest(step, self.fragment_of(self.round)))

    def _joined(self, own: str) -> str:
        every = self._ranks.gather(own, str)
        return every[0] if len(every) == 1 else hashlib.sha256("".join(every).encode()).hexdigest()

    def _cosine(self, squared_norm: float) -> float | None:
        mean, products = self.state.delta, [0.0, 0.0]
        for part, values in self._own_delta():
            products[0] += dot(values, mean[part])
            products[1] += dot(mean[part], mean[part])
        both, squared = map(sum, zip(*self._ranks.gather(products, list[float]), strict=True))
        scale = squared_norm * squared
        return both / math.sqrt(scale) if scale > 0 else None
