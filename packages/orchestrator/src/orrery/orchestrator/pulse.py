"""Pulse: wakes whoever waits for the state to change.

The loop's activities each look at the state, do what there is to do, and wait for the next pulse or a time limit. Nothing between the
look and the wait gives way to another task, so no change is missed.
"""

import asyncio
from contextlib import suppress


class Pulse:
    """One `ring` wakes all who wait now."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, at_most_s: float) -> None:
        """Returns at the next ring, or after `at_most_s`."""
        # Not wait_for: Python 3.11's loses a cancellation that meets a ring, and a loop that is being ended would go on.
        with suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                await self._event.wait()
