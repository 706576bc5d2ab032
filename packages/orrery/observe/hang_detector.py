"""Find stalls: processes that will make no more progress.

A wait's text must name the awaited roles or processes. Kinds of stalls:

- hung: an event loop sent no heartbeat within its limit.
- overdue: a wait or activity is GRACE_S past its deadline.
- deadlock: for DEADLOCK_S, processes wait only for one another.
- abandoned: for DEADLOCK_S, a process waits only for processes that are done.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from orrery.runtime.health import (
    DONE,
    FAILED,
    HANG_S,
    PREEMPTED,
    TERMINATED,
    Health,
    Wait,
    listed,
)

GRACE_S = 10.0
DEADLOCK_S = 120.0  # high, because messages may arrive long after their sender exited
STILL_S = 40.0  # low, so that a stalled stage ends within a minute
AWAY_S = 10.0
ENDED = (DONE, FAILED, TERMINATED, PREEMPTED)


@dataclass(frozen=True)
class Stall:
    blamed: tuple[str, ...]
    sentence: str


def _living(processes: Mapping[str, Health]) -> dict[str, Health]:
    return {name: health for name, health in processes.items() if health.doing not in ENDED}


def find_stall(
    processes: Mapping[str, Health],
    now_s: float,
    grace_s: float = GRACE_S,
    deadlock_s: float = DEADLOCK_S,
) -> Stall | None:
    living = _living(processes)
    return (
        _hung(living, now_s)
        or _overdue(living, now_s, grace_s)
        or _deadlock(living, now_s, deadlock_s)
        or _abandoned(processes, living, now_s, deadlock_s)
    )


def _hung(living: Mapping[str, Health], now_s: float) -> Stall | None:
    hung = {
        name: for_s for name, one in living.items() if (for_s := hung_s(one, now_s)) is not None
    }
    if not hung:
        return None
    worst = max(hung, key=lambda name: (hung[name], name))
    return Stall(
        (worst,),
        f"stall: the event loop of {worst} sent no heartbeat for {hung[worst]:.0f} s, "
        f"while {living[worst].last}",
    )


def _overdue(living: Mapping[str, Health], now_s: float, grace_s: float) -> Stall | None:
    deadlines = {name: _deadline(health) for name, health in living.items()}
    overdue = {name: s for name, s in deadlines.items() if s is not None and now_s > s + grace_s}
    if not overdue:
        return None
    chain = _chain(min(overdue, key=lambda name: (overdue[name], name)), living)
    clauses = "; ".join(_clause(living[name], now_s) for name in chain)
    return Stall(chain[-1:], f"stall: {clauses}")


def _deadlock(living: Mapping[str, Health], now_s: float, deadlock_s: float) -> Stall | None:
    circle = deadlocked(living)
    if not circle or any(now_s - living[name].time_s <= deadlock_s for name in circle):
        return None
    names = sorted(circle)
    clauses = "; ".join(_clause(living[name], now_s) for name in names)
    return Stall(tuple(names), f"stall: {' and '.join(names)} wait for one another: {clauses}")


def _abandoned(
    processes: Mapping[str, Health], living: Mapping[str, Health], now_s: float, deadlock_s: float
) -> Stall | None:
    quiet = {name for name, health in processes.items() if now_s - health.time_s > deadlock_s}
    done = {name: health for name, health in processes.items() if health.doing == DONE}
    left = {
        name: _ended_sources(living[name], living, done) for name in sorted(quiet & set(living))
    }
    left = {name: gone for name, gone in left.items() if gone and gone <= quiet}
    if not left:
        return None
    clauses = "; ".join(_clause(living[name], now_s) for name in left)
    ended = sorted(set().union(*left.values()))
    end = "are done and send" if len(ended) > 1 else "is done and sends"
    sentence = f"stall: {clauses}; {listed(ended)} {end} nothing more"
    return Stall(tuple(left), sentence)


def hung_s(health: Health, now_s: float) -> float | None:
    """Return the seconds since the event loop's last heartbeat if above its limit, else None."""
    beats = health.loop_beats
    for_s = 0.0 if beats is None else now_s - beats.time_s
    return for_s if beats is not None and for_s > beats.within_s else None


def awaited(health: Health, living: Mapping[str, Health]) -> list[set[str]]:
    return [_named(wait.what, living) for wait in health.waits]


def deadlocked(living: Mapping[str, Health]) -> set[str]:
    """Return the largest set of processes that wait only for one another."""
    stuck = {name for name, health in living.items() if health.waits}
    while True:
        freed = {
            name
            for name in stuck
            if any(not names or not names <= stuck for names in awaited(living[name], living))
        }
        if not freed:
            return stuck
        stuck -= freed


def _ended_sources(
    health: Health, living: Mapping[str, Health], done: Mapping[str, Health]
) -> set[str]:
    gone = [
        set() if _named(wait.what, living) else _named(wait.what, done) for wait in health.waits
    ]
    return set().union(*gone) if all(gone) else set()


def _named(what: str, living: Mapping[str, Health]) -> set[str]:
    words = set(re.findall(r"[a-z_]+(?:\.\d+)?", what))
    exact = {name for name in living if name in words}
    return exact or {name for name, health in living.items() if health.role in words}


def _deadline(health: Health) -> float | None:
    return health.wait.deadline_s if health.wait is not None else health.deadline_s


def _chain(start: str, living: Mapping[str, Health]) -> tuple[str, ...]:
    chain = [start]
    while True:
        wait = living[chain[-1]].wait
        names = _named(wait.what, living) if wait else set()
        names -= set(chain)
        if not names:
            return tuple(chain)
        chain.append(min(names, key=lambda name: (living[name].time_s, name)))


def _clause(health: Health, now_s: float) -> str:
    deadline, late = _deadline(health), ""
    if deadline is not None and now_s > deadline:
        late = f" ({now_s - deadline:.0f} s past its deadline)"
    if health.wait is not None:
        return f"{health.name} is {health.sentence(now_s)} while {health.doing}{late}"
    return f"{health.name} has been at {health.sentence(now_s)}{late}"


@dataclass
class _SeenRank:
    """A rank's newest health report.

    `moved_s`: time of its last progress. `heard_s`: time of its last change or heartbeat.
    """

    health: Health
    moved_s: float
    heard_s: float


class RankStallDetector:
    """Find the ranks that stall their role.

    A role has stalled when each of its ranks is in a state below. A rank's limit is the `still_s`
    that it reported, or the detector's `still_s` if it reported none. Heartbeats are not progress.

    - silent: the rank sent no expected heartbeat within its limit.
    - held: it made no progress within its limit, in a collective.
    - still: it reported a limit, and made no progress within it, outside collectives.
    - late: it waits, another rank of the role is held, and no rank made progress for the `behind_s`
      that it reported.

    Blame, in order: silent ranks, still ranks, ranks that started the fewest collectives. Ranks
    silent for `hang_s` are blamed even without a stall.
    """

    def __init__(self, still_s: float = STILL_S, hang_s: float = HANG_S):
        self._still_s, self._hang_s = still_s, hang_s
        self._seen: dict[str, _SeenRank] = {}
        self._looked_s = 0.0

    def look(self, processes: Mapping[str, Health], now_s: float) -> Stall | None:
        known = self._seen if now_s - self._looked_s <= AWAY_S else {}
        living = _living(processes)
        self._seen = {name: _see(health, known.get(name), now_s) for name, health in living.items()}
        self._looked_s = now_s
        roles = dict.fromkeys(health.role for health in living.values())
        stalls = (self._of_role(role, now_s) for role in roles)
        return next((stall for stall in stalls if stall is not None), None)

    def _of_role(self, role: str, now_s: float) -> Stall | None:
        ranks = {name: seen for name, seen in self._seen.items() if seen.health.role == role}
        silent = [name for name, seen in ranks.items() if self._is_silent(seen, now_s)]
        heard = {name: seen for name, seen in ranks.items() if name not in silent}
        stopped = {name: one.health for name, one in heard.items() if self._has_stopped(one, now_s)}
        held = [name for name, health in stopped.items() if _in_collective(health)]
        last_s = max((seen.moved_s for seen in ranks.values()), default=now_s)
        late: dict[str, Health] = {}
        if held:
            quiet_s = now_s - last_s
            late = {
                name: one.health for name, one in heard.items() if _is_late(one.health, quiet_s)
            }
        holds_up = stopped or any(ranks[name].health.still_s for name in silent)
        if not holds_up or len(silent) + len(stopped) + len(late) < len(ranks):
            gone = [name for name in silent if now_s - ranks[name].heard_s > self._hang_s]
            return Stall(tuple(gone), self._sentence(gone, [], now_s, last_s)) if gone else None
        still = [name for name in stopped if name not in held]
        blamed = silent or still or _fewest({**stopped, **late})
        others = [name for name in held if name not in blamed]
        return Stall(tuple(blamed), self._sentence(blamed, others, now_s, last_s))

    def _is_silent(self, seen: _SeenRank, now_s: float) -> bool:
        health = seen.health
        expects_beats = bool(health.heartbeat and (health.waits or health.still_s))
        return expects_beats and now_s - seen.heard_s > (health.still_s or self._still_s)

    def _has_stopped(self, seen: _SeenRank, now_s: float) -> bool:
        health = seen.health
        if health.waits or not (health.still_s or _in_collective(health)):
            return False
        return now_s - seen.moved_s > (health.still_s or self._still_s)

    def _sentence(self, blamed: list[str], held: list[str], now_s: float, last_s: float) -> str:
        seen = [self._seen[name] for name in blamed]
        silent = self._is_silent(seen[0], now_s)
        for_s = now_s - max(
            one.heard_s if silent else last_s if one.health.waits else one.moved_s for one in seen
        )
        deeds = " or ".join(dict.fromkeys(one.health.last for one in seen))
        how = "sent no heartbeat" if silent else "made no progress"
        text = f"stall: {listed(blamed)} {how} for {for_s:.0f} s while {deeds}"
        if held:
            return f"{text}; {listed(held)} {'wait' if len(held) > 1 else 'waits'} in a collective"
        if len(blamed) > 1 and all(_in_collective(one.health) for one in seen):
            return f"{text}, all of them in a collective that does not end"
        return text


def _see(health: Health, before: _SeenRank | None, now_s: float) -> _SeenRank:
    if before is None or before.health.pid != health.pid:
        return _SeenRank(health, now_s, now_s)
    moved = _without_beats(health) != _without_beats(before.health)
    heard = health != before.health
    return _SeenRank(health, now_s if moved else before.moved_s, now_s if heard else before.heard_s)


def _without_beats(health: Health) -> Health:
    heartbeat = replace(health.heartbeat, beats=0) if health.heartbeat else None
    return replace(health, loop_beats=None, heartbeat=heartbeat)


def _in_collective(health: Health) -> bool:
    return health.heartbeat is not None and health.heartbeat.begun != health.heartbeat.completed


def _is_late(health: Health, quiet_s: float) -> bool:
    limits = [wait.behind_s for wait in health.waits]
    return bool(limits) and all(limit is not None and quiet_s > limit for limit in limits)


def _fewest(held: Mapping[str, Health]) -> list[str]:
    begun = {name: one.heartbeat.begun if one.heartbeat else 0 for name, one in held.items()}
    return [name for name, count in begun.items() if count == min(begun.values())]


@dataclass(frozen=True)
class _SeenHealth:
    """A health report as received (`said`), and on the reader's clock (`stamped`)."""

    said: Health
    stamped: Health


class HealthView:
    """Convert health reports to the reader's monotonic clock, because hosts' wall clocks differ.

    A change gets the time when the reader first saw it, and its deadline shifts equally. A pause
    between calls of `look` counts as at most AWAY_S. `changed_s` is comparable across hosts.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _SeenHealth] = {}
        self._looked_s: float | None = None
        self._behind_s: dict[str, float] = {}  # host's boot id → smallest clock offset
        self.now_s = 0.0

    def look(self, said: Mapping[str, Health], clock_s: float) -> dict[str, Health]:
        """Return `said` with times on the reader's clock. `clock_s`: monotonic time now."""
        self.now_s += 0.0 if self._looked_s is None else min(clock_s - self._looked_s, AWAY_S)
        self._looked_s = clock_s
        for name, one in said.items():
            if name not in self._seen or one.clock_s != self._seen[name].said.clock_s:
                delay_s = clock_s - one.clock_s
                self._behind_s[one.boot] = min(delay_s, self._behind_s.get(one.boot, math.inf))
        self._seen = {
            name: _SeenHealth(one, _stamped(one, self._seen.get(name), self.now_s))
            for name, one in said.items()
        }
        return {name: seen.stamped for name, seen in self._seen.items()}

    def changed_s(self, name: str) -> float:
        said = self._seen[name].said
        return said.clock_s + self._behind_s[said.boot]


def _stamped(said: Health, known: _SeenHealth | None, now_s: float) -> Health:
    if known and (known.said.pid, known.said.attempt) != (said.pid, said.attempt):
        known = None
    since_s = now_s
    if known and _activity(known.said) == _activity(said):
        since_s = known.stamped.since_s
    beats, old = said.loop_beats, known.stamped.loop_beats if known else None
    if beats is not None:
        is_old = old is not None and old.count == beats.count
        beats = old if is_old else replace(beats, time_s=now_s)
    waits = dict(zip(known.said.waits, known.stamped.waits, strict=True)) if known else {}
    return replace(
        said,
        time_s=known.stamped.time_s if known and known.said.time_s == said.time_s else now_s,
        since_s=since_s,
        deadline_s=_moved(said.deadline_s, since_s - said.since_s),
        loop_beats=beats,
        waits=tuple(waits.get(wait) or _new(wait, now_s) for wait in said.waits),
    )


def _activity(health: Health) -> tuple[str, float, float | None]:
    return health.doing, health.since_s, health.deadline_s


def _new(wait: Wait, now_s: float) -> Wait:
    return replace(wait, since_s=now_s, deadline_s=_moved(wait.deadline_s, now_s - wait.since_s))


def _moved(deadline_s: float | None, by_s: float) -> float | None:
    return None if deadline_s is None else deadline_s + by_s
