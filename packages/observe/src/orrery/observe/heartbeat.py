"""Heartbeat: an event loop says that it turns, so that the launcher finds one that is blocked, and names it, within HANG_S.

- In: the event loop of a role. Out: a count in the role's health, which the loop itself raises every BEAT_S.
- A blocked loop (a call that does not return, a lock that is not freed) and a stopped process both stop the count.
- What may block for long, as reading data sets does, belongs into a thread, with a wait of its own that has a deadline.
- The launcher counts HANG_S on its own clock, and only while it looks (`sight.py`); `watchdog.py` makes the sentence.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from orrery.observe.deadline import scaled
from orrery.observe.health import HealthFile

BEAT_S = 2.0
HANG_S = 90.0  # scaled; no call in an event loop of ours takes a tenth of it, and NFS may show a file of a minute ago


@asynccontextmanager
async def heartbeat(health: HealthFile) -> AsyncIterator[None]:
    """Around all that the loop does. Afterwards nobody listens for it, since threads may still have something to end."""
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
