"""Winding down: how the orchestrator hears of it, and how the trainer's ranks do.

- In: the file of `orrery.observe.wind_down`. Out: the batch after the last one, empty, with `wind_down` in its info; then `WoundDown`.
- All ranks get the message as that batch, so all stop at the same step; they make its checkpoint whole, with our half, which stands there.
"""

import time
from typing import NoReturn

from orrery.observe import wind_down
from orrery.observe.deadline import scaled
from orrery.observe.process import RoleContext
from orrery.observe.wind_down import WoundDown
from orrery.transport.rollout_wire import Batch, RolloutSender

POLL_S = 1.0
TAKE_S = 900.0  # the trainer may just be starting, or making a checkpoint


class PreemptionWatch:
    """Whether the stage is asked to wind down; looks once a second, and once made it stays."""

    def __init__(self, ctx: RoleContext):
        self._ctx, self._next_look_s = ctx, 0.0
        self.is_requested = False

    def poll(self) -> bool:
        now_s = time.monotonic()
        if not self.is_requested and now_s >= self._next_look_s:
            self._next_look_s = now_s + POLL_S
            self.is_requested = wind_down.is_asked(self._ctx.run_dir, self._ctx.stage)
        return self.is_requested


async def stop_trainer(ctx: RoleContext, wire: RolloutSender, step: int) -> NoReturn:
    """Tell the trainer's ranks to end after batch `step`, and end with them: raises WoundDown once all have heard."""
    ranks = ctx.manifest.trainer.mesh.world_size
    with ctx.health.waiting(f"trainer to wind down after batch {step}", deadline_s=scaled(TAKE_S)):
        await wire.send(Batch(step + 1, [[] for _ in range(ranks)], {}, {"wind_down": True}))
        await wire.drained(scaled(TAKE_S))
    raise WoundDown(step)
