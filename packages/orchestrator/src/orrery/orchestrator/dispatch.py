"""Dispatch: turns group requests into rollouts in flight, under one permit counter.

- In: `GroupRequest` from `source` and `evaluation`; the engines' version; the time.
- Out: every request leaves exactly once: finished, failed, or inside a `GroupDropped(reason)`.
- Always: evaluation first, then open groups, then new ones (a group's members share a prompt, so its prefix is still in the cache).
- Always: a group has one version, the engines' when its first member started; all members and turns keep it as their cache salt.
- Never: retries. A failed rollout is data for `groups`, which decides.
- But a member of an evaluation whose engine was lost is played `again`, from its beginning, with its seed and at its version: an evaluation
  is of all its problems.
- Pure: no clock, no engine. Who calls `start` plays the requests, and cancels those that `expire` and the drops name.
"""

from collections import deque
from dataclasses import dataclass, field

from orrery.orchestrator.admission import Admission
from orrery.orchestrator.requests import GroupDropped, GroupRequest, Purpose, Request


@dataclass
class _OpenGroup:
    request: GroupRequest
    version: int | None = None
    num_started: int = 0
    to_restart: list[int] = field(
        default_factory=list
    )  # members that started, and are to start once more
    in_flight: dict[str, tuple[Request, float]] = field(
        default_factory=dict
    )  # request name -> (request, started_s)

    @property
    def num_waiting(self) -> int:
        return self.request.size - self.num_started + len(self.to_restart)


class Dispatch:
    """Groups with a member that is waiting for a permit or in flight."""

    def __init__(self, admission: Admission):
        self.admission = admission
        self._groups: dict[str, _OpenGroup] = {}
        self._waiting: dict[Purpose, deque[str]] = {"evaluation": deque(), "train": deque()}
        self._group_of: dict[str, _OpenGroup] = {}  # request name -> its group, while in flight
        self._unserved_since: float | None = None

    @property
    def num_in_flight(self) -> int:
        return len(self._group_of)

    @property
    def num_waiting(self) -> int:
        return sum(group.num_waiting for group in self._groups.values())

    def open_train_groups(self) -> list[GroupRequest]:
        """Train groups that have a member left in here, by number."""
        groups = [
            group.request for group in self._groups.values() if group.request.purpose == "train"
        ]
        return sorted(groups, key=lambda group: group.group_id)

    def offer(self, group: GroupRequest) -> None:
        """Take a group in; its members start as permits allow."""
        if group.key in self._groups:
            raise AssertionError(f"group {group.key} offered twice")
        self._groups[group.key] = _OpenGroup(group)
        self._waiting[group.purpose].append(group.key)

    def start(self, version: int, now_s: float) -> list[Request]:
        """The requests to play now; each holds a permit until it leaves."""
        started = []
        while self.admission.free:
            queue = self._waiting["evaluation"] or self._waiting["train"]
            if not queue:
                break
            group = self._groups[queue[0]]
            if group.version is None:
                group.version = version
            if group.to_restart:
                member = group.to_restart.pop()
            else:
                member, group.num_started = group.num_started, group.num_started + 1
            request = Request(group.request, member, group.version)
            if not group.num_waiting:
                queue.popleft()
            group.in_flight[request.name] = (request, now_s)
            self._group_of[request.name] = group
            self.admission.take()
            started.append(request)
        return started

    def leave(self, name: str) -> bool:
        """A request has ended. False where it has left before (its group was dropped while it ended): the result is void."""
        group = self._group_of.pop(name, None)
        if group is None:
            return False
        del group.in_flight[name]
        self.admission.give_back()
        if not group.in_flight and not group.num_waiting:
            del self._groups[group.request.key]
        return True

    def restart(self, name: str) -> bool:
        """A request was lost with its engine: it gives its permit back and waits for another. False where it has left before."""
        group = self._group_of.pop(name, None)
        if group is None:
            return False
        request, _ = group.in_flight.pop(name)
        self.admission.give_back()
        if not group.num_waiting:
            self._waiting[group.request.purpose].appendleft(group.request.key)
        group.to_restart.append(request.member)
        return True

    def expired(self, now_s: float, timeout_s: float, is_served: bool) -> list[Request]:
        """Requests that have been served for longer than `timeout_s`; each still has to `leave`, as a failure.

        Time in which nobody can be served (`is_served` false, from one look to the next) is not theirs: none expires in it, nor by it.
        """
        if not is_served:
            self._unserved_since = now_s if self._unserved_since is None else self._unserved_since
            return []
        if self._unserved_since is not None:
            for group in self._groups.values():
                for name, (request, started_s) in group.in_flight.items():
                    group.in_flight[name] = (
                        request,
                        started_s + now_s - max(started_s, self._unserved_since),
                    )
            self._unserved_since = None
        return [
            request
            for group in self._groups.values()
            for request, started_s in group.in_flight.values()
            if now_s - started_s > timeout_s
        ]

    def drop_stale(self, oldest_version: int) -> list[GroupDropped]:
        """Give up train groups whose version has become too old for any batch to come."""
        stale = [
            group
            for group in self._groups.values()
            if group.request.purpose == "train"
            and group.version is not None
            and group.version < oldest_version
        ]
        return [self._drop(group, "stale_in_flight") for group in stale]

    def drop_train(self, reason: str) -> list[GroupDropped]:
        """Give up every train group."""
        return [
            self._drop(group, reason)
            for group in list(self._groups.values())
            if group.request.purpose == "train"
        ]

    def _drop(self, group: _OpenGroup, reason: str) -> GroupDropped:
        requests = tuple(request for request, _ in group.in_flight.values())
        for request in requests:
            del self._group_of[request.name]
        self.admission.give_back(len(requests))
        del self._groups[group.request.key]
        if group.num_waiting:
            self._waiting[group.request.purpose].remove(group.request.key)
        return GroupDropped(group.request, reason, requests, group.num_waiting)
