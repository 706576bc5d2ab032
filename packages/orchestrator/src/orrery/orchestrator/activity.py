"""Activity: when each engine had a request in flight, as spans `generate` with the attribute `engine`.

- One engine: the orchestrator's own count, exact. Several behind a router: the engines' own counts, as often as they are asked.
- Long spans are cut into pieces, so that a live view sees them grow and a killed run keeps them: of PIECE_S, in long runs longer (`pace`).
"""

from collections.abc import Callable

from orrery.observe.pace import period_s

PIECE_S = 5.0


class EngineActivity:
    """Spans out of observed counts; pure, but for what `add_span(name, start_s, end_s, engine=…)` does."""

    def __init__(self, add_span: Callable[..., None]):
        self._add_span = add_span
        self._busy_since: dict[int, float] = {}
        self._begin_s: float | None = None

    def observe(self, engine: int, num_requests: int, now_s: float) -> None:
        """`engine` has `num_requests` in flight now."""
        self._begin_s = now_s if self._begin_s is None else self._begin_s
        since = self._busy_since.get(engine)
        if since is None:
            if num_requests:
                self._busy_since[engine] = now_s
        elif not num_requests or now_s - since >= period_s(now_s - self._begin_s, PIECE_S):
            self._add_span("generate", since, now_s, engine=engine)
            if num_requests:
                self._busy_since[engine] = now_s
            else:
                del self._busy_since[engine]

    def close(self, now_s: float) -> None:
        for engine in list(self._busy_since):
            self.observe(engine, 0, now_s)
