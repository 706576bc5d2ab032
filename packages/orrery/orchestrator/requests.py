"""Requests for rollouts: their source, types and three ends.

    Source → GroupRequest → dispatch → Request (one per member) → Rollout | Failed | GroupDropped

The next task is the task furthest behind its share, so every stretch of groups has the mixture.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from orrery.manifest.schema import TaskUse

Purpose = Literal["train", "evaluation"]


@dataclass(frozen=True)
class GroupRequest:
    """`size` rollouts of one problem. Each purpose numbers its groups separately."""

    purpose: Purpose
    group_id: int
    task_index: int  # position in manifest.tasks.train or manifest.tasks.evaluation
    problem_index: int
    size: int

    @property
    def key(self) -> str:
        return f"{self.purpose}-{self.group_id}"


@dataclass(frozen=True)
class Request:
    """One dispatched rollout. `version` is its group's, and the cache salt."""

    group: GroupRequest
    member: int
    version: int

    @property
    def name(self) -> str:
        """Unique in a run. The engine's request id appends the turn."""
        return f"{self.group.key}-{self.member}"


@dataclass(frozen=True)
class Failed:
    """A failed rollout.

    With `is_zero` it counts as a reward of 0 in an evaluation and in its group's baseline.
    """

    reason: str
    detail: str
    is_zero: bool = False


@dataclass(frozen=True)
class GroupDropped:
    """A dropped group. Cancel `in_flight`. `num_undispatched` members never started."""

    group: GroupRequest
    reason: str
    in_flight: tuple[Request, ...]
    num_undispatched: int


class Source:
    def __init__(
        self,
        tasks: Sequence[TaskUse],
        group_size: int,
        cursors: Sequence[int] | None = None,
        unfinished: Iterable[GroupRequest] = (),
    ):
        self.shares = [task.weight / sum(each.weight for each in tasks) for task in tasks]
        self.group_size = group_size
        self.cursors = list(cursors) if cursors is not None else [0] * len(tasks)
        self.unfinished = sorted(unfinished, key=lambda group: group.group_id, reverse=True)

    def next(self) -> GroupRequest:
        if self.unfinished:
            return self.unfinished.pop()
        group_id = sum(self.cursors)
        behind = [
            share * (group_id + 1) - cursor
            for share, cursor in zip(self.shares, self.cursors, strict=True)
        ]
        task_index = max(range(len(behind)), key=lambda index: (behind[index], -index))
        problem_index = self.cursors[task_index]
        self.cursors[task_index] += 1
        return GroupRequest("train", group_id, task_index, problem_index, self.group_size)
