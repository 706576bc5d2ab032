"""Stillness: finds the process for which all others of its role wait, where nobody of that role moves any more.

Ranks in lock-step stop together when one of them does, so stopping alone names nobody. What each one's pulse says does:
- silent: in a wait, or at what was to move within `still_s`, not even its pulse is heard: it is stopped, gone deaf, or its machine is;
- in a collective: it has begun another than it has completed, so it waits for other ranks, whatever it says that it does;
- still: it does what was to move within `still_s`, and no collective holds it;
- late: it waits for what comes to all at once (`behind_s`), while collectives hold others.
Anybody else has a reason to take its time: progress, an open wait, or a deed of no known length (those have deadlines: `watchdog.py`).
A stall is a role in which nobody has. To blame are the silent, else the still, else those that have begun the fewest collectives.

Blame a rank that is silent for `hang_s` even if no other rank waits for it yet.

- In: everyone's health at every look, and the looker's own clock: clocks of nodes differ. Out: `Stall`, or None.
- Progress is any change of what a process says, but for the beats of its pulse; so slow is never stuck, as long as it moves.
- A looker that could not look for AWAY_S (its file system was away) begins anew: nobody is stuck because nobody could be seen.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from orrery.observe.health import Health
from orrery.observe.heartbeat import HANG_S
from orrery.observe.names import listed
from orrery.observe.watchdog import ENDED, Stall

STILL_S = 40.0  # with the pulse's period before it, and stacks and the end after it, a stage ends within a minute of the last progress
AWAY_S = 10.0


@dataclass
class _Seen:
    """One process, and since when it has been seen like this."""

    health: Health
    moved_s: float
    heard_s: float


class Stillness:
    """What one looker has seen of a stage's processes."""

    def __init__(self, still_s: float = STILL_S, hang_s: float = HANG_S):
        self._still_s, self._hang_s = still_s, hang_s
        self._seen: dict[str, _Seen] = {}
        self._looked_s = 0.0

    def look(self, processes: Mapping[str, Health], now_s: float) -> Stall | None:
        """The stall at `now_s`, if any; `processes` are those that run."""
        living = {name: health for name, health in processes.items() if health.doing not in ENDED}
        known = self._seen if now_s - self._looked_s <= AWAY_S else {}
        self._seen = {name: _see(health, known.get(name), now_s) for name, health in living.items()}
        self._looked_s = now_s
        roles = dict.fromkeys(health.role for health in living.values())
        return next(
            (stall for role in roles if (stall := self._of_role(role, now_s)) is not None), None
        )

    def _of_role(self, role: str, now_s: float) -> Stall | None:
        ranks = {name: seen for name, seen in self._seen.items() if seen.health.role == role}
        silent = [name for name, seen in ranks.items() if self._is_silent(seen, now_s)]
        stopped = {
            name: seen.health
            for name, seen in ranks.items()
            if name not in silent and self._has_stopped(seen, now_s)
        }
        held = [name for name, health in stopped.items() if _in_collective(health)]
        last_s = max((seen.moved_s for seen in ranks.values()), default=now_s)
        late = {
            name: seen.health
            for name, seen in ranks.items()
            if held and name not in silent and _is_late(seen.health, now_s - last_s)
        }
        somebody_is_held_up = stopped or any(ranks[name].health.still_s for name in silent)
        if not somebody_is_held_up or len(silent) + len(stopped) + len(late) < len(ranks):
            gone = [name for name in silent if now_s - ranks[name].heard_s > self._hang_s]
            return Stall(tuple(gone), self._sentence(gone, [], now_s, last_s)) if gone else None
        blamed = (
            silent or [name for name in stopped if name not in held] or _fewest({**stopped, **late})
        )
        return Stall(
            tuple(blamed),
            self._sentence(blamed, [name for name in held if name not in blamed], now_s, last_s),
        )

    def _is_silent(self, seen: _Seen, now_s: float) -> bool:
        health = seen.health
        return bool(health.pulse and (health.waits or health.still_s)) and now_s - seen.heard_s > (
            health.still_s or self._still_s
        )

    def _has_stopped(self, seen: _Seen, now_s: float) -> bool:
        health = seen.health
        if health.waits or not (health.still_s or _in_collective(health)):
            return False
        return now_s - seen.moved_s > (health.still_s or self._still_s)

    def _sentence(self, blamed: list[str], held: list[str], now_s: float, last_s: float) -> str:
        """`last_s`: when anybody of the role has moved last, so what is late was there."""
        seen = [self._seen[name] for name in blamed]
        silent = self._is_silent(seen[0], now_s)
        for_s = now_s - max(
            one.heard_s if silent else last_s if one.health.waits else one.moved_s for one in seen
        )
        deeds = " or ".join(dict.fromkeys(one.health.last for one in seen))
        text = f"stall: {listed(blamed)} {'gave no sign of life' if silent else 'made no progress'} for {for_s:.0f} s while {deeds}"
        if held:
            return f"{text}; {listed(held)} {'wait' if len(held) > 1 else 'waits'} in a collective"
        if len(blamed) > 1 and all(_in_collective(one.health) for one in seen):
            return f"{text}, all of them in a collective that does not end"
        return text


def _see(health: Health, before: _Seen | None, now_s: float) -> _Seen:
    if before is None or before.health.pid != health.pid:
        return _Seen(health, now_s, now_s)
    moved = _without_beats(health) != _without_beats(before.health)
    return _Seen(
        health,
        now_s if moved else before.moved_s,
        before.heard_s if health == before.health else now_s,
    )


def _without_beats(health: Health) -> Health:
    return replace(
        health, turns=None, pulse=replace(health.pulse, beats=0) if health.pulse else None
    )


def _in_collective(health: Health) -> bool:
    return health.pulse is not None and health.pulse.begun != health.pulse.completed


def _is_late(health: Health, quiet_s: float) -> bool:
    """Whether it still waits for what the others have, who have not moved for `quiet_s`."""
    return bool(health.waits) and all(
        wait.behind_s is not None and quiet_s > wait.behind_s for wait in health.waits
    )


def _fewest(held: Mapping[str, Health]) -> list[str]:
    """Those that have begun the fewest collectives: the others are in one that they have not come to."""
    fewest = min(health.pulse.begun if health.pulse else 0 for health in held.values())
    return [
        name
        for name, health in held.items()
        if (health.pulse.begun if health.pulse else 0) == fewest
    ]
