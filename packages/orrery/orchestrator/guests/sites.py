"""Keep the state of sites (clusters) that lend engines, and judge their samples.

- `SiteTable` plans weight transfers. `SiteEvidence` judges from recomputed log-probs whether a
  site sampled with the weights that it reports.
- The bounds of a rollout's mean and largest |log-prob difference| are a multiple of the 90th
  percentile over the run's own rollouts, or a configured minimum if larger.
"""

import asyncio
import math
import random
import re
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from orrery.elastic.types import ElasticError, Terms, check_terms
from orrery.manifest.schema import GuestEngines, Manifest
from orrery.orchestrator.engines.messages import START_VERSION, Generation, GenerationFailed
from orrery.orchestrator.engines.pool import EngineRegistry, Phase
from orrery.orchestrator.guests.messages import MAX_REASON, Entry, GuestRefused, SampleJob
from orrery.wire.recompute import Recomputed

MAX_CANCELLED = 4096
FETCH_S = 10.0  # assumed time of a weight transfer
OPEN_S = 2.5
CHANCE = random.SystemRandom()  # unpredictable for sites
NUM_HONEST = 16  # own rollouts needed for bounds
NUM_KEPT = 256
QUANTILE = 0.9
PEAK = 10.0  # minimum bound of `peak`, divided by that of `mean`
NUM_ROLLOUTS = 64  # rollouts judged together
MAX_DEVIATIONS = 6.0
LARGEST = 10.0  # limit of |x| in `clipped`, in nats
FALSE_ALARM = 1e-9  # probability that `clipped` refuses an honest site


@dataclass(frozen=True)
class RolloutScore:
    """A rollout's log-probs compared with the recomputed log-probs (log p).

    - `mean`: mean absolute difference. `peak`: largest absolute difference.
    - `surprise`: sum of x = log p + entropy over the tokens. `square`: sum of x².
    - `clipped`: sum of min(x², LARGEST²). `variance`: sum of the variances of log p.
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
    """Log-prob differences of the run's own newest rollouts."""

    def __init__(self, spec: GuestEngines) -> None:
        self._spec = spec
        self._scores: deque[RolloutScore] = deque(maxlen=NUM_KEPT)

    def add(self, score: RolloutScore) -> None:
        self._scores.append(score)

    @property
    def is_known(self) -> bool:
        return len(self._scores) >= NUM_HONEST

    @property
    def bounds(self) -> tuple[float, float]:  # of `mean` and `peak`
        least, tolerance = self._spec.min_logprob_difference, self._spec.tolerance
        usual = np.quantile([(each.mean, each.peak) for each in self._scores], QUANTILE, axis=0)
        mean, peak = (tolerance * usual).tolist()
        return max(mean, least), max(peak, PEAK * least)


class SiteEvidence:
    """The newest rollouts of one site, and two tests of them.

    - Tokens drawn from the policy have E[log p] = −entropy. So the sum of x = log p + entropy must
      be within MAX_DEVIATIONS standard deviations of 0.
    - E[x²] is the variance of log p. With V the sum of variances, d = −ln FALSE_ALARM and b =
      LARGEST², the sum of min(x², b) must be at most V + √(2dbV) + ⅔db (Bernstein's inequality).
      This detects mixtures of likely and unlikely tokens in which x sums to 0.
    """

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
        # `variance` is tiny for a nearly certain policy. `square` tolerates a few unlikely tokens.
        deviations = surprise / math.sqrt(max(variance, square, 1e-9))
        if not abs(deviations) <= MAX_DEVIATIONS:
            return (
                f"its tokens were not drawn from the policy (the sum of their log-probs is "
                f"{deviations:.1f} standard deviations from its mean)"
            )
        slack = -math.log(FALSE_ALARM) * LARGEST**2
        if not clipped <= (most := variance + math.sqrt(2 * slack * variance) + 2 / 3 * slack):
            return (
                f"its tokens were not drawn from the policy (their log-probs' squared deviations "
                f"sum to {clipped:.3g}, more than {most:.3g})"
            )
        return ""


@dataclass(eq=False)
class GuestJob:
    job: SampleJob
    prompt: np.ndarray
    result: "asyncio.Future[Generation | None]"
    version: int = START_VERSION  # version of the site's weights when it took the job
    site: "GuestSite | None" = None

    def give_back(self) -> None:
        """Let the run's engines draw the sample, because dropping long samples adds a bias."""
        if not self.result.done():
            self.result.set_result(None)

    def fail(self, why: str) -> None:
        if not self.result.done():
            self.result.set_exception(GenerationFailed(why))


@dataclass
class GuestSite:
    name: str
    index: int
    lease: int = 0
    num_slots: int = 0
    listen: str = ""
    seen_s: float = 0.0
    told: int = START_VERSION  # newest version announced to the site
    told_s: float = 0.0
    room: int = 0
    jobs: dict[str, GuestJob] = field(default_factory=dict)
    cancelled: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_CANCELLED))
    arrived: list[tuple[GuestJob, Generation]] = field(default_factory=list)
    evidence: SiteEvidence = field(default_factory=SiteEvidence)
    checking: "asyncio.Task[None] | None" = None
    num_accepted: int = 0


class SiteTable:
    def __init__(self, manifest: Manifest, terms: Terms, release: dict[str, str]) -> None:
        spec = manifest.orchestrator.guests
        assert spec is not None
        self._spec, self._terms, self._release = spec, terms, release
        self._num_slots = manifest.inference.max_num_sequences
        self.registry = EngineRegistry(0, START_VERSION)
        self.sites: dict[str, GuestSite] = {}

    def check_entry(self, name: str, entry: Entry) -> None:
        try:
            check_terms(self._terms, entry.terms)
        except ElasticError as error:
            raise GuestRefused(str(error)) from error
        if self._release and entry.release != self._release:
            raise GuestRefused(
                f"engine: this site has {_words(entry.release)}, the run {_words(self._release)}; "
                "type `make setup` at the run's commit"
            )
        if not 0 < entry.num_slots <= (most := self._num_slots):
            raise GuestRefused(f"num_slots: {entry.num_slots}; send 1 to {most}")
        found = re.fullmatch(r"[\w.:\[\]-]{1,255}:([0-9]{1,5})", entry.listen)
        if entry.listen and (found is None or not 0 < int(found[1]) < 2**16):
            raise GuestRefused("--listen: is no address and port; type for example 10.0.0.1:29400")
        up = [each for each in self.sites.values() if self.is_up(each) and each.name != name]
        if len(up) >= self._spec.max_sites:
            raise GuestRefused(
                f"orchestrator.guests.max_sites {self._spec.max_sites}: that many sites "
                "already take part; enter when one has left"
            )

    def is_up(self, site: GuestSite) -> bool:
        return self.registry[site.index].phase not in (Phase.STARTING, Phase.FENCED)

    def is_fresh(self, site: GuestSite) -> bool:
        engine = self.registry[site.index]
        oldest = max(0, self.registry.wanted - self._spec.max_versions_behind)
        return self.is_up(site) and engine.version is not None and engine.version >= oldest

    def open_sites(self) -> list[GuestSite]:
        since_s = time.monotonic() - OPEN_S
        sites = self.sites.values()
        return [
            each for each in sites if each.room and each.seen_s > since_s and self.is_fresh(each)
        ]

    def told(self, site: GuestSite) -> int:
        """Return the newest version that the site may fetch now.

        The run's own site, and sites that have this version and accept connections, send it. At
        most as many sites fetch it at once as can send it.
        """
        wanted, now_s = self.registry.wanted, time.monotonic()
        if site.told >= wanted:
            return wanted
        others = [each for each in self.sites.values() if self.is_up(each) and each is not site]
        holders = [each for each in others if self.registry[each.index].version == wanted]
        num_fetching = sum(
            each.told == wanted and each not in holders and now_s - each.told_s < FETCH_S
            for each in others
        )
        num_serving = 1 + sum(bool(each.listen) for each in holders)
        return wanted if num_fetching < num_serving else site.told

    def peers(self, site: GuestSite, version: int) -> tuple[str, ...]:
        others = [each for each in self.sites.values() if each is not site and each.listen]
        held = [each for each in others if self.registry[each.index].version == version]
        return tuple(each.listen for each in CHANCE.sample(held, min(len(held), 8)))


def _words(release: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(release.items()))[:MAX_REASON]
