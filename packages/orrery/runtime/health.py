"""Write and read health files, each with a process's activity and open waits.

- A write replaces `stages/<stage>/health/<role>.<i>.json` atomically, without fsync.
- `time_s`: time of the last change other than a heartbeat. `clock_s`: the same time on the
  monotonic clock of the host. `boot`: the host's boot id.
"""

import asyncio
import errno
import json
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from orrery.runtime.run_directory import health_dir
from orrery.runtime.timing import scaled

log = logging.getLogger(__name__)

FAILED, DONE, STARTING, TERMINATED = "failed", "done", "starting", "terminated"
PREEMPTED = "wound down"
BEAT_S = 2.0
HANG_S = 90.0  # limit between heartbeats (NFS may delay one by a minute)


@dataclass(frozen=True)
class Wait:
    """A wait for `what`, such as "batch 4 from orchestrator".

    `behind_s`: `hang_detector` may call the waiting rank late if no rank of its role makes progress
    for so many seconds.
    """

    what: str
    since_s: float
    deadline_s: float | None
    behind_s: float | None = None


@dataclass(frozen=True)
class Heartbeat:
    beats: int
    begun: int
    completed: int
    marks: int


@dataclass(frozen=True)
class LoopBeats:
    """Event-loop heartbeats. The loop hangs if `count` does not change for `within_s`."""

    count: int
    time_s: float
    within_s: float


@dataclass(frozen=True)
class Health:
    role: str
    index: int
    time_s: float
    pid: int
    attempt: int
    doing: str
    since_s: float
    step: int | None = None
    deadline_s: float | None = None
    waits: tuple[Wait, ...] = ()
    error: str | None = None
    was: str | None = None
    still_s: float | None = None  # time limit without progress
    heartbeat: Heartbeat | None = None
    clock_s: float = 0.0
    boot: str = ""
    loop_beats: LoopBeats | None = None

    @property
    def name(self) -> str:
        return f"{self.role}.{self.index}"

    @property
    def wait(self) -> Wait | None:
        return min(
            self.waits,
            key=lambda wait: (wait.deadline_s is None, wait.deadline_s or wait.since_s),
            default=None,
        )

    def sentence(self, now_s: float | None = None) -> str:
        now_s = time.time() if now_s is None else now_s
        if self.wait is not None:
            return f"waiting {max(0.0, now_s - self.wait.since_s):.0f} s for {self.wait.what}"
        if self.doing in (DONE, FAILED, TERMINATED):
            return self.doing
        if self.doing == PREEMPTED:
            return f"{self.doing} at step {self.step}"
        step = "" if self.step is None else f" (step {self.step})"
        return f"{self.doing}{step} for {max(0.0, now_s - self.since_s):.0f} s"

    @property
    def last(self) -> str:
        step = "" if self.step is None else f" (step {self.step})"
        if self.doing == FAILED:
            return f"{self.was or self.doing}{step}"
        return f"waiting for {self.wait.what}{step}" if self.wait else f"{self.doing}{step}"


class HealthFile:
    def __init__(self, run_dir: Path, stage: str, role: str, index: int, attempt: int):
        self.path = health_dir(run_dir, stage) / f"{role}.{index}.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._role, self._index, self._attempt = role, index, attempt
        self._doing, self._since_s = STARTING, time.time()
        self._step: int | None = None
        self._deadline_s: float | None = None
        self._error: str | None = None
        self._was: str | None = None
        self._waits: dict[int, Wait] = {}
        self._tickets = 0
        self._still_s: float | None = None
        self._heartbeat: Heartbeat | None = None
        self._loop_beats: LoopBeats | None = None
        self._write()

    def doing(
        self,
        what: str,
        step: int | None = None,
        deadline_s: float | None = None,
        still_s: float | None = None,
    ) -> None:
        with self._lock:
            self._doing, self._since_s, self._was = what, time.time(), None
            self._step = self._step if step is None else step
            self._deadline_s = None if deadline_s is None else self._since_s + deadline_s
            self._still_s = still_s
            log.debug("%s, step %s", what, self._step)
            self._write()

    def beat(self, begun: int, completed: int, marks: int) -> None:
        with self._lock:
            beats = self._heartbeat.beats + 1 if self._heartbeat else 1
            self._heartbeat = Heartbeat(beats, begun, completed, marks)
            self._write(changed=False)

    def beat_loop(self, within_s: float | None) -> None:
        with self._lock:
            count = self._loop_beats.count + 1 if self._loop_beats else 1
            beats = None if within_s is None else LoopBeats(count, time.time(), within_s)
            self._loop_beats = beats
            self._write(changed=False)

    @contextmanager
    def waiting(
        self, what: str, deadline_s: float | None = None, behind_s: float | None = None
    ) -> Iterator[None]:
        log.debug("waiting for %s", what)
        with self._lock:
            self._tickets += 1
            ticket, now_s = self._tickets, time.time()
            self._waits[ticket] = Wait(
                what, now_s, None if deadline_s is None else now_s + deadline_s, behind_s
            )
            self._write()
        try:
            yield
        except BaseException:
            with self._lock:
                self._waits.pop(ticket)
                self._was = f"waiting for {what}"
            raise
        with self._lock:
            self._waits.pop(ticket)
            self._write()

    def failed(self, error: str) -> None:
        with self._lock:
            self._error = error
            self._was = self._was or self._doing
            self._doing, self._since_s = FAILED, time.time()
            self._deadline_s = self._still_s = None
            self._waits.clear()
            self._write()

    def done(self) -> None:
        self._end(DONE)

    def terminated(self) -> None:
        self._end(TERMINATED)

    def preempted(self, step: int) -> None:
        self._end(PREEMPTED, step)

    def _end(self, doing: str, step: int | None = None) -> None:
        with self._lock:
            self._waits.clear()
            self.doing(doing, step)

    def _write(self, changed: bool = True) -> None:
        if changed:
            self._time_s, self._clock_s = time.time(), time.monotonic()
        health = Health(
            self._role, self._index, self._time_s, os.getpid(), self._attempt, self._doing,
            self._since_s, self._step, self._deadline_s, tuple(self._waits.values()), self._error,
            self._was, self._still_s, self._heartbeat, self._clock_s, _boot(), self._loop_beats,
        )  # fmt: skip
        temporary, content = (
            self.path.with_name(f".{self.path.name}.tmp"),
            json.dumps(as_row(health)),
        )
        with suppress(OSError):
            try:
                temporary.write_text(content)
                temporary.replace(self.path)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                with self.path.open("r+b", buffering=0) as file:
                    file.write(content.encode().ljust(self.path.stat().st_size))


@cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def as_row(health: Health) -> dict[str, Any]:
    wait = health.wait
    return {
        "role": health.role,
        "index": health.index,
        "time_s": health.time_s,
        "pid": health.pid,
        "attempt": health.attempt,
        "doing": health.doing,
        "waiting_for": wait.what if wait else None,
        "since_s": wait.since_s if wait else health.since_s,
        "deadline_s": wait.deadline_s if wait else health.deadline_s,
        "doing_since_s": health.since_s,
        "step": health.step,
        "error": health.error,
        "was": health.was,
        "still_s": health.still_s,
        "heartbeat": None if health.heartbeat is None else asdict(health.heartbeat),
        "clock_s": health.clock_s,
        "boot": health.boot,
        "loop_beats": None if health.loop_beats is None else asdict(health.loop_beats),
        "waits": [[w.what, w.since_s, w.deadline_s, w.behind_s] for w in health.waits],
    }


SAME = (
    *("role", "index", "time_s", "pid", "attempt", "doing", "step"),
    *("error", "was", "still_s", "clock_s", "boot"),
)


def from_row(row: dict[str, Any]) -> Health:
    waits = tuple(Wait(*wait) for wait in row["waits"])
    return Health(
        since_s=row["doing_since_s"],
        deadline_s=None if waits else row["deadline_s"],
        waits=waits,
        heartbeat=Heartbeat(**row["heartbeat"]) if row["heartbeat"] else None,
        loop_beats=LoopBeats(**row["loop_beats"]) if row["loop_beats"] else None,
        **{key: row[key] for key in SAME},
    )


def read_health(run_dir: Path, stage: str, attempt: int | None = None) -> dict[str, Health]:
    """Return {process name: health} of `attempt`, or of all attempts. Skip unreadable files."""
    found: dict[str, Health] = {}
    for path in sorted(health_dir(run_dir, stage).glob("[!.]*.json")):
        try:
            health = from_row(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if attempt is None or health.attempt == attempt:
            found[health.name] = health
    return found


@asynccontextmanager
async def beating_loop(health: HealthFile) -> AsyncIterator[None]:
    """Write event-loop heartbeats. If the loop hangs, the launcher ends the process."""
    beating = asyncio.create_task(_beat(health), name="heartbeat")
    try:
        yield
    finally:
        beating.cancel()
        with suppress(asyncio.CancelledError):
            await beating
        health.beat_loop(None)


async def _beat(health: HealthFile) -> None:
    within_s = scaled(HANG_S)
    while True:
        health.beat_loop(within_s)
        await asyncio.sleep(min(BEAT_S, within_s / 4))


def listed(names: Iterable[str]) -> str:
    by_role: dict[str, list[int]] = {}
    for name in names:
        role, _, index = name.rpartition(".")
        by_role.setdefault(role, []).append(int(index))
    return ", ".join(
        f"{role}.{run}" for role, indices in by_role.items() for run in _runs(sorted(indices))
    )


def _runs(indices: list[int]) -> list[str]:
    first, found = indices[0], []
    for index, following in zip(indices, [*indices[1:], -1], strict=True):
        if following != index + 1:
            found.append(f"{first}" if first == index else f"{first}-{index}")
            first = following
    return found
