"""Watchdog: a pure look at everyone's health that finds a run which will not go on.

Four things are a stall:
- hung: an event loop has not beaten for its `within_s` (`heartbeat.py`);
- overdue: a wait, or a deed that was given a deadline, is `GRACE_S` past it (the role's own deadline error comes first and says more);
- deadlock: a set of processes in which each one waits only for roles that lie wholly in the set, and none has said anything new for
  `DEADLOCK_S`. The largest such set is found by taking away, until nothing changes, whoever may still be moved from outside;
- left alone: every wait of a process names roles of which nobody is left, and somebody ended well. For `DEADLOCK_S` neither has said
  anything new: what was sent last may arrive after who sent it has ended.

- In: health by process name, and the time. Out: `Stall` with a sentence that names who waits for whom, or None.
- Never: a clock, files, signals.
- A wait's text names the roles that it waits for ("batch 4 from orchestrator"); a text that names none waits for the outside world.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from orrery.observe.health import DONE, FAILED, TERMINATED, WOUND_DOWN, Health
from orrery.observe.names import listed

GRACE_S = 10.0
DEADLOCK_S = 120.0

ENDED = (DONE, FAILED, TERMINATED, WOUND_DOWN)


@dataclass(frozen=True)
class Stall:
    """`blamed` is where the chain of waits ends: one process that is not waiting, or a circle of them."""

    blamed: tuple[str, ...]
    sentence: str


def look(
    processes: Mapping[str, Health],
    now_s: float,
    grace_s: float = GRACE_S,
    deadlock_s: float = DEADLOCK_S,
) -> Stall | None:
    """The stall that a run is in at `now_s`, if any. `processes` are those that run, and those that are done: they wait for nobody."""
    living = {name: health for name, health in processes.items() if health.doing not in ENDED}
    silent = {
        name: for_s
        for name, health in living.items()
        if (for_s := hung_s(health, now_s)) is not None
    }
    if silent:
        worst = max(silent, key=lambda name: (silent[name], name))
        return Stall(
            (worst,),
            f"stall: the event loop of {worst} has not turned for {silent[worst]:.0f} s, while {living[worst].last}",
        )
    overdue = {
        name: late
        for name, health in living.items()
        if (late := _deadline(health)) is not None and now_s > late + grace_s
    }
    if overdue:
        worst = min(overdue, key=lambda name: (overdue[name], name))
        chain = _chain(worst, living)
        return Stall(
            chain[-1:], "stall: " + "; ".join(_clause(living[name], now_s) for name in chain)
        )
    circle = sorted(name for name in deadlocked(living) if now_s - living[name].time_s > deadlock_s)
    if circle and set(circle) == deadlocked(living):
        clauses = "; ".join(_clause(living[name], now_s) for name in circle)
        return Stall(
            tuple(circle), f"stall: {' and '.join(circle)} wait for one another: {clauses}"
        )
    quiet = {
        name: health for name, health in processes.items() if now_s - health.time_s > deadlock_s
    }
    done = {name: health for name, health in processes.items() if health.doing == DONE}
    left = {
        name: gone
        for name in sorted(quiet.keys() & living.keys())
        if (gone := _left_by(living[name], living, done)) <= quiet.keys() and gone
    }
    if left:
        clauses = "; ".join(_clause(living[name], now_s) for name in left)
        ended = sorted(set().union(*left.values()))
        return Stall(
            tuple(left),
            f"stall: {clauses}; {listed(ended)} {'are' if len(ended) > 1 else 'is'} done, so nothing more comes",
        )
    return None


def hung_s(health: Health, now_s: float) -> float | None:
    """Return for how long the event loop has not turned; None if that is within its limit."""
    turns = health.turns
    return (
        now_s - turns.time_s
        if turns is not None and now_s - turns.time_s > turns.within_s
        else None
    )


def awaited(health: Health, living: Mapping[str, Health]) -> list[set[str]]:
    """For each open wait the living processes that it names: by process (`trainer.1`), else by role (`trainer`)."""
    return [_named(wait.what, living) for wait in health.waits]


def deadlocked(living: Mapping[str, Health]) -> set[str]:
    """The largest set in which everyone waits, and every wait of theirs names members of the set only."""
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


def _left_by(health: Health, living: Mapping[str, Health], done: Mapping[str, Health]) -> set[str]:
    """Who is done and was waited for, where every open wait is for such and for nobody that lives."""
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
    """From the process that is late along what each waits for, to one that does not wait or that was met before."""
    chain = [start]
    while True:
        wait = living[chain[-1]].wait
        names = (
            sorted(_named(wait.what, living), key=lambda name: (living[name].time_s, name))
            if wait
            else []
        )
        following = next((name for name in names if name not in chain), None)
        if following is None:
            return tuple(chain)
        chain.append(following)


def _clause(health: Health, now_s: float) -> str:
    deadline = _deadline(health)
    late = (
        f" ({now_s - deadline:.0f} s past its deadline)"
        if deadline is not None and now_s > deadline
        else ""
    )
    if health.wait is not None:
        return f"{health.name} is {health.sentence(now_s)} while {health.doing}{late}"
    return f"{health.name} has been at {health.sentence(now_s)}{late}"
