"""Evaluation: held-out problems on one pinned policy version, beside training.

- Due at the first version engines hold, whenever a multiple of `interval_steps` is reached or passed, and after the last batch.
- While one is active, updates wait: every token of it is of one version. A rollout that mixes versions ends the run.
- The held-out set is problems 0..num_problems of every evaluation task, the same each time.
- A failed rollout has no reward, as in training. The task's mean leaves it out, and the row counts
  it by reason. A task without any finished rollout is an error.
- A rollout that ran out of time has the reward 0 or counts as failed (`orchestrator.on_timeout`).
  The row counts timeouts in both cases.
- Only a finished evaluation counts: one that a kill interrupts is due again.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from orrery.manifest.errors import RunFailed
from orrery.manifest.schema import TaskUse
from orrery.orchestrator.clock import NO_VERSION
from orrery.orchestrator.requests import Failed, Finished, GroupRequest, Request
from orrery.orchestrator.rollout import Rollout
from orrery.orchestrator.timeouts import TIMEOUT


@dataclass
class _Active:
    version: int
    start_s: float
    num_missing: int
    rollouts: list[tuple[Request, Rollout]] = field(default_factory=list)
    failures: Counter[tuple[int, str]] = field(default_factory=Counter)  # by task index and reason
    zeros: Counter[int] = field(default_factory=Counter)  # task index → timeouts with reward 0
    words: dict[int, str] = field(default_factory=dict)  # of each task its last failure's


@dataclass(frozen=True)
class EvaluationResult:
    """One finished evaluation: one row a task, all rollouts by task."""

    version: int
    rows: list[dict]
    rollouts: list[tuple[GroupRequest, Rollout]]  # by group and member

    @property
    def reward_mean(self) -> float:
        """The mean over tasks, each weighted by all rollouts that it was asked for.

        Failures therefore move no weight to another task.
        """
        asked = [row["num_rollouts"] + row["num_failed"] for row in self.rows]
        return float(
            sum(row["reward_mean"] * num for row, num in zip(self.rows, asked, strict=True))
            / sum(asked)
        )


class Evaluations:
    """Which evaluation is due, and the one that is active."""

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
        self.last = last  # newest version whose evaluation is finished
        self.num_groups = num_groups  # handed out so far: their numbers
        self._active: _Active | None = None

    @property
    def pinned(self) -> int | None:
        """The version that updates must leave in place."""
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
        """Pin `version`; the groups to dispatch."""
        groups = [
            GroupRequest(
                "evaluation",
                self.num_groups + number,
                task_index,
                problem_index,
                self.rollouts_per_problem,
            )
            for number, (problem_index, task_index) in enumerate(
                (problem_index, task_index)
                for problem_index in range(self.num_problems)
                for task_index in range(len(self.tasks))
            )
        ]
        self.num_groups += len(groups)
        self._active = _Active(version, now_s, len(groups) * self.rollouts_per_problem)
        return groups

    def add(self, outcome: Finished | Failed, now_s: float) -> EvaluationResult | None:
        """The result, if this was the last rollout."""
        active = self._active
        assert active is not None, "an evaluation rollout without an evaluation"
        active.num_missing -= 1
        if isinstance(outcome, Finished):
            versions = outcome.rollout.sampled_versions
            if (versions != active.version).any():
                raise RunFailed(
                    f"evaluation at version {active.version}: rollout {outcome.request.name} holds tokens of versions "
                    f"{versions.min()} to {versions.max()}; an update ran while the version was pinned, which is a defect: report it"
                )
            active.rollouts.append((outcome.request, outcome.rollout))
        elif outcome.is_zero:
            active.zeros[outcome.request.group.task_index] += 1
        else:
            active.failures[outcome.request.group.task_index, outcome.reason] += 1
            active.words[outcome.request.group.task_index] = outcome.detail
        if active.num_missing:
            return None
        self._active, self.last = None, active.version
        rollouts = sorted(
            active.rollouts, key=lambda each: (each[0].group.group_id, each[0].member)
        )
        rows = [self._row(active, index, now_s) for index in range(len(self.tasks))]
        return EvaluationResult(
            active.version, rows, [(request.group, rollout) for request, rollout in rollouts]
        )

    def _row(self, active: _Active, task_index: int, now_s: float) -> dict:
        name = self.tasks[task_index].name
        rewards = [
            rollout.reward
            for request, rollout in active.rollouts
            if request.group.task_index == task_index
        ]
        rewards += [0.0] * active.zeros[task_index]
        failures = {
            reason: num
            for (index, reason), num in sorted(active.failures.items())
            if index == task_index
        }
        if not rewards:
            raise RunFailed(
                f"evaluation at version {active.version}: every rollout of task {name!r} failed "
                f"({failures}). Last: {active.words[task_index]}"
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
    """Return the numbers behind a row's mean in words.

    Examples: `250 rollouts, 3 of them timed out`; `236 rollouts, 20 failed: 20 judge`.
    """
    zeros = row["num_timeouts"] - row["failures"].get(TIMEOUT, 0)
    failed = f", {row['num_failed']} failed: {', '.join(f'{num} {reason}' for reason, num in row['failures'].items())}"
    timed_out = f", {zeros} of them timed out" if zeros else ""
    return f"{row['num_rollouts']} rollouts{timed_out}{failed if row['num_failed'] else ''}"
