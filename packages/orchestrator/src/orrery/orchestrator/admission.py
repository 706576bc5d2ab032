"""Admission: how many rollouts may be in flight. A permit is one rollout.

- Always: 0 ≤ taken; every permit taken is given back once.
- Lowering the limit never cancels; it only stops refilling.
- Pure: no clock, no engine. Who looks at the engines calls `observe`; while they do not answer nobody does, and the limit stays.

A limit that adapts is what the engines' caches hold. It has one number to learn, the need: the share of one engine's cache that a rollout
in flight takes. Cache in use over rollouts in flight measures it, shared prefixes and turns that wait for tools included.

- A need above the one held counts at once. One below counts as rollouts end, and only while the pool is full and the engines' queues
  are not. So the limit is good for the worst moment of about the last third of a turnover, a young cohort raises no hopes, and the time
  constant is the rollouts' own.
- Rollouts whose requests queue in an engine are held by no cache: that raises the need, at once.
- Preempted rollouts did not fit, though a gauge may not show it any more: the limit falls by as many, by BACKOFF at most, and not again
  before the pool has come down to it, since what happens until then is not the new limit's doing.
- A storm cancels nothing either: a preempted rollout loses its cache, which is one prefill; a cancelled one loses its tokens too.
- The need is of one engine, so an engine that is gone takes its share of the limit along, and brings it back.
- First the limit is what the caches hold of rollouts at the longest context.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from orrery.manifest.schema import AdaptiveAdmission, FixedAdmission
from orrery.orchestrator.engines.messages import EngineMetrics

BACKOFF = 0.05  # of the limit, at a look that finds preemptions
LEAST = 1e-9  # share of a cache
DECAY = 3.0  # what a turnover of the pool leaves of a need that is no longer measured, as a power of 1/e


@dataclass
class AdaptiveLimit:
    """The share of one engine's cache that a rollout in flight takes, and the limit that follows."""

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
        """Follow the engines that serve, by index; rollouts in flight now, ended since the last look, and whether permits ran out since.

        Prefill engines are not among `loads`: their caches hold a prompt for a moment.
        """
        preempted = self._newly_preempted(loads)
        if not loads:
            return
        if self.share is None:
            self.share = self._first_share(loads)
        # Requests whose cache is being loaded count as waiting and hold their blocks.
        holding = sum(load.running + load.loading for load in loads.values())
        waiting = sum(load.waiting - load.loading for load in loads.values())
        if holding and in_flight:
            held = in_flight * holding / (holding + waiting)
            measured = sum(load.kv_usage for load in loads.values()) / held
            if measured >= self.share:
                self.share = measured
            elif was_full and not preempted and waiting <= num_ended:
                self.share = max(
                    LEAST,
                    measured + (self.share - measured) * math.exp(-DECAY * num_ended / in_flight),
                )
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
        """Preemptions since the last look; none at the first. An engine that started anew counts from 0 again."""
        before = self._preemptions
        self._preemptions = before | {
            index: load.preemptions_total for index, load in loads.items()
        }
        return sum(
            now.preemptions_total - (was if (was := before[index]) <= now.preemptions_total else 0)
            for index, now in loads.items()
            if index in before
        )


class Admission:
    """A counter of permits, under the manifest's limit or one that follows the engines."""

    def __init__(self, settings: FixedAdmission | AdaptiveAdmission, max_model_len_tokens: int):
        self.adaptive = (
            AdaptiveLimit(settings, max_model_len_tokens)
            if isinstance(settings, AdaptiveAdmission)
            else None
        )
        self.limit = self.adaptive.limit if self.adaptive else settings.max_in_flight
        self.taken = 0
        self._num_ended, self._was_full = 0, False  # since the last look

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
        """Let the limit follow these engines, if it does follow; `Need.observe` says which."""
        was_full = self._was_full or self.taken >= self.limit
        if self.adaptive is not None:
            self.adaptive.observe(loads, self.taken, self._num_ended, was_full)
            self.limit = self.adaptive.limit
        self._num_ended, self._was_full = 0, self.taken >= self.limit
