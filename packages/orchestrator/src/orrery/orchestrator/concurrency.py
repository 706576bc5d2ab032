"""Two asyncio helpers: a broadcast event and a daemon thread for blocking calls."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any


class Notifier:
    """One `ring` wakes all who wait now."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify_all(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Returns at the next ring, or after `timeout_s`."""
        # Not wait_for: Python 3.11's loses a cancellation that meets a ring, and a loop that is being ended would go on.
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()


class WorkerThread:
    """The thread starts with the first call."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._lock = threading.Lock()

    async def __call__(self, call: Callable[[], Any]) -> Any:
        """What `call()` returns or raises. A caller that is cancelled takes its call back, unless it has begun."""
        with self._lock:
            if not self._thread.ident:
                self._thread.start()
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        while True:
            future, call = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # the caller's
                    future.set_exception(error)
