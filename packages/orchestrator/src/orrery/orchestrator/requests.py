"""Requests: what `source` asks for, what `dispatch` starts, and the three ways in which a request leaves.

GroupRequest ──dispatch──▶ Request (one a member) ──▶ Finished | Failed | a share of GroupDropped
"""

from dataclasses import dataclass
from typing import Literal

from orrery.orchestrator.rollout import Rollout

Purpose = Literal["train", "evaluation"]


@dataclass(frozen=True)
class GroupRequest:
    """`size` rollouts of one problem. Train and evaluation groups are numbered apart."""

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
    """One rollout, dispatched. `version` is the policy's when its group was dispatched: the cache salt of all its turns."""

    group: GroupRequest
    member: int
    version: int

    @property
    def name(self) -> str:
        """Unique in a run; also the engine's request id, with the turn behind it."""
        return f"{self.group.key}-{self.member}"


@dataclass(frozen=True)
class Finished:
    request: Request
    rollout: Rollout


@dataclass(frozen=True)
class Failed:
    """A failed rollout. `reason` is the word that is counted, `detail` the error sentence.

    With `is_zero` it counts as a reward of 0 in an evaluation and in its group's baseline. It is
    never trained.
    """

    request: Request
    reason: str
    detail: str
    is_zero: bool = False


@dataclass(frozen=True)
class GroupDropped:
    """A group given up: `in_flight` are to be cancelled, `num_undispatched` members never started; both leave with this."""

    group: GroupRequest
    reason: str
    in_flight: tuple[Request, ...]
    num_undispatched: int
