"""Poll the engines' load for admission, metrics and activity spans."""

import time
from collections.abc import Callable
from typing import Any

from orrery.manifest.errors import OrreryError
from orrery.orchestrator.admission import Admission
from orrery.orchestrator.engines.messages import EngineMetrics
from orrery.runtime.role_context import RoleContext
from orrery.runtime.timing import Pace, period_s

ENGINE_POLL_S = 0.5
PIECE_S = 5.0  # length of an activity span, longer in long runs


async def poll_engines(
    ctx: RoleContext, pool: Any, admission: Admission, pace: Pace | None = None
) -> dict[int, EngineMetrics]:
    """Return every engine's load by index, or {} if an engine does not answer in time.

    Writes rows when `pace` is due, or always if it is None.
    """
    try:
        loads: dict[int, EngineMetrics] = await pool.metrics()
    except OrreryError as error:  # a slow metrics page must not end the run
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
    # The first engines only prefill. The others' caches hold rollouts.
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
    """Write spans `generate` (attribute `engine`) while an engine has requests.

    Long spans are split, for live views and killed runs.
    """

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
