"""Health: one small file a process that says what it does, or what it waits for and until when.

- In: a role's `doing(...)` and `waiting(...)`; out: `stages/<stage>/health/<role>.<i>.json`, replaced atomically.
- Times are `time.time()`, for people. The launcher uses its own times instead (`sight.py`).
  `since_s` and `deadline_s` in the file are points in time; the argument `deadline_s` is a
  duration.
- `time_s` is the last change, not a heartbeat: a role that says nothing new for long is one the watchdog may ask about. `clock_s` is the
  same on the monotonic clock, which all processes since one `boot` of a host share.
- A role whose processes go in lock-step says a pulse besides: how many collectives this process has begun and completed, and whatever
  else it counts. The watchdog compares pulses (`stillness.py`); a pulse that goes on says that the process is alive, not that it moves.
- A role with an event loop also counts its beats (`heartbeat.py`).
- Several waits may be open at once (an asyncio role); `waiting_for` is the one that runs out first, `waits` lists all of them.
- Where the disk is full the file is written over in place, which takes no room of most file systems: else who fails of it could not say so,
  and who fails with it would be named. A reader who comes in between finds no JSON, and looks again.
- Never: fsync. Health is for the living; after a power loss nobody reads it.
"""

import errno
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

FAILED, DONE, STARTING, TERMINATED, WOUND_DOWN = (
    "failed",
    "done",
    "starting",
    "terminated",
    "wound down",
)


@dataclass(frozen=True)
class Wait:
    """One open wait: `what` names the thing and the role it comes from ("batch 4 from orchestrator")."""

    what: str
    since_s: float
    deadline_s: float | None
    behind_s: float | None = (
        None  # it comes to all of the role at once: who waits for this long while collectives hold all others is stuck
    )


@dataclass(frozen=True)
class Pulse:
    """`beats` counts what was said; the others what was done: collectives, summed over this process's groups, and `marks` of other work."""

    beats: int
    begun: int
    completed: int
    marks: int


@dataclass(frozen=True)
class Turns:
    """The beats of an event loop. It is blocked if `count` does not change for `within_s`."""

    count: int
    time_s: float
    within_s: float


@dataclass(frozen=True)
class Health:
    """What one process last said of itself."""

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
    was: str | None = None  # what a failed process was doing or waiting for
    still_s: float | None = None  # what it does moves: no progress for this long is a stall
    pulse: Pulse | None = None
    clock_s: float = 0.0
    boot: str = ""
    turns: Turns | None = None

    @property
    def name(self) -> str:
        return f"{self.role}.{self.index}"

    @property
    def wait(self) -> Wait | None:
        """The open wait that runs out first."""
        return min(
            self.waits,
            key=lambda wait: (wait.deadline_s is None, wait.deadline_s or wait.since_s),
            default=None,
        )

    def sentence(self, now_s: float | None = None) -> str:
        """`waiting 12 s for batch 4 from orchestrator` or `training (step 3) for 2 s`."""
        now_s = time.time() if now_s is None else now_s
        if self.wait is not None:
            return f"waiting {max(0.0, now_s - self.wait.since_s):.0f} s for {self.wait.what}"
        if self.doing in (DONE, FAILED, TERMINATED):
            return self.doing
        if self.doing == WOUND_DOWN:
            return f"{self.doing} at step {self.step}"
        step = "" if self.step is None else f" (step {self.step})"
        return f"{self.doing}{step} for {max(0.0, now_s - self.since_s):.0f} s"

    @property
    def last(self) -> str:
        """What it did or waited for, without how long: for the sentence about its end."""
        step = "" if self.step is None else f" (step {self.step})"
        if self.doing == FAILED:
            return f"{self.was or self.doing}{step}"
        return f"waiting for {self.wait.what}{step}" if self.wait else f"{self.doing}{step}"


def health_dir(run_dir: Path, stage: str) -> Path:
    return run_dir / "stages" / stage / "health"


class HealthFile:
    """The writing end; safe to call from several threads."""

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
        self._pulse: Pulse | None = None
        self._turns: Turns | None = None
        self._write()

    def doing(
        self,
        what: str,
        step: int | None = None,
        deadline_s: float | None = None,
        still_s: float | None = None,
    ) -> None:
        """Say what starts now. To take longer than `deadline_s`, or to show no progress for `still_s`, is a stall."""
        with self._lock:
            self._doing, self._since_s, self._step = (
                what,
                time.time(),
                self._step if step is None else step,
            )
            self._was = None
            self._deadline_s = None if deadline_s is None else self._since_s + deadline_s
            self._still_s = still_s
            log.debug("%s, step %s", what, self._step)
            self._write()

    def beat(self, begun: int, completed: int, marks: int) -> None:
        """A pulse: what this process has done so far."""
        with self._lock:
            self._pulse = Pulse(
                self._pulse.beats + 1 if self._pulse else 1, begun, completed, marks
            )
            self._write(changed=False)

    def turns(self, within_s: float | None) -> None:
        """Count one beat; the next comes within `within_s`. None: no more beats."""
        with self._lock:
            count = self._turns.count + 1 if self._turns else 1
            self._turns = None if within_s is None else Turns(count, time.time(), within_s)
            self._write(changed=False)

    @contextmanager
    def waiting(
        self, what: str, deadline_s: float | None = None, behind_s: float | None = None
    ) -> Iterator[None]:
        """Around every wait for another process; name the thing and the role it comes from.

        `behind_s`, where it comes to all processes of this role at once: for how long one may still wait while the others go on.
        """
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
                self._was = f"waiting for {what}"  # if this ends the process, the sentence about its end says so
            raise
        with self._lock:
            self._waits.pop(ticket)
            self._write()

    def failed(self, error: str) -> None:
        with self._lock:
            self._error = error
            self._was = self._was or self._doing
            self._doing, self._since_s, self._deadline_s = FAILED, time.time(), None
            self._still_s = None
            self._waits.clear()
            self._write()

    def done(self) -> None:
        self._end(DONE)

    def terminated(self) -> None:
        self._end(TERMINATED)

    def wound_down(self, step: int) -> None:
        self._end(WOUND_DOWN, step)

    def _end(self, doing: str, step: int | None = None) -> None:
        with self._lock:
            self._waits.clear()
            self.doing(doing, step)

    def _write(self, changed: bool = True) -> None:
        if changed:
            self._time_s, self._clock_s = time.time(), time.monotonic()
        health = Health(
            role=self._role, index=self._index, time_s=self._time_s, pid=os.getpid(), attempt=self._attempt, doing=self._doing,
            since_s=self._since_s, step=self._step, deadline_s=self._deadline_s, waits=tuple(self._waits.values()), error=self._error,
            was=self._was, still_s=self._still_s, pulse=self._pulse, clock_s=self._clock_s, boot=_boot(),
            turns=self._turns,
        )  # fmt: skip
        # A thread's own temporary name is not needed: the lock orders writers, and a process owns its file.
        temporary, content = (
            self.path.with_name(f".{self.path.name}.tmp"),
            json.dumps(as_row(health)),
        )
        with suppress(
            OSError
        ):  # cleared for a newer attempt, say: what a process says of itself must not end it, nor hide why it ends
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
    """Return the id of this host's boot; processes with equal ids share a monotonic clock."""
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
        "pulse": None if health.pulse is None else asdict(health.pulse),
        "clock_s": health.clock_s,
        "boot": health.boot,
        "turns": None if health.turns is None else asdict(health.turns),
        "waits": [[w.what, w.since_s, w.deadline_s, w.behind_s] for w in health.waits],
    }


def from_row(row: dict[str, Any]) -> Health:
    waits = tuple(Wait(*wait) for wait in row["waits"])
    pulse, turns = (
        Pulse(**row["pulse"]) if row["pulse"] else None,
        Turns(**row["turns"]) if row["turns"] else None,
    )
    same = (
        "role",
        "index",
        "time_s",
        "pid",
        "attempt",
        "doing",
        "step",
        "error",
        "was",
        "still_s",
        "clock_s",
        "boot",
    )
    values = {key: row[key] for key in same}
    return Health(
        since_s=row["doing_since_s"],
        deadline_s=None if waits else row["deadline_s"],
        waits=waits,
        pulse=pulse,
        turns=turns,
        **values,
    )


def read_health(run_dir: Path, stage: str, attempt: int | None = None) -> dict[str, Health]:
    """Every process's health in `stage` by name `<role>.<i>`; with `attempt`, only what that attempt wrote."""
    found: dict[str, Health] = {}
    for path in sorted(health_dir(run_dir, stage).glob("[!.]*.json")):
        try:
            health = from_row(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # cleared under our feet, or not ours
        if attempt is None or health.attempt == attempt:
            found[health.name] = health
    return found
