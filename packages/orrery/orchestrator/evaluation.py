"""Evaluate held-out problems on one pinned policy version, beside training.

- An evaluation is due at the first version, at or after each multiple of `interval_steps`, and
  after the last batch. An interrupted evaluation is due again.
- Weight updates wait for an active evaluation.
- The problems are always 0 … num_problems − 1 of every evaluation task.
- A task's mean excludes failed rollouts, unless all failed, which is an error.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from orrery.manifest.errors import RunFailed
from orrery.manifest.schema import TaskUse
from orrery.orchestrator.dispatch import TIMEOUT, GroupRequest, Request
from orrery.orchestrator.rollout import NO_VERSION, Failed, Rollout
from orrery.runtime.role_context import RoleContext


@dataclass
class _Active:
    version: int
    start_s: float
    num_missing: int
    rollouts: list[Rollout] = field(default_factory=list)
    failures: Counter[tuple[int, str]] = field(default_factory=Counter)  # by task index and reason
    zeros: Counter[int] = field(default_factory=Counter)  # timeouts of reward 0, by task index
    details: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationResult:
    version: int
    rows: list[dict]
    rollouts: list[Rollout]  # sorted by group and member

    @property
    def reward_mean(self) -> float:
        asked = [row["num_rollouts"] + row["num_failed"] for row in self.rows]
        total = sum(row["reward_mean"] * num for row, num in zip(self.rows, asked, strict=True))
        return float(total / sum(asked))


class Evaluations:
    def __init__(
        self,
        tasks: Sequence[TaskUse],
        interval_steps: int,
        num_problems: int,
        rollouts_per_problem: int,
        last_step: int,
        last: int = NO_VERSION,
        num_groups: int = 0,
    ):
        self.tasks, self.interval_steps, self.last_step = tasks, interval_steps, last_step
        self.num_problems, self.rollouts_per_problem = num_problems, rollouts_per_problem
        self.last = last
        self.num_groups = num_groups
        self._active: _Active | None = None

    @property
    def pinned(self) -> int | None:
        return self._active.version if self._active else None

    def due(self, version: int) -> bool:
        if self._active or version == NO_VERSION or version <= self.last:
            return False
        return (
            self.last == NO_VERSION
            or version // self.interval_steps > self.last // self.interval_steps
            or version == self.last_step
        )

    def begin(self, version: int, now_s: float) -> list[GroupRequest]:
        size = self.rollouts_per_problem
        groups: list[GroupRequest] = []
        for problem_index in range(self.num_problems):
            for task_index in range(len(self.tasks)):
                number = self.num_groups + len(groups)
                groups.append(GroupRequest("evaluation", number, task_index, problem_index, size))
        self.num_groups += len(groups)
        self._active = _Active(version, now_s, len(groups) * size)
        return groups

    def add(
        self, request: Request, outcome: Rollout | Failed, now_s: float
    ) -> EvaluationResult | None:
        """Return the result after the last rollout. Raises RunFailed on another version."""
        active, task_index = self._active, request.group.task_index
        assert active is not None, "an evaluation rollout without an evaluation"
        active.num_missing -= 1
        if isinstance(outcome, Rollout):
            versions = outcome.sampled_versions
            if (versions != active.version).any():
                raise RunFailed(
                    f"evaluation at version {active.version}: rollout {request.name} holds "
                    f"tokens of versions {versions.min()} to {versions.max()}; no update may run "
                    "during an evaluation, so this is a defect: report it"
                )
            active.rollouts.append(outcome)
        elif outcome.is_zero:
            active.zeros[task_index] += 1
        else:
            active.failures[task_index, outcome.reason] += 1
            active.details[task_index] = outcome.detail
        if active.num_missing:
            return None
        self._active, self.last = None, active.version
        active.rollouts.sort(key=lambda rollout: (rollout.group_id, rollout.member))
        rows = [self._row(active, index, now_s) for index in range(len(self.tasks))]
        return EvaluationResult(active.version, rows, active.rollouts)

    def _row(self, active: _Active, task_index: int, now_s: float) -> dict:
        name = self.tasks[task_index].name
        rewards = [each.reward for each in active.rollouts if each.task_index == task_index]
        rewards += [0.0] * active.zeros[task_index]
        failures = {
            reason: num
            for (index, reason), num in sorted(active.failures.items())
            if index == task_index
        }
        if not rewards:
            raise RunFailed(
                f"evaluation at version {active.version}: every rollout of task {name!r} failed "
                f"({failures}). Last: {active.details[task_index]}"
            )
        return {
            "version": active.version,
            "task": name,
            "reward_mean": sum(rewards) / len(rewards),
            "num_rollouts": len(rewards),
            "num_failed": sum(failures.values()),
            "failures": failures,
            "num_timeouts": active.zeros[task_index] + failures.get(TIMEOUT, 0),
            "start_s": active.start_s,
            "end_s": now_s,
        }


def describe_counts(row: dict) -> str:
    """Return a phrase such as `250 rollouts, 3 of them timed out, 20 failed: 20 judge`."""
    text = f"{row['num_rollouts']} rollouts"
    if zeros := row["num_timeouts"] - row["failures"].get(TIMEOUT, 0):
        text += f", {zeros} of them timed out"
    if row["num_failed"]:
        reasons = ", ".join(f"{num} {reason}" for reason, num in row["failures"].items())
        text += f", {row['num_failed']} failed: {reasons}"
    return text


def record(ctx: RoleContext, result: EvaluationResult, subject: str, **about: str) -> None:
    for row in result.rows:
        ctx.metrics.write(result.version, event="evaluation", **about, **row)
        times = row["start_s"], row["end_s"]
        ctx.metrics.add_span("evaluation", *times, result.version, task=row["task"])
        said = subject, row["task"], row["reward_mean"], describe_counts(row)
        ctx.log.info("%s: %s %.3f (%s)", *said)
