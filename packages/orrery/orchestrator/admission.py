"""Limit the rollouts in flight. Each rollout in flight takes one permit.

- The adaptive limit is the number of engines / `share`. `share` estimates the part of one engine's
  KV cache that a rollout uses. It rises at once but falls slowly, because young rollouts use little
  cache.
- Each request that an engine preempts lowers the limit by 1. Preemptions lower it by at most
  max(1, BACKOFF · limit) per poll.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import AdaptiveAdmission, FixedAdmission
from orrery.orchestrator.engines.messages import EngineMetrics
from orrery.runtime.role_context import RoleContext
from orrery.runtime.timing import Pace, period_s

BACKOFF = 0.05
LEAST = 1e-9
# Each poll multiplies `share` − measured share by e^(−DECAY · ended rollouts / in flight).
DECAY = 3.0
ENGINE_POLL_S = 0.5
PIECE_S = 5.0


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
        """Update `share` and `limit`.

        `num_ended`: rollouts that ended since the last poll. `was_full`: whether all permits were
        taken at some time since the last poll.
        """
        preempted = self._newly_preempted(loads)
        if not loads:
            return
        if self.share is None:
            self.share = self._first_share(loads)
        # A request that loads KV blocks already occupies cache, but vLLM counts it as waiting.
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
        """Return new preemptions. A restarted engine counts from 0 again."""
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
        self._num_ended, self._was_full = 0, False

    @property
    def free(self) -> int:
        return max(0, self.limit - self.taken)

    def take(self) -> None:
        if self.taken >= self.limit:
            raise AssertionError(f"took permit {self.taken + 1} of {self.limit}")
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


async def poll_engines(
    ctx: RoleContext, pool: Any, admission: Admission, pace: Pace | None = None
) -> dict[int, EngineMetrics]:
    """Update `admission`. Return the engines' loads, or {} if an engine does not answer."""
    try:
        loads: dict[int, EngineMetrics] = await pool.metrics()
    except OrreryError as error:
        ctx.log.warning("no numbers from the engines: %s", error)
        return {}
    due = pace is None or pace.due(time.monotonic())
    for index, load in loads.items() if due else ():
        ctx.metrics.write(
            None,
            event="engine",
            engine=index,
            running=load.running,
            waiting=load.waiting,
            kv_usage=load.kv_usage,
            preemptions=load.preemptions_total,
            external_hit_tokens=load.external_hit_tokens_total,
        )
    # Skip prefill engines, because rollouts only fill decode engines' caches.
    first = ctx.manifest.inference.prefill_replicas
    before = admission.limit
    admission.observe({index: load for index, load in loads.items() if index >= first})
    if admission.adaptive is None:
        return loads
    limit, taken, share = admission.limit, admission.taken, admission.adaptive.share
    if due:
        ctx.metrics.write(None, event="admission", limit=limit, num_in_flight=taken, share=share)
    if limit != before:
        ctx.log.debug("rollouts in flight: %d of %d at most, before %d", taken, limit, before)
    return loads


class EngineActivity:
    """Records `generate` spans in the metrics: times during which an engine has requests."""

    def __init__(self, add_span: Callable[..., None]):
        self._add_span = add_span
        self._busy_since: dict[int, float] = {}
        self._begin_s: float | None = None

    def observe(self, engine: int, num_requests: int, now_s: float) -> None:
        self._begin_s = now_s if self._begin_s is None else self._begin_s
        since = self._busy_since.get(engine)
        if since is None:
            if num_requests:
                self._busy_since[engine] = now_s
        elif not num_requests or now_s - since >= period_s(now_s - self._begin_s, PIECE_S):
            self._add_span("generate", since, now_s, engine=engine)
            if num_requests:
                self._busy_since[engine] = now_s
            else:
                del self._busy_since[engine]

    def close(self, now_s: float) -> None:
        for engine in list(self._busy_since):
            self.observe(engine, 0, now_s)
