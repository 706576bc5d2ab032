"""Compute DiLoCo's outer step (arXiv 2311.08105, Algorithm 1) in float32 on the host.

    Δᵢ = θ_start − θ_now      Δ = Σ wᵢΔᵢ / Σ wᵢ      m ← μm + Δ      θ ← θ_start − η(Δ + μm)

- θ: weights (θ_start after the last round, θ_now after the inner steps).
- m: outer momentum, η: learning rate, μ: momentum factor, wᵢ: tokens or steps of site i.
- Without Nesterov momentum, the last equation is θ ← θ_start − ηm.
- numpy rounds every operation to float32, so equal Δ give equal bits.
- Memory: 12 bytes a parameter.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Step = Callable[[Floats, Floats, Floats], tuple[Floats, Floats]]  # (θ_start, m, Δ) → next (θ, m)
Fragment = tuple[slice, ...]
BLOCK = 1 << 15  # values per block, to keep temporary arrays in the cache
DOTTED = 1 << 12  # values per BLAS call. Longer calls start threads and slow down.


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
    """Return θ_now (`now`) as the next θ: the exact outer step of one site with η = 1 and μ = 0."""
    return now, momentum


class OuterState:
    """θ_start, m and Δ of one rank's weights, f32[n] each. `fragments`: slices that cover them."""

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
        """Return a copy with new `start` and `momentum`."""
        other = copy.copy(self)
        other.start, other.momentum = start, momentum
        other.forget()
        return other

    def digest(self, step: Step, fragment: int = 0) -> str:
        """Return the digest of θ and m as if `step` had updated `fragment`."""
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
    """Return `count` fragments: layer i is in fragment i mod count (arXiv 2501.18512, strided)."""
    return [tuple(layers[first::count]) for first in range(count)]


def is_within(part: slice, within: Fragment | None) -> bool:
    return within is None or any(each.start <= part.start < each.stop for each in within)


def weighted_mean(deltas: list[Floats], weights: list[int]) -> Floats:
    """Return Σ wᵢΔᵢ / Σ wᵢ in float32."""
    total, mean = sum(weights), np.zeros_like(deltas[0])
    for delta, weight in zip(deltas, weights, strict=True):
        if weight:
            mean += np.float32(weight / total) * delta
    return mean


def dot(one: Floats, other: Floats) -> float:
    """Return the inner product, summed in float32 per DOTTED values, then in float64."""
    runs = (slice(begin, begin + DOTTED) for begin in range(0, len(one), DOTTED))
    return sum(float(np.dot(one[run], other[run])) for run in runs)
