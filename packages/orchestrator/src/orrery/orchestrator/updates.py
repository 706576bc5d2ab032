"""Updates: new weights go into all engines while rollouts are in flight.

- Order: nothing starts any more → stale work is drained (cancelled, and gone from the engines) → pause, load, attest, resume (the fleet)
  → the state has the version. Aborting before the pause, not during it, keeps the engines' bookkeeping out of our way.
- Every engine attests every tensor and answers the canary. On a mismatch the fleet raises
  `RunFailed`.
- The fleet also handles lost engines.
- An active evaluation keeps the version: then an update waits. Versions that were published meanwhile are skipped, newest wins.
"""

import time
from typing import Any

from orrery.observe.deadline import scaled
from orrery.observe.process import RoleContext
from orrery.orchestrator.engines.pool import RETURN_S
from orrery.orchestrator.runner import RolloutRunner
from orrery.orchestrator.scheduler import Scheduler
from orrery.transport.engine_api import UPDATE_S


class Updates:
    """Brings engines to published versions, one update at a time."""

    def __init__(
        self, ctx: RoleContext, scheduler: Scheduler, runner: RolloutRunner, fleet: Any, watch: Any
    ):
        self.ctx, self.scheduler, self.runner, self.fleet, self.watch = (
            ctx,
            scheduler,
            runner,
            fleet,
            watch,
        )

    async def take_newest(self) -> bool:
        """Update, if something newer is published and nothing has the version pinned. True where engines have changed."""
        if self.scheduler.evaluations.pinned is not None:
            return False
        published = self.watch.latest()
        if published is None or not self.scheduler.may_update(published.version):
            return False
        scheduler, version = self.scheduler, published.version
        scheduler.updating = True
        was_known = version in scheduler.digests  # by tokens of before a resume
        scheduler.digests[version] = (
            published.digest
        )  # before the update: its first tokens may be back before the call is
        start_s = time.time()
        await self.runner.cancel(scheduler.drain())
        drained_s = time.time()
        manifest = self.ctx.manifest
        return_s = (
            RETURN_S if manifest.inference.max_restarts else 0.0
        )  # an update without engines is over when one has come back
        with self.ctx.health.waiting(
            f"engines to take version {version} (inference)",
            deadline_s=manifest.orchestrator.rollout_timeout_s + scaled(UPDATE_S + return_s),
        ):
            report = await self.fleet.update(published)
        if report is None:  # the trainer has gone on since; what it makes next will do
            scheduler.updating = False
            if not was_known:
                del scheduler.digests[version]
            return False
        scheduler.updated(version)
        scheduler.updating = False
        num_in_flight = scheduler.dispatch.num_in_flight
        self.ctx.metrics.add_span(
            "update", start_s, time.time(), version, num_in_flight=num_in_flight
        )
        self.ctx.metrics.write(
            version, event="update", version=version, digest=published.digest, drain_s=drained_s - start_s,
            pause_s=report.paused_s, update_s=report.update_s, attest_s=report.attest_s, num_in_flight=num_in_flight,
            attested=report.attested, canary_s=report.canary_s, canary_difference=report.canary_difference,
        )  # fmt: skip
        self.ctx.log.info(
            "version %d (%s) in all engines: %d in flight, paused %.0f ms",
            version,
            published.digest,
            num_in_flight,
            1000 * report.paused_s,
        )
        return True
