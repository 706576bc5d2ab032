"""Heartbeat: a count by which the launcher finds a blocked event loop within HANG_S.

- In: the event loop of a role. Out: a count in the role's health, which the loop raises every
  BEAT_S.
- The count stops if the loop is blocked (a call does not return, a lock is not freed) or if the
  process is stopped.
- Run long blocking work, such as reading data sets, in a thread, under a wait with its own
  deadline.
- The launcher counts HANG_S on its own clock, and only while it looks (`sight.py`). `watchdog.py`
  writes the error sentence.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from orrery.observe.deadline import scaled
from orrery.observe.health import HealthFile

BEAT_S = 2.0
HANG_S = 90.0  # scaled; our loops block for a tenth of it at most, and NFS may lag by a minute


@asynccontextmanager
async def heartbeat(health: HealthFile) -> AsyncIterator[None]:
    """Beat while the body runs, then end the heartbeat: the process may still wait for threads."""
    beating = asyncio.create_task(_beat(health), name="heartbeat")
    try:
        yield
    finally:
        beating.cancel()
        with suppress(asyncio.CancelledError):
            await beating
        health.turns(None)


async def _beat(health: HealthFile) -> None:
    within_s = scaled(HANG_S)
    while True:
        health.turns(within_s)
        await asyncio.sleep(min(BEAT_S, within_s / 4))
