"""Start rollouts in groups (one problem each), and limit the rollouts in flight.

- The next group comes from the task furthest below its share of groups.
- Order: evaluation, groups already started (their prompt is cached), new groups.
- Failed rollouts are not retried, except evaluation rollouts of a lost engine.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import or_
from typing import Any, Literal

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import AdaptiveAdmission, FixedAdmission, TaskUse
from orrery.orchestrator.engines.messages import EngineMetrics
from orrery.runtime.role_context import RoleContext
from orrery.runtime.timing import Pace, period_s, scaled

Purpose = Literal["train", "evaluation"]

TIMEOUT = "timeout"
PROOF_S = 30.0
BACKOFF = 0.05
LEAST = 1e-9
# A poll multiplies a positive (`share` − measured) by e^(−DECAY · num_ended / in_flight).
DECAY = 3.0
ENGINE_POLL_S = 0.5
PIECE_S = 5.0


@dataclass(frozen=True)
class GroupRequest:
    """A request for `size` rollouts of one problem. `group_id` counts from 0 per purpose."""

    purpose: Purpose
    group_id: int
    task_index: int  # index in manifest.tasks.train or manifest.tasks.evaluation
    problem_index: int
    size: int

    @property
    def key(self) -> str:
        return f"{self.purpose}-{self.group_id}"


@dataclass(frozen=True)
class Request:
    """A request for one rollout. `version` (cache salt): policy version at the group's start."""

    group: GroupRequest
    member: int
    version: int

    @property
    def name(self) -> str:
        return f"{self.group.key}-{self.member}"

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "group_id": self.group.group_id,
            "member": self.member,
            "task_index": self.group.task_index,
            "problem_index": self.group.problem_index,
            "dispatch_version": self.version,
        }


@dataclass(frozen=True)
class GroupDropped:
    group: GroupRequest
    reason: str
    in_flight: tuple[Request, ...]
    num_undispatched: int


class Source:
    """A source of groups: first `unfinished`, then new groups from problem `first_problem` on."""

    def __init__(
        self,
        tasks: Sequence[TaskUse],
        group_size: int,
        cursors: Sequence[int] | None = None,
        unfinished: Iterable[GroupRequest] = (),
        first_problem: int = 0,
    ):
        self.first_problem = first_problem
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
        problem_index = self.first_problem + self.cursors[task_index]
        self.cursors[task_index] += 1
        return GroupRequest("train", group_id, task_index, problem_index, self.group_size)


@dataclass
class AdaptiveLimit:
    """The limit of rollouts in flight: number of engines / `share`.

    `share` estimates a rollout's part of one engine's KV cache. It rises at once but falls slowly,
    because new rollouts use little cache. After n preemptions, the limit becomes
    m − min(n, max(1, BACKOFF · m)) with m = min(limit, rollouts in flight).
    """

    bounds: AdaptiveAdmission
    max_model_len_tokens: int
    share: float | None = None
    limit: int = field(init=False)
    _preemptions: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.limit = self.bounds.min_in_flight

    def observe(
        self, loads: Mapping[int, EngineMetrics], in_flight: int, num_ended: int, was_full: bool
    ) -> None:
        """Update `share` and `limit`.

        `num_ended`: rollouts ended since the last poll. `was_full`: all permits were taken at
        some time since then.
        """
        preempted = self._newly_preempted(loads)
        if not loads:
            return
        if self.share is None:
            self.share = self._first_share(loads)
        # vLLM counts requests that load KV blocks as waiting, but they occupy cache.
        holding = sum(load.running + load.loading for load in loads.values())
        waiting = sum(load.waiting - load.loading for load in loads.values())
        if holding and in_flight:
            held = in_flight * holding / (holding + waiting)
            measured = sum(load.kv_usage for load in loads.values()) / held
            if measured >= self.share:
                self.share = measured
            elif was_full and not preempted and waiting <= num_ended:
                kept = math.exp(-DECAY * num_ended / in_flight)
                self.share = max(LEAST, measured + (self.share - measured) * kept)
            if preempted and in_flight <= self.limit:
                fits = min(self.limit, in_flight, len(loads) / self.share)
                self.share = len(loads) / max(0.5, fits - min(preempted, max(1.0, BACKOFF * fits)))
        self._follow(len(loads))

    def _follow(self, num_engines: int) -> None:
        assert self.share is not None
        most = self.bounds.max_in_flight
        fits = most if self.share * most <= num_engines else int(num_engines / self.share + 1e-9)
        self.limit = max(self.bounds.min_in_flight, fits)

    def _first_share(self, loads: Mapping[int, EngineMetrics]) -> float:
        kv_tokens = min(load.kv_tokens for load in loads.values())
        if not kv_tokens:
            return len(loads) / self.bounds.min_in_flight
        return min(1.0, self.max_model_len_tokens / kv_tokens)

    def _newly_preempted(self, loads: Mapping[int, EngineMetrics]) -> int:
        """Return the number of new preemptions. A restarted engine counts from 0."""
        before = self._preemptions
        totals = {index: load.preemptions_total for index, load in loads.items()}
        self._preemptions = before | totals
        new = 0
        for index, total in totals.items():
            if index in before:
                new += total - before[index] if total >= before[index] else total
        return new


class Admission:
    def __init__(self, settings: FixedAdmission | AdaptiveAdmission, max_model_len_tokens: int):
        self.adaptive: AdaptiveLimit | None = None
        if isinstance(settings, AdaptiveAdmission):
            self.adaptive = AdaptiveLimit(settings, max_model_len_tokens)
        self.limit = self.adaptive.limit if self.adaptive else settings.max_in_flight
        self.taken = 0
        self._num_ended, self._was_full = 0, False

    @property
    def free(self) -> int:
        return max(0, self.limit - self.taken)

    def take(self) -> None:
        if self.taken >= self.limit:
            raise AssertionError(f"took permit {self.taken + 1} of {self.limit}")
        self.taken += 1
        self._was_full |= self.taken == self.limit

    def give_back(self, count: int = 1) -> None:
        if count > self.taken:
            raise AssertionError(f"{count} permits given back, {self.taken} taken")
        self.taken -= count
        self._num_ended += count

    def observe(self, loads: Mapping[int, EngineMetrics]) -> None:
        was_full = self._was_full or self.taken >= self.limit
        if self.adaptive is not None:
            self.adaptive.observe(loads, self.taken, self._num_ended, was_full)
            self.limit = self.adaptive.limit
        self._num_ended, self._was_full = 0, self.taken >= self.limit


@dataclass
class _OpenGroup:
    request: GroupRequest
    version: int | None = None
    num_started: int = 0
    to_restart: list[int] = field(default_factory=list)
    in_flight: dict[str, tuple[Request, float]] = field(default_factory=dict)

    @property
    def num_waiting(self) -> int:
        return self.request.size - self.num_started + len(self.to_restart)


class Dispatch:
    def __init__(self, admission: Admission):
        self.admission = admission
        self._groups: dict[str, _OpenGroup] = {}
        self._waiting: dict[Purpose, deque[str]] = {"evaluation": deque(), "train": deque()}
        self._group_of: dict[str, _OpenGroup] = {}
        self._unserved_since: float | None = None

    @property
    def num_in_flight(self) -> int:
        return len(self._group_of)

    @property
    def num_waiting(self) -> int:
        return sum(group.num_waiting for group in self._groups.values())

    def _train_groups(self) -> list[_OpenGroup]:
        return [group for group in self._groups.values() if group.request.purpose == "train"]

    def open_train_groups(self) -> list[GroupRequest]:
        groups = [group.request for group in self._train_groups()]
        return sorted(groups, key=lambda group: group.group_id)

    def offer(self, group: GroupRequest) -> None:
        if group.key in self._groups:
            raise AssertionError(f"group {group.key} offered twice")
        self._groups[group.key] = _OpenGroup(group)
        self._waiting[group.purpose].append(group.key)

    def start(self, version: int, now_s: float) -> list[Request]:
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
        group = self._group_of.pop(name, None)
        if group is None:
            return False
        del group.in_flight[name]
        self.admission.give_back()
        if not group.in_flight and not group.num_waiting:
            del self._groups[group.request.key]
        return True

    def restart(self, name: str) -> bool:
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
        """Return requests in flight for longer than `timeout_s`. They stay in flight.

        Time without a serving engine (not `is_served`) does not count.
        """
        if not is_served:
            self._unserved_since = now_s if self._unserved_since is None else self._unserved_since
            return []
        if self._unserved_since is not None:
            for group in self._groups.values():
                for name, (request, started_s) in group.in_flight.items():
                    pause_s = now_s - max(started_s, self._unserved_since)
                    group.in_flight[name] = (request, started_s + pause_s)
            self._unserved_since = None
        return [
            request
            for group in self._groups.values()
            for request, started_s in group.in_flight.values()
            if now_s - started_s > timeout_s
        ]

    def drop_stale(self, oldest_version: int) -> list[GroupDropped]:
        return [
            self._drop(group, "stale_in_flight")
            for group in self._train_groups()
            if group.version is not None and group.version < oldest_version
        ]

    def drop_train(self) -> list[GroupDropped]:
        return [self._drop(group, "run_over") for group in self._train_groups()]

    def _drop(self, group: _OpenGroup, reason: str) -> GroupDropped:
        requests = tuple(request for request, _ in group.in_flight.values())
        for request in requests:
            del self._group_of[request.name]
        self.admission.give_back(len(requests))
        del self._groups[group.request.key]
        if group.num_waiting:
            self._waiting[group.request.purpose].remove(group.request.key)
        return GroupDropped(group.request, reason, requests, group.num_waiting)


@dataclass
class _Expired:
    """An overdue rollout. `tokens`: {engine: token count at the first poll after the timeout}."""

    since_s: float
    tokens: dict[int, int] = field(default_factory=dict)
    is_slow: bool = False


class TimeoutClassifier:
    """Classify rollouts past `timeout_s`.

    - `timeout`: every engine with requests generates tokens.
    - `engine_still`: an engine with requests generated no tokens for PROOF_S.
    - `no_answer`: the task or judge did not answer.

    Only `timeout` may become a reward of 0 (`orchestrator.on_timeout`).
    """

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self._expired: dict[str, _Expired] = {}

    def observe(self, loads: Mapping[int, EngineMetrics]) -> None:
        for case in self._expired.values():
            for index, load in loads.items():
                case.tokens.setdefault(index, load.generation_tokens_total)
            moved = [
                load.generation_tokens_total != case.tokens[index] for index, load in loads.items()
            ]
            idle = [load.running + load.waiting == 0 for load in loads.values()]
            case.is_slow |= any(moved) and all(map(or_, moved, idle))

    def reasons(
        self, expired: Iterable[Request], is_generating: Callable[[Request], bool], now_s: float
    ) -> list[tuple[Request, str, str]]:
        requests, found = list(expired), []
        self._expired = {
            request.name: self._expired.get(request.name) or _Expired(now_s) for request in requests
        }
        for request in requests:
            case = self._expired[request.name]
            detail = f"rollout {request.name} took more than orchestrator.rollout_timeout_s"
            detail += f" = {self.timeout_s:g} s"
            if not is_generating(request):
                detail += ", and its task or judge did not answer"
                found.append((request, "no_answer", detail))
            elif case.is_slow:
                found.append((request, TIMEOUT, detail))
            elif now_s - case.since_s > scaled(PROOF_S):
                detail += f", and for {scaled(PROOF_S):g} s after that an engine made no tokens or "
                detail += "did not report any; see the logs of inference"
                found.append((request, "engine_still", detail))
        for request, _, _ in found:
            del self._expired[request.name]
        return found


async def poll_engines(
    ctx: RoleContext, pool: Any, admission: Admission, pace: Pace | None = None
) -> dict[int, EngineMetrics]:
    """Update `admission`. Return engines' loads, or {} if an engine does not answer."""
    try:
        loads: dict[int, EngineMetrics] = await pool.metrics()
    except OrreryError as error:
        ctx.log.warning("no metrics from the engines: %s", error)
        return {}
    due = pace is None or pace.due(time.monotonic())
    for index, load in loads.items() if due else ():
        ctx.metrics.write(
            None,
            event="engine",
            engine=index,
            running=load.running,
            waiting=load.waiting,
            kv_usage=load.kv_usage,
            preemptions=load.preemptions_total,
            prompt_tokens=load.prompt_tokens_total,
            external_hit_tokens=load.external_hit_tokens_total,
        )
    # Skip prefill engines: rollouts fill only decode engines' caches.
    first = ctx.manifest.inference.prefill_replicas
    before = admission.limit
    admission.observe({index: load for index, load in loads.items() if index >= first})
    if admission.adaptive is None:
        return loads
    limit, taken, share = admission.limit, admission.taken, admission.adaptive.share
    if due:
        ctx.metrics.write(None, event="admission", limit=limit, num_in_flight=taken, share=share)
    if limit != before:
        ctx.log.debug("rollouts in flight: %d, limit %d (before: %d)", taken, limit, before)
    return loads


class EngineActivity:
    """Record when an engine has requests, as `generate` spans."""

    def __init__(self, add_span: Callable[..., None]):
        self._add_span = add_span
        self._busy_since: dict[int, float] = {}
        self._begin_s: float | None = None

    def observe(self, engine: int, num_requests: int, now_s: float) -> None:
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
