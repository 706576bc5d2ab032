"""Overdue: tell a slow rollout from one that waits for a dead engine, task or judge.

- In: the rollouts past `rollout_timeout_s`, and the engines' metrics. Out: a reason for each
  rollout whose reason is known.
- `timeout`: every engine with requests made tokens after the rollout's time was over, so the
  rollout itself is slow.
- `engine_still`: an engine with requests made no tokens for PROOF_S.
- `no_answer`: the rollout was in its task or judge, not in an engine.
- Only `timeout` may count as a reward of 0 (`orchestrator.on_timeout`). The others are failures.
- Pure: no clock, no engine.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import or_

from orrery.observe.deadline import scaled
from orrery.orchestrator.engines.messages import EngineMetrics
from orrery.orchestrator.requests import Request

TIMEOUT = "timeout"
PROOF_S = 30.0  # scaled; the metrics of an engine that generates change within a second


@dataclass
class _Case:
    since_s: float
    tokens: dict[int, int] = field(default_factory=dict)  # by engine, at the first look
    proven: bool = False


class TimeoutClassifier:
    """The rollouts past their time whose reason is not known yet."""

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self._cases: dict[str, _Case] = {}

    def observe(self, loads: Mapping[int, EngineMetrics]) -> None:
        """Compare the engines' metrics with the first look; {} if one engine did not answer."""
        for case in self._cases.values():
            for index, load in loads.items():
                case.tokens.setdefault(index, load.generation_tokens_total)
            moved = [
                load.generation_tokens_total != case.tokens[index] for index, load in loads.items()
            ]
            idle = [load.running + load.waiting == 0 for load in loads.values()]
            case.proven |= any(moved) and all(map(or_, moved, idle))

    def reasons(
        self, expired: Iterable[Request], is_generating: Callable[[Request], bool], now_s: float
    ) -> list[tuple[Request, str, str]]:
        """Return (request, reason, sentence) for each rollout with a known reason.

        `expired` holds all rollouts that are past their time now.
        """
        requests, found = list(expired), []
        self._cases = {
            request.name: self._cases.get(request.name) or _Case(now_s) for request in requests
        }
        for request in requests:
            case, said = (
                self._cases[request.name],
                f"took more than orchestrator.rollout_timeout_s = {self.timeout_s:g} s",
            )
            if not is_generating(request):
                found.append(
                    (
                        request,
                        "no_answer",
                        f"rollout {request.name} {said}, and its task or judge did not answer",
                    )
                )
            elif case.proven:
                found.append((request, TIMEOUT, f"rollout {request.name} {said}"))
            elif now_s - case.since_s > scaled(PROOF_S):
                still = f"and an engine made no tokens for {scaled(PROOF_S):g} s after that; see the logs of inference"
                found.append((request, "engine_still", f"rollout {request.name} {said}, {still}"))
        for request, _, _ in found:
            del self._cases[request.name]
        return found
