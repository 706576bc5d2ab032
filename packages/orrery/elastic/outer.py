"""Compute DiLoCo's outer step (arXiv 2311.08105, Algorithm 1) in float32 on the host.

    Δᵢ = θ_start − θ_now      Δ = Σ wᵢΔᵢ / Σ wᵢ      m ← μm + Δ      θ ← θ_start − η(Δ + μm)

- With Nesterov momentum off, the last step is θ ← θ_start − ηm.
- numpy rounds every operation to float32, so sites with equal Δ get equal bits.
- A rank keeps θ_start, m and Δ of its shard: 12 bytes a parameter.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Step = Callable[[Floats, Floats, Floats], tuple[Floats, Floats]]  # (θ_start, m, Δ) to (θ, m)
BLOCK = 1 << 18  # numbers at a time, so that temporary arrays stay in the cache
DOTTED = 1 << 12  # below this size BLAS starts no threads. Starting them costs more than it saves


@dataclass(frozen=True)
class OuterOptimizer:
    lr: float
    momentum: float
    nesterov: bool

    def step(self, start: Floats, momentum: Floats, delta: Floats) -> tuple[Floats, Floats]:
        """Return the next (θ, m), each f32[n]."""
        lr, mu = np.float32(self.lr), np.float32(self.momentum)
        next_momentum = mu * momentum + delta
        direction = delta + mu * next_momentum if self.nesterov else next_momentum
        return start - lr * direction, next_momentum


def no_step(start: Floats, momentum: Floats, delta: Floats) -> tuple[Floats, Floats]:
    return start, momentum


def take_step(start: Floats, momentum: Floats, now: Floats) -> tuple[Floats, Floats]:
    """Take θ_now from the place of Δ: θ_start − (θ_start − θ_now) would round."""
    return now, momentum


class OuterState:
    """θ_start, the outer momentum and Δ of one shard, each f32[n]."""

    def __init__(self, num_parameters: int) -> None:
        self.start, self.momentum, self.delta = (
            np.zeros(num_parameters, dtype=np.float32) for _ in range(3)
        )

    def step(self, step: Step) -> None:
        """Replace θ_start and m."""
        for block in self._blocks():
            self.start[block], self.momentum[block] = self._stepped(step, block)

    def digest(self, step: Step) -> str:
        """Return the sha256 of θ and m as `step` would make them, and change nothing."""
        digest = hashlib.sha256()
        for block in self._blocks():
            for part in self._stepped(step, block):
                digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()

    def _stepped(self, step: Step, block: slice) -> tuple[Floats, Floats]:
        return step(self.start[block], self.momentum[block], self.delta[block])

    def _blocks(self) -> Iterator[slice]:
        for begin in range(0, len(self.start), BLOCK):
            yield slice(begin, begin + BLOCK)


def weighted_mean(deltas: list[Floats], weights: list[int]) -> Floats:
    """Return Σ wᵢΔᵢ / Σ wᵢ in float32, or zeros if no site has weight.

    The reference for exchanges. A site with weight 0 changes neither the sum nor the divisor.
    """
    total, mean = sum(weights), np.zeros_like(deltas[0])
    for delta, weight in zip(deltas, weights, strict=True):
        if weight:
            mean += np.float32(weight / total) * delta
    return mean


def dot(one: Floats, other: Floats) -> float:
    """Return the inner product: float32 in runs of DOTTED, whose sums are added in float64."""
    runs = (slice(begin, begin + DOTTED) for begin in range(0, len(one), DOTTED))
    return sum(float(np.dot(one[run], other[run])) for run in runs)
