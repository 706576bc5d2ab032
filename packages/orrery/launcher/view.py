"""Pass metric rows to sinks (such as W&B), and show progress on stderr.

A sink is removed after an error.
"""

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.live import Live

from orrery.manifest.errors import explain_os_error
from orrery.observe.progress import Progress, TensorBoardSink, WandbSink, configured, line, panel
from orrery.runtime.health import FAILED, Health, listed
from orrery.runtime.metrics import MetricsTail, Row

READ_S = 0.5
LIVE_S, PLAIN_S, QUIET_S = 0.5, 5.0, 60.0
MANY = 10  # with more processes, summarise each role
NUM_KINDS, NUM_ENDED = 3, 5


class Sink(Protocol):
    def write(self, process: str, row: Row) -> None: ...

    def close(self) -> None: ...


class Observer:
    def __init__(self, run_dir: Path, progress: Progress):
        self._progress, self._tail = progress, MetricsTail(run_dir, from_end=True)
        self._sinks: list[Sink] = []
        kinds: list[type[TensorBoardSink] | type[WandbSink]] = [TensorBoardSink]
        kinds += [WandbSink] if configured() else []
        for kind in kinds:
            with self._dropping(kind):
                self._sinks.append(kind(run_dir))
        self._has_failed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stop.wait(READ_S)
            self._read()
        for sink in self._sinks:
            with self._dropping(sink):
                sink.close()

    def _read(self) -> None:
        try:
            for process, row in self._tail.new_rows():
                for sink in self._sinks:
                    with self._dropping(sink):
                        sink.write(process, row)
                self._progress.add(process, row)
        except OSError as error:
            if not self._has_failed:
                why = f"({explain_os_error(error)}); tried again every {READ_S:g} s"
                print(f"warning: metrics cannot be read {why}", file=sys.stderr, flush=True)
            self._has_failed = True

    @contextmanager
    def _dropping(self, sink: Sink | type) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._sinks = [one for one in self._sinks if one is not sink]
            name = sink.__name__ if isinstance(sink, type) else type(sink).__name__
            print(f"warning: {name} is dropped: {error}", file=sys.stderr, flush=True)


class View:
    def __init__(self, progress: Progress):
        self._progress = progress
        self._console = Console(stderr=True)
        redraws = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live: Live | None = None
        if redraws:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
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
        wall_s, is_large = time.time(), len(states) > MANY
        if self._live:
            roles = summary(health, states, wall_s) if is_large else ()
            self._live.update(panel(self._progress, health, states, wall_s, roles), refresh=True)
        elif not is_large:
            print(line(self._progress, health, wall_s), file=sys.stderr, flush=True)
        else:
            news = self._progress.step, ended(health, states)
            if news != self._said or now_s >= self._said_s + QUIET_S:
                self._said, self._said_s = news, now_s
                parts = [line(self._progress, {}, wall_s), *summary(health, states, wall_s)]
                print(" · ".join(parts), file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._live:
            self._live.stop()


def ended(health: Mapping[str, Health], states: Mapping[str, str]) -> list[str]:
    failed = {name for name, one in health.items() if one.doing == FAILED}
    good = ("running", "exit code 0")
    return [name for name, state in states.items() if state not in good or name in failed]


def summary(health: Mapping[str, Health], states: Mapping[str, str], now_s: float) -> list[str]:
    by_role: dict[str, Counter[str]] = {}
    for name, state in states.items():
        one = health.get(name)
        if state == "running":
            state = "starting" if one is None else "waiting" if one.wait else one.doing
        by_role.setdefault(name.rpartition(".")[0], Counter())[state] += 1
    parts = []
    for role, counts in by_role.items():
        named = counts.most_common(NUM_KINDS)
        others = counts.total() - sum(number for _, number in named)
        named += [("otherwise", others)] if others else []
        parts.append(f"{role}: " + ", ".join(f"{number} {does}" for does, number in named))
    if gone := ended(health, states):
        more = f" and {len(gone) - NUM_ENDED} more" if len(gone) > NUM_ENDED else ""
        parts.append(f"failed or ended: {listed(gone[:NUM_ENDED])}{more}")
    since_s = {}
    for name, one in health.items():
        is_running = states.get(name) == "running" and name not in gone
        if is_running and one.role != "router" and (one.wait or one.step is not None):
            since_s[name] = one.wait.since_s if one.wait else one.since_s
    if since_s:
        slowest = min(since_s, key=lambda name: since_s[name])
        parts.append(f"slowest: {slowest} {health[slowest].sentence(now_s)}")
    return parts
