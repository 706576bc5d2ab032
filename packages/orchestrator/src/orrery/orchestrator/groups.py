"""Groups: gathers what leaves dispatch until a group is whole.

- In: `Finished`, `Failed`, `GroupDropped`. Out: a `CompleteGroup` when every member has left by itself.
- Always: a group is handed on once, and only whole; a dropped group takes what was gathered with it.
"""

from dataclasses import dataclass, field

from orrery.orchestrator.requests import Failed, Finished, GroupDropped, GroupRequest
from orrery.orchestrator.rollout import Rollout


@dataclass(frozen=True)
class CompleteGroup:
    """`survivors` by member. Missing members failed; `num_zeros` of them have the reward 0."""

    request: GroupRequest
    version: int  # at dispatch
    survivors: dict[int, Rollout]
    num_zeros: int = 0


@dataclass
class _Gathered:
    version: int
    num_left: int = 0
    num_zeros: int = 0
    survivors: dict[int, Rollout] = field(default_factory=dict)


class Groups:
    """Groups of which some members have left."""

    def __init__(self) -> None:
        self._gathered: dict[str, _Gathered] = {}

    @property
    def num_rollouts(self) -> int:
        return sum(len(group.survivors) for group in self._gathered.values())

    def add(self, outcome: Finished | Failed) -> CompleteGroup | None:
        """The whole group, if this was its last member."""
        request = outcome.request.group
        group = self._gathered.setdefault(request.key, _Gathered(outcome.request.version))
        group.num_left += 1
        if isinstance(outcome, Finished):
            group.survivors[outcome.request.member] = outcome.rollout
        else:
            group.num_zeros += outcome.is_zero
        if group.num_left < request.size:
            return None
        del self._gathered[request.key]
        # By member, not by arrival: the same rollouts make the same batch, whatever the order of events.
        return CompleteGroup(
            request, group.version, dict(sorted(group.survivors.items())), group.num_zeros
        )

    def drop(self, dropped: GroupDropped) -> int:
        """Forget the group; the number of finished rollouts lost with it."""
        group = self._gathered.pop(dropped.group.key, None)
        return len(group.survivors) if group else 0
