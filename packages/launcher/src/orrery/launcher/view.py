"""The view on stderr: one live table in a terminal that can redraw, else plain lines.

- The table has a row per process. With many processes it has a line per role.
- A plain line every few seconds names all processes. With many processes it is short, and comes at
  changes or once a minute.
"""

import sys
import time
from collections import Counter
from collections.abc import Mapping

from rich.console import Console
from rich.live import Live

from orrery.observe.progress import Progress, line, panel
from orrery.runtime.health import FAILED, Health, listed

LIVE_S, PLAIN_S, QUIET_S = 0.5, 5.0, 60.0
MANY = 10  # more processes than a person reads one by one
NUM_KINDS, NUM_ENDED = 3, 5  # named in a short line


class View:
    """`draw` may be called as often as one likes; it draws when it is time to."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._console = Console(stderr=True)
        redraws = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = (
            Live(console=self._console, auto_refresh=False, transient=True) if redraws else None
        )
        self._every_s = LIVE_S if self._live else PLAIN_S
        self._next_s = time.monotonic() + (0 if self._live else PLAIN_S)
        self._said: tuple[int, list[str]] | None = None
        self._said_s = 0.0
        if self._live:
            self._live.start()

    def draw(self, health: Mapping[str, Health], states: Mapping[str, str]) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._every_s
        if self._live:
            roles = summary(health, states, time.time()) if len(states) > MANY else ()
            self._live.update(
                panel(self._progress, health, states, time.time(), roles), refresh=True
            )
        elif len(states) <= MANY:
            print(line(self._progress, health, time.time()), file=sys.stderr, flush=True)
        else:
            news = self._progress.step, ended(health, states)
            if news != self._said or now_s >= self._said_s + QUIET_S:
                self._said, self._said_s = news, now_s
                print(
                    " · ".join(
                        [
                            line(self._progress, {}, time.time()),
                            *summary(health, states, time.time()),
                        ]
                    ),
                    file=sys.stderr,
                    flush=True,
                )

    def close(self) -> None:
        if self._live:
            self._live.stop()


def ended(health: Mapping[str, Health], states: Mapping[str, str]) -> list[str]:
    """Who has ended other than well, or says that it failed."""
    failed = {name for name, one in health.items() if one.doing == FAILED}
    return [
        name
        for name, state in states.items()
        if state not in ("running", "exit code 0") or name in failed
    ]


def summary(health: Mapping[str, Health], states: Mapping[str, str], now_s: float) -> list[str]:
    """`trainer: 95 training, 1 waiting`, a part a role; then who failed or ended, and who of those that wait or count steps is slowest."""
    by_role: dict[str, Counter[str]] = {}
    for name, state in states.items():
        one = health.get(name)
        does = (
            state
            if state != "running"
            else "starting"
            if one is None
            else "waiting"
            if one.wait
            else one.doing
        )
        by_role.setdefault(name.rpartition(".")[0], Counter())[does] += 1
    parts = []
    for role, counts in by_role.items():
        named = counts.most_common(NUM_KINDS)
        others = counts.total() - sum(number for _, number in named)
        parts.append(
            f"{role}: "
            + ", ".join(
                f"{number} {does}"
                for does, number in [*named, *([("otherwise", others)] if others else [])]
            )
        )
    if gone := ended(health, states):
        more = f" and {len(gone) - NUM_ENDED} more" if len(gone) > NUM_ENDED else ""
        parts.append(f"failed or ended: {listed(gone[:NUM_ENDED])}{more}")
    since_s = {
        name: one.wait.since_s if one.wait else one.since_s
        for name, one in health.items()
        if states.get(name) == "running"
        and name not in gone
        and one.role != "router"
        and (one.wait or one.step is not None)
    }
    if since_s:
        slowest = min(since_s, key=lambda name: since_s[name])
        parts.append(f"slowest: {slowest} {health[slowest].sentence(now_s)}")
    return parts
