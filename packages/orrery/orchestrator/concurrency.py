"""Two asyncio helpers: a broadcast event, and a daemon thread for blocking calls."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any


class Notifier:
    """Wake all waiting tasks. A task must not `await` between its check and its wait."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify_all(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        # Not wait_for: in Python 3.11 it loses a cancellation that arrives with the event.
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()


class WorkerThread:
    """Run blocking calls in order in a daemon thread. Cancelling withdraws a queued call."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._lock = threading.Lock()

    async def __call__(self, call: Callable[[], Any]) -> Any:
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
                except BaseException as error:
                    future.set_exception(error)
