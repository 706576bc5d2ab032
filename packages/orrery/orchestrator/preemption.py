"""Notice a preemption request, and stop all trainer ranks at the same step.

All ranks get an empty batch with `wind_down` in its info. They then complete the last step's
checkpoint. The orchestrator has already written its half.
"""

import time
from typing import NoReturn

from orrery.runtime import preemption
from orrery.runtime.preemption import Preempted
from orrery.runtime.role_context import RoleContext
from orrery.runtime.timing import scaled
from orrery.wire.rollout_wire import Batch, RolloutSender

POLL_S = 1.0
TAKE_S = 900.0  # the trainer may be starting or writing a checkpoint


class PreemptionWatch:
    """Whether the stage must stop early. Polls at most once per second."""

    def __init__(self, ctx: RoleContext):
        self._ctx, self._next_poll_s = ctx, 0.0
        self.is_requested = False

    def poll(self) -> bool:
        now_s = time.monotonic()
        if not self.is_requested and now_s >= self._next_poll_s:
            self._next_poll_s = now_s + POLL_S
            self.is_requested = preemption.is_requested(self._ctx.run_dir, self._ctx.stage)
        return self.is_requested


async def stop_trainer(ctx: RoleContext, wire: RolloutSender, step: int) -> NoReturn:
    """Stop all trainer ranks after batch `step`, then raise Preempted."""
    ranks = ctx.manifest.trainer.mesh.world_size
    with ctx.health.waiting(f"trainer to wind down after batch {step}", deadline_s=scaled(TAKE_S)):
        await wire.send(Batch(step + 1, [[] for _ in range(ranks)], {}, {"wind_down": True}))
        await wire.drained(scaled(TAKE_S))
    raise Preempted(step)
