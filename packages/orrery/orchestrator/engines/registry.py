"""State of every engine of a stage, as a pure state machine.

    starting ──listens──▶ stale ──took──▶ updated ──serves──▶ healthy
       any phase ──failed──▶ fenced ──listens (a later incarnation)──▶ stale
       healthy or updated, another version wanted ──▶ stale

- `healthy`: holds the wanted version, attested, and serves.
- `fenced`: excluded until a later incarnation listens.
- Each event names an incarnation. Events of older incarnations are ignored.
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
    """`incarnation` is −1 before the engine first listens. `version` is None if fenced."""

    incarnation: int = -1
    phase: Phase = Phase.STARTING
    version: int | None = None
    why: str = ""  # reason of the fence


class EngineRegistry:
    def __init__(self, num_engines: int, version: int):
        """Set `version` as the engines' start version and the first wanted version."""
        self._at_start = self.wanted = version
        self._engines = [EngineState() for _ in range(num_engines)]

    def __getitem__(self, index: int) -> EngineState:
        return self._engines[index]

    def at(self, *phases: Phase) -> list[int]:
        return [index for index, engine in enumerate(self._engines) if engine.phase in phases]

    def listens(self, index: int, incarnation: int) -> bool:
        """Record that an incarnation listens. Return False if it is known or old."""
        if incarnation <= self._engines[index].incarnation:
            return False
        self._engines[index] = EngineState(incarnation, Phase.STALE, self._at_start)
        return True

    def want(self, version: int) -> None:
        if version < self.wanted:
            raise AssertionError(f"version {version} wanted after version {self.wanted}")
        if version > self.wanted:
            for index in self.at(Phase.UPDATED, Phase.HEALTHY):
                self._engines[index].phase = Phase.STALE
        self.wanted = version

    def took(self, index: int, incarnation: int, version: int) -> bool:
        """Record that the engine holds `version`, attested. Return whether it may serve now."""
        engine = self._engines[index]
        if engine.incarnation != incarnation or engine.phase is not Phase.STALE:
            return False
        engine.version = version
        if version == self.wanted:
            engine.phase = Phase.UPDATED
        return version == self.wanted

    def serves(self, index: int, incarnation: int) -> bool:
        """Record that the engine serves. Return False if it is fenced or stale."""
        engine = self._engines[index]
        if engine.incarnation != incarnation or engine.phase is not Phase.UPDATED:
            return False
        engine.phase = Phase.HEALTHY
        return True

    def failed(self, index: int, incarnation: int, why: str) -> bool:
        """Fence the engine. Return False if it is fenced or has never listened."""
        engine = self._engines[index]
        if engine.incarnation != incarnation or engine.phase in (Phase.STARTING, Phase.FENCED):
            return False
        engine.phase, engine.version, engine.why = Phase.FENCED, None, why
        return True
