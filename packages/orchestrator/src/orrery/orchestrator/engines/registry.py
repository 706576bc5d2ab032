"""Roster: what is known of every engine of a stage, as a pure machine. Events are arguments; what happens to engines is the fleet's.

    starting ──listens──▶ stale ──took──▶ updated ──serves──▶ healthy
       every one ──failed──▶ fenced ──listens (a later incarnation)──▶ stale
       healthy or updated, another version wanted ──▶ stale

- `healthy`: holds the wanted version, attested, and serves. The only way there leads through `stale` and `updated`.
- `fenced`: takes part in nothing. Nothing brings an incarnation back that was fenced; only a later one comes.
- Each event says of which incarnation it is; what is said of another than the newest changes nothing.
- Versions only rise.
"""

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    STARTING = "starting"
    STALE = "stale"
    UPDATED = "updated"
    HEALTHY = "healthy"
    FENCED = "fenced"


@dataclass
class EngineState:
    """One engine: `incarnation` −1 has never listened; `version` is what it holds, None where that is nobody's; `why` it is fenced."""

    incarnation: int = -1
    phase: Phase = Phase.STARTING
    version: int | None = None
    why: str = ""


class EngineRegistry:
    """Engines 0 .. `num_engines`, none of which listens yet. `version`: what they hold when they start, and what is wanted at first."""

    def __init__(self, num_engines: int, version: int):
        self._at_start = self.wanted = version
        self._engines = [EngineState() for _ in range(num_engines)]

    def __getitem__(self, index: int) -> EngineState:
        return self._engines[index]

    def at(self, *phases: Phase) -> list[int]:
        """Indices of the engines in one of these phases."""
        return [index for index, engine in enumerate(self._engines) if engine.phase in phases]

    def listens(self, index: int, incarnation: int) -> bool:
        """An incarnation has said where it is, with the weights of its start. False where that is known already, or old."""
        if incarnation <= self._engines[index].incarnation:
            return False
        self._engines[index] = EngineState(incarnation, Phase.STALE, self._at_start)
        return True

    def want(self, version: int) -> None:
        """Every engine is to hold `version`."""
        if version < self.wanted:
            raise AssertionError(f"version {version} wanted after version {self.wanted}")
        if version > self.wanted:
            for index in self.at(Phase.UPDATED, Phase.HEALTHY):
                self._engines[index].phase = Phase.STALE
        self.wanted = version

    def took(self, index: int, incarnation: int, version: int) -> bool:
        """It holds `version`, attested. False where it may not serve for that: it is fenced by now, or another version is wanted."""
        engine = self._engines[index]
        if engine.incarnation != incarnation or engine.phase is not Phase.STALE:
            return False
        engine.version = version
        if version == self.wanted:
            engine.phase = Phase.UPDATED
        return version == self.wanted

    def serves(self, index: int, incarnation: int) -> bool:
        """It answers requests. False where it was fenced, or became stale, meanwhile."""
        engine = self._engines[index]
        if engine.incarnation != incarnation or engine.phase is not Phase.UPDATED:
            return False
        engine.phase = Phase.HEALTHY
        return True

    def failed(self, index: int, incarnation: int, why: str) -> bool:
        """It is not to be trusted any more. False where that is no news."""
        engine = self._engines[index]
        if engine.incarnation != incarnation or engine.phase in (Phase.STARTING, Phase.FENCED):
            return False
        engine.phase, engine.version, engine.why = Phase.FENCED, None, why
        return True
