"""Engine load: what the engines say of themselves, given to admission, and written down at a pace."""

import time
from typing import Any

from orrery.manifest.errors import OrreryError
from orrery.observe.pace import Pace
from orrery.observe.process import RoleContext
from orrery.orchestrator.admission import Admission
from orrery.orchestrator.engines.messages import EngineMetrics

ENGINE_POLL_S = 0.5


async def poll_engines(
    ctx: RoleContext, fleet: Any, admission: Admission, pace: Pace | None = None
) -> dict[int, EngineMetrics]:
    """One look at every engine that is there, by index; none where one does not answer in time, and the limit stays as it is.

    Rows are written where `pace` says that they are due; without one, always.
    """
    try:
        loads: dict[int, EngineMetrics] = await fleet.metrics()
    except OrreryError as error:  # an engine that is gone is fenced, or ends the run by other ways; a slow page must not
        ctx.log.warning("no numbers from the engines: %s", error)
        return {}
    due = pace is None or pace.due(time.monotonic())
    for index, load in loads.items() if due else ():
        ctx.metrics.write(
            None, event="engine", engine=index, running=load.running, waiting=load.waiting, kv_usage=load.kv_usage,
            preemptions=load.preemptions_total, external_hit_tokens=load.external_hit_tokens_total,
        )  # fmt: skip
    # The first ones only prefill: rollouts live in the caches of the others.
    serving = {
        index: load
        for index, load in loads.items()
        if index >= ctx.manifest.inference.prefill_replicas
    }
    before = admission.limit
    admission.observe(serving)
    if admission.adaptive is not None:
        if due:
            ctx.metrics.write(
                None,
                event="admission",
                limit=admission.limit,
                num_in_flight=admission.taken,
                share=admission.adaptive.share,
            )
        if admission.limit != before:
            ctx.log.debug(
                "rollouts in flight: %d of %d at most, before %d",
                admission.taken,
                admission.limit,
                before,
            )
    return loads
