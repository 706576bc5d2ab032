"""Weight updates: load new weights into all engines while rollouts are in flight.

- Order: start no rollouts → cancel stale rollouts and wait until they have left the engines →
  pause, load, attest, resume (`EnginePool`) → record. A paused engine cannot handle aborts.
- An update waits for an active evaluation, then loads the newest version.
"""

import time
from typing import Any

from orrery.orchestrator.engines.recovery import RETURN_S
from orrery.orchestrator.runner import RolloutRunner
from orrery.orchestrator.scheduler import Scheduler
from orrery.runtime.role_context import RoleContext
from orrery.runtime.timing import scaled
from orrery.wire.engine_api import UPDATE_S


class Updates:
    def __init__(
        self, ctx: RoleContext, scheduler: Scheduler, runner: RolloutRunner, pool: Any, watch: Any
    ):
        self.ctx, self.scheduler, self.runner = ctx, scheduler, runner
        self.pool, self.watch = pool, watch

    async def take_newest(self) -> bool:
        """Update to the newest version, unless an evaluation is active. Return whether it did."""
        scheduler = self.scheduler
        if scheduler.evaluations.pinned is not None:
            return False
        published = self.watch.latest()
        if published is None or not scheduler.may_update(published.version):
            return False
        version, digest = published.version, published.digest
        scheduler.updating = True
        was_known = version in scheduler.digests  # known from a checkpoint
        # The version's first tokens may arrive before the update returns.
        scheduler.digests[version] = digest
        start_s = time.time()
        await self.runner.cancel(scheduler.drain())
        drained_s = time.time()
        manifest = self.ctx.manifest
        # If no engine is left, the update waits until an engine returns.
        return_s = RETURN_S if manifest.inference.max_restarts else 0.0
        with self.ctx.health.waiting(
            f"engines to take version {version} (inference)",
            deadline_s=manifest.orchestrator.rollout_timeout_s + scaled(UPDATE_S + return_s),
        ):
            report = await self.pool.update(published)
        if report is None:  # the trainer has already published a newer version
            scheduler.updating = False
            if not was_known:
                del scheduler.digests[version]
            return False
        scheduler.updated(version)
        scheduler.updating = False
        in_flight = scheduler.dispatch.num_in_flight
        metrics, end_s = self.ctx.metrics, time.time()
        metrics.add_span("update", start_s, end_s, version, num_in_flight=in_flight)
        metrics.write(
            version,
            event="update",
            version=version,
            digest=digest,
            drain_s=drained_s - start_s,
            pause_s=report.paused_s,
            update_s=report.update_s,
            attest_s=report.attest_s,
            num_in_flight=in_flight,
            attested=report.attested,
            canary_s=report.canary_s,
            canary_difference=report.canary_difference,
        )
        text = "version %d (%s) in all engines: %d in flight, paused %.0f ms"
        self.ctx.log.info(text, version, digest, in_flight, 1000 * report.paused_s)
        return True
