"""Sight: what processes say of themselves, told by the clock of the process that looks.

- Stamps in a health file are the wall clock of its writer. People read them; nothing is decided by them: a wall clock can be set,
  and the clocks of two hosts differ.
- In: the health of all processes at every look, and the looker's monotonic clock, which leaves a suspend out.
- Out: the same health with the looker's own times: each stamp is when the looker first saw it. A deadline keeps its distance.
- Which of two changes came first (`changed_s`): exact on one host. Another host's monotonic clock is moved to ours by the smallest delay
  with which any of its changes was seen.
- The looker's time passes only while it looks. A gap of more than AWAY_S (it was stopped, or its file system was away) counts as AWAY_S.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from orrery.observe.health import Health, Wait
from orrery.observe.stillness import AWAY_S


@dataclass(frozen=True)
class _Seen:
    """`said` as its writer stamped it, and as the looker did."""

    said: Health
    stamped: Health


class Sight:
    """What one looker has seen of a stage's processes."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._looked_s: float | None = None
        self._behind_s: dict[str, float] = {}  # by boot: how far that monotonic clock is behind ours, at most
        self.now_s = 0.0

    def look(self, said: Mapping[str, Health], clock_s: float) -> dict[str, Health]:
        """`said` with the looker's times, of which the present one is `now_s`; `clock_s` is the monotonic clock."""
        self.now_s += 0.0 if self._looked_s is None else min(clock_s - self._looked_s, AWAY_S)
        self._looked_s = clock_s
        for name, one in said.items():
            if name not in self._seen or one.clock_s != self._seen[name].said.clock_s:
                self._behind_s[one.boot] = min(clock_s - one.clock_s, self._behind_s.get(one.boot, math.inf))
        self._seen = {name: _Seen(one, _stamped(one, self._seen.get(name), self.now_s)) for name, one in said.items()}
        return {name: seen.stamped for name, seen in self._seen.items()}

    def changed_s(self, name: str) -> float:
        """When the process last said something new, by our monotonic clock."""
        said = self._seen[name].said
        return said.clock_s + self._behind_s[said.boot]


def _stamped(said: Health, before: _Seen | None, now_s: float) -> Health:
    known = before if before is not None and (before.said.pid, before.said.attempt) == (said.pid, said.attempt) else None
    deed = (said.doing, said.since_s, said.deadline_s)
    is_same = known is not None and deed == (known.said.doing, known.said.since_s, known.said.deadline_s)
    since_s = known.stamped.since_s if known and is_same else now_s
    turns, old = said.turns, known.stamped.turns if known else None
    if turns is not None:
        turns = old if old is not None and old.count == turns.count else replace(turns, time_s=now_s)
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
