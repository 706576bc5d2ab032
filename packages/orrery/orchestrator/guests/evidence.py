"""Judge from recomputed log-probs whether a site sampled with the weights that it names.

- A rollout's mean and largest |log-prob difference| have upper bounds: a multiple of the 90th
  percentile over the run's own rollouts, but at least a configured minimum.
- Tokens drawn from the policy have E[log p] = −entropy. So the sum of x = log p + entropy over a
  site's rollouts must be within MAX_DEVIATIONS standard deviations of 0.
- E[x²] is the variance of log p. With V the sum of variances, b = LARGEST² and d = −ln CHANCE, the
  sum of min(x², b) must be at most V + √(2dbV) + ⅔db (Bernstein's inequality). This refuses a site
  that adds unlikely tokens to likely ones until the sum of x is 0.
"""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from orrery.manifest.schema import GuestEngines
from orrery.wire.recompute import Recomputed

NUM_HONEST = 16  # rollouts of the run's own engines needed to compute bounds
NUM_KEPT = 256
QUANTILE = 0.9
PEAK = 10.0  # minimum bound of the largest difference, as a multiple of that of the mean
NUM_ROLLOUTS = 64  # newest rollouts of a site, judged together
MAX_DEVIATIONS = 6.0
LARGEST = 10.0  # nats
CHANCE = 1e-9  # probability to refuse an honest site's squares


@dataclass(frozen=True)
class RolloutScore:
    """A rollout's log-probs compared with the recomputed log-probs.

    - `mean`, `peak`: mean and largest absolute difference.
    - `surprise`, `square`, `variance`: sums over tokens of x = log p + entropy, x², and log p's
      variance.
    - `clipped`: as `square`, with at most LARGEST² a token.
    """

    mean: float
    peak: float
    surprise: float
    variance: float
    square: float
    clipped: float

    @classmethod
    def of(cls, logprobs: np.ndarray, recomputed: Recomputed) -> "RolloutScore":
        logprob, entropy, variance = recomputed.arrays()
        difference = np.abs(logprobs.astype(np.float64) - logprob)
        squares = np.square(excess := logprob.astype(np.float64) + entropy)
        return cls(
            float(difference.mean()),
            float(difference.max()),
            float(excess.sum()),
            float(variance.sum()),
            float(squares.sum()),
            float(np.minimum(squares, LARGEST**2).sum()),
        )


class HonestSpread:
    """Log-prob differences of the newest rollouts of the run's own engines."""

    def __init__(self, spec: GuestEngines) -> None:
        self._spec = spec
        self._scores: deque[RolloutScore] = deque(maxlen=NUM_KEPT)

    def add(self, score: RolloutScore) -> None:
        self._scores.append(score)

    @property
    def is_known(self) -> bool:
        return len(self._scores) >= NUM_HONEST

    @property
    def bounds(self) -> tuple[float, float]:  # upper bounds of `mean` and `peak`
        least, tolerance = self._spec.min_logprob_difference, self._spec.tolerance
        usual = np.quantile([(each.mean, each.peak) for each in self._scores], QUANTILE, axis=0)
        mean, peak = (tolerance * usual).tolist()
        return max(mean, least), max(peak, PEAK * least)


class SiteEvidence:
    def __init__(self) -> None:
        self._scores: deque[RolloutScore] = deque(maxlen=NUM_ROLLOUTS)

    def fault(self, score: RolloutScore, spread: HonestSpread) -> str:
        """Add a rollout's score. Return the evidence against the site, or ""."""
        self._scores.append(score)
        mean, peak = spread.bounds
        for name, found, bound in (("mean", score.mean, mean), ("largest", score.peak, peak)):
            if not found <= bound:  # also true for NaN
                return (
                    f"the {name} difference of a rollout's log-probs from the trainer's is "
                    f"{found:.3g}, more than {bound:.3g}"
                )
        sums = [(s.surprise, s.variance, s.square, s.clipped) for s in self._scores]
        surprise, variance, square, clipped = np.array(sums).sum(0)
        # A nearly certain policy has a tiny `variance`. `square` then allows a few unlikely tokens.
        deviations = surprise / math.sqrt(max(variance, square, 1e-9))
        if not abs(deviations) <= MAX_DEVIATIONS:
            return (
                f"its tokens were not drawn from the policy (the sum of their log-probs is "
                f"{deviations:.1f} standard deviations from its mean)"
            )
        slack = -math.log(CHANCE) * LARGEST**2
        if not clipped <= (most := variance + math.sqrt(2 * slack * variance) + 2 / 3 * slack):
            return (
                f"its tokens were not drawn from the policy (their log-probs' squared deviations "
                f"sum to {clipped:.3g}, more than {most:.3g})"
            )
        return ""
