"""Limit the rollouts in flight. A permit is one rollout.

- Lowering the limit cancels no rollout.
- The adaptive limit is `engines / share`. `share` is the part of one engine's cache that a rollout
  in flight takes.
- `share` rises at once. It falls slowly, as rollouts end, and only while all permits are taken and
  queues are short: young rollouts must not raise the limit.
- A preemption lowers the limit by at most BACKOFF, and again only when the pool fits that limit.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from orrery.manifest.schema import AdaptiveAdmission, FixedAdmission
from orrery.orchestrator.engines.messages import EngineMetrics

BACKOFF = 0.05  # largest cut per poll with preemptions, as a part of the limit
LEAST = 1e-9  # share of a cache
DECAY = 3.0  # after a turnover of the whole pool, e^-DECAY of an old share remains


@dataclass
class AdaptiveLimit:
    bounds: AdaptiveAdmission
    max_model_len_tokens: int
    share: float | None = None
    limit: int = field(init=False)
    _preemptions: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.limit = self.bounds.min_in_flight

    def observe(
        self, loads: Mapping[int, EngineMetrics], in_flight: int, num_ended: int, was_full: bool
    ) -> None:
        """Update share and limit from one poll.

        `loads` excludes prefill engines. `num_ended` and `was_full` (no free permit) count since
        the last poll.
        """
        preempted = self._newly_preempted(loads)
        if not loads:
            return
        if self.share is None:
            self.share = self._first_share(loads)
        # Loading requests count as waiting, but hold their blocks.
        holding = sum(load.running + load.loading for load in loads.values())
        waiting = sum(load.waiting - load.loading for load in loads.values())
        if holding and in_flight:
            held = in_flight * holding / (holding + waiting)
            measured = sum(load.kv_usage for load in loads.values()) / held
            if measured >= self.share:
                self.share = measured
            elif was_full and not preempted and waiting <= num_ended:
                kept = math.exp(-DECAY * num_ended / in_flight)
                self.share = max(LEAST, measured + (self.share - measured) * kept)
            if preempted and in_flight <= self.limit:
                fits = min(self.limit, in_flight, len(loads) / self.share)
                self.share = len(loads) / max(0.5, fits - min(preempted, max(1.0, BACKOFF * fits)))
        self._follow(len(loads))

    def _follow(self, num_engines: int) -> None:
        assert self.share is not None
        most = self.bounds.max_in_flight
        fits = most if self.share * most <= num_engines else int(num_engines / self.share + 1e-9)
        self.limit = max(self.bounds.min_in_flight, fits)

    def _first_share(self, loads: Mapping[int, EngineMetrics]) -> float:
        kv_tokens = min(load.kv_tokens for load in loads.values())
        if not kv_tokens:
            return len(loads) / self.bounds.min_in_flight
        return min(1.0, self.max_model_len_tokens / kv_tokens)

    def _newly_preempted(self, loads: Mapping[int, EngineMetrics]) -> int:
        """Count preemptions since the last poll. A restarted engine counts from 0."""
        before = self._preemptions
        totals = {index: load.preemptions_total for index, load in loads.items()}
        self._preemptions = before | totals
        new = 0
        for index, total in totals.items():
            if index in before:
                new += total - before[index] if total >= before[index] else total
        return new


class Admission:
    def __init__(self, settings: FixedAdmission | AdaptiveAdmission, max_model_len_tokens: int):
        self.adaptive: AdaptiveLimit | None = None
        if isinstance(settings, AdaptiveAdmission):
            self.adaptive = AdaptiveLimit(settings, max_model_len_tokens)
        self.limit = self.adaptive.limit if self.adaptive else settings.max_in_flight
        self.taken = 0
        self._num_ended, self._was_full = 0, False  # since the last poll

    @property
    def free(self) -> int:
        return max(0, self.limit - self.taken)

    def take(self) -> None:
        if self.taken >= self.limit:
            raise AssertionError(f"permit {self.taken + 1} of {self.limit} taken")
        self.taken += 1
        self._was_full |= self.taken == self.limit

    def give_back(self, count: int = 1) -> None:
        if count > self.taken:
            raise AssertionError(f"{count} permits given back, {self.taken} taken")
        self.taken -= count
        self._num_ended += count

    def observe(self, loads: Mapping[int, EngineMetrics]) -> None:
        was_full = self._was_full or self.taken >= self.limit
        if self.adaptive is not None:
            self.adaptive.observe(loads, self.taken, self._num_ended, was_full)
            self.limit = self.adaptive.limit
        self._num_ended, self._was_full = 0, self.taken >= self.limit
