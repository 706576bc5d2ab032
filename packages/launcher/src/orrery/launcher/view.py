"""The view on stderr: live when it is a terminal, else a plain line every few seconds."""

import sys
import time
from collections.abc import Mapping

from rich.console import Console
from rich.live import Live

from orrery.observe.health import Health
from orrery.observe.progress import Progress, line, panel

LIVE_S, PLAIN_S = 0.5, 5.0


class View:
    """`draw` may be called as often as one likes; it draws when it is time to."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if self._console.is_terminal else None
        self._every_s = LIVE_S if self._live else PLAIN_S
        self._next_s = time.monotonic() + (0 if self._live else PLAIN_S)
        if self._live:
            self._live.start()

    def draw(self, health: Mapping[str, Health], states: Mapping[str, str]) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._every_s
        if self._live:
            self._live.update(panel(self._progress, health, states, time.time()), refresh=True)
        else:
            print(line(self._progress, health, time.time()), file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._live:
            self._live.stop()
