"""Source: which problem is next. Several tasks are mixed by weight; each has a cursor.

- Out: `GroupRequest`s without end, in an order that the weights alone determine.
- The next task is the one that is furthest behind its share, so that every stretch of groups holds the asked-for mixture
  (a random draw would hold it only on average), and the whole state is one cursor a task.
- Problem `i` of a task is what that task's seed makes of it; cursors only count up. Held-out problems come from other seeds (`evaluation`).
- Groups that were in flight at a snapshot come again first, under their old numbers.
"""

from collections.abc import Iterable, Sequence

from orrery.manifest.schema import TaskUse
from orrery.orchestrator.requests import GroupRequest


class Source:
    """Train groups, numbered from 0."""

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
