"""Sight: convert the times in health files to the clock of the process that reads them.

- Times in a health file are its writer's wall clock, for people. No decision uses them, because a
  wall clock can be set and the clocks of two hosts differ.
- In: the health of all processes at every look, and the reader's monotonic clock, which stands
  still in a suspend.
- Out: the same health, with the times at which the reader first saw each change. A deadline keeps
  its distance from the time before it.
- `changed_s` orders changes. The order is exact on one host. Another host's monotonic clock is
  shifted to ours by the smallest delay with which one of its changes was seen.
- A gap between two looks counts as AWAY_S at most: the reader or its file system was stopped.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from orrery.observe.health import Health, Wait
from orrery.observe.stillness import AWAY_S


@dataclass(frozen=True)
class _Seen:
    """One process's health with its writer's times (`said`) and with the reader's (`stamped`)."""

    said: Health
    stamped: Health


class Sight:
    """The health of a stage's processes as one reader has seen it."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._looked_s: float | None = None
        self._behind_s: dict[str, float] = {}  # by boot: at most our clock less that one
        self.now_s = 0.0

    def look(self, said: Mapping[str, Health], clock_s: float) -> dict[str, Health]:
        """Set `now_s` and return `said` with our times; `clock_s` is our monotonic clock."""
        self.now_s += 0.0 if self._looked_s is None else min(clock_s - self._looked_s, AWAY_S)
        self._looked_s = clock_s
        for name, one in said.items():
            if name not in self._seen or one.clock_s != self._seen[name].said.clock_s:
                self._behind_s[one.boot] = min(
                    clock_s - one.clock_s, self._behind_s.get(one.boot, math.inf)
                )
        self._seen = {
            name: _Seen(one, _stamped(one, self._seen.get(name), self.now_s))
            for name, one in said.items()
        }
        return {name: seen.stamped for name, seen in self._seen.items()}

    def changed_s(self, name: str) -> float:
        """Return when the process last reported a change, on our monotonic clock."""
        said = self._seen[name].said
        return said.clock_s + self._behind_s[said.boot]


def _stamped(said: Health, before: _Seen | None, now_s: float) -> Health:
    known = (
        before
        if before is not None and (before.said.pid, before.said.attempt) == (said.pid, said.attempt)
        else None
    )
    deed = (said.doing, said.since_s, said.deadline_s)
    is_same = known is not None and deed == (
        known.said.doing,
        known.said.since_s,
        known.said.deadline_s,
    )
    since_s = known.stamped.since_s if known and is_same else now_s
    turns, old = said.turns, known.stamped.turns if known else None
    if turns is not None:
        turns = (
            old if old is not None and old.count == turns.count else replace(turns, time_s=now_s)
        )
    waits = dict(zip(known.said.waits, known.stamped.waits, strict=True)) if known else {}
    return replace(
        said,
        time_s=known.stamped.time_s if known and known.said.time_s == said.time_s else now_s,
        since_s=since_s,
        deadline_s=_moved(said.deadline_s, since_s - said.since_s),
        turns=turns,
        waits=tuple(waits.get(wait) or _new(wait, now_s) for wait in said.waits),
    )


def _new(wait: Wait, now_s: float) -> Wait:
    return replace(wait, since_s=now_s, deadline_s=_moved(wait.deadline_s, now_s - wait.since_s))


def _moved(deadline_s: float | None, by_s: float) -> float | None:
    return None if deadline_s is None else deadline_s + by_s
