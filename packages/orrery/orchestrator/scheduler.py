"""Make all decisions of the RL loop, without calling engines, clocks or asyncio.

- A group (rollouts of one problem) starts only if an open batch has room for it.
- An open batch accepts tokens of the engines' policy version, and is at most `max_batches_ahead` +
  1 batches after the newest batch that the trainer requested.
- `start` and `expired` take monotonic times. Other functions take wall-clock times.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from orrery.manifest.errors import RunFailed
from orrery.manifest.schema import Manifest, TaskUse
from orrery.orchestrator.dispatch import (
    TIMEOUT,
    Admission,
    Dispatch,
    GroupDropped,
    GroupRequest,
    Request,
    Source,
)
from orrery.orchestrator.groups import Groups, RolloutBuffer
from orrery.orchestrator.rollout import ENGINE_GONE, NO_VERSION, SITE_REFUSED, Failed, Rollout
from orrery.runtime.role_context import RoleContext


@dataclass
class _Active:
    version: int
    start_s: float
    num_missing: int
    rollouts: list[Rollout] = field(default_factory=list)
    failures: Counter[tuple[int, str]] = field(default_factory=Counter)  # count by task and reason
    zeros: Counter[int] = field(default_factory=Counter)  # timeouts with reward 0, by task
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
        """Add an outcome. Return the evaluation's result after the last outcome.

        Raise RunFailed if a token has another version, or all rollouts of a task failed.
        """
        active, task_index = self._active, request.group.task_index
        assert active is not None, "an evaluation rollout without an evaluation"
        active.num_missing -= 1
        if isinstance(outcome, Rollout):
            versions = outcome.sampled_versions
            if (versions != active.version).any():
                raise RunFailed(
                    f"evaluation at version {active.version}: rollout {request.name} holds "
                    f"tokens of versions {versions.min()} to {versions.max()}; report this defect: "
                    "an update ran during the evaluation"
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


@dataclass
class Clock:
    """The engines' policy version and the next batch's number.

    - Batch n ≥ 1 trains version n − 1 and makes version n.
    - A batch's tokens have versions ≥ n − 1 − `max_off_policy_steps`.
    """

    max_off_policy_steps: int
    num_batches: int
    next_batch: int = 1
    version: int = NO_VERSION

    def oldest_version(self, batch: int) -> int:
        return batch - 1 - self.max_off_policy_steps

    @property
    def oldest_useful(self) -> int:
        return self.oldest_version(self.next_batch)

    def batches_open_to(self, version: int) -> int:
        last = min(version + 1 + self.max_off_policy_steps, self.num_batches)
        return max(0, last - self.next_batch + 1)

    @property
    def all_batches_taken(self) -> bool:
        return self.next_batch > self.num_batches


@dataclass
class Tally:
    # per rollout: task index, reward, whether the group has a nonzero advantage
    rewards: list[tuple[int, float, bool]] = field(default_factory=list)
    generated_tokens: int = 0
    since_s: float | None = None


@dataclass(frozen=True)
class TrainBatch:
    step: int
    rollouts: list[Rollout]
    tally: Tally


@dataclass(frozen=True)
class Snapshot:
    next_batch: int
    cursors: list[int]
    in_flight: list[GroupRequest]
    queue: list[list[Rollout]]
    spare: list[list[Rollout]]  # groups with only zero advantages
    num_sampled: int
    evaluated: int
    num_evaluation_groups: int
    digests: dict[int, str]
    num_batches: int  # after an early stop, fewer than in the manifest
    rewards: list[tuple[int, float, bool]]


class Scheduler:
    def __init__(
        self, manifest: Manifest, snapshot: Snapshot | None = None, first_problem: int = 0
    ):
        settings, tasks = manifest.orchestrator, manifest.tasks
        self.manifest = manifest
        self.rollouts_per_batch = settings.rollouts_per_batch
        num_batches = snapshot.num_batches if snapshot else manifest.stages.rl.num_steps
        self.clock = Clock(settings.max_off_policy_steps, num_batches)
        max_model_len_tokens = manifest.inference.max_model_len_tokens
        self.dispatch = Dispatch(Admission(settings.admission, max_model_len_tokens))
        self.groups = Groups()
        self.buffer = RolloutBuffer(settings)
        self.wanted = 0  # newest batch that the trainer requested
        self.updating = False
        self.digests = dict(snapshot.digests) if snapshot else {}
        self.tally = Tally(list(snapshot.rewards)) if snapshot else Tally()
        evaluation = settings.evaluation
        self.evaluations = Evaluations(
            tasks.evaluation,
            evaluation.interval_steps,
            evaluation.num_problems,
            evaluation.rollouts_per_problem,
            last_step=num_batches,
            # Repeat the final version's evaluation, because snapshots lack its rollouts.
            last=min(snapshot.evaluated, num_batches - 1) if snapshot else NO_VERSION,
            num_groups=snapshot.num_evaluation_groups if snapshot else 0,
        )
        self.source = Source(
            tasks.train,
            settings.algorithm.group_size,
            cursors=snapshot.cursors if snapshot else None,
            unfinished=snapshot.in_flight if snapshot else (),
            first_problem=first_problem,
        )
        self._open_train_rollouts = 0
        self._refused: set[int] = set()  # engines of refused sites
        if snapshot:
            self.clock.next_batch = snapshot.next_batch
            self.wanted = snapshot.next_batch - 1
            self.buffer.queue.extend(snapshot.queue)
            self.buffer.spare.extend(snapshot.spare)
            self.buffer.num_sampled = snapshot.num_sampled
            # Drop other sites' rollouts: site numbers changed, and a site may be refused.
            num_own = manifest.inference.num_replicas
            self.buffer.drop_engines(lambda each: each >= num_own, "site_of_past_attempt")

    def start(self, now_s: float) -> list[Request]:
        if self.updating or self.clock.version == NO_VERSION:
            return []
        if self.tally.since_s is None:
            self.tally.since_s = now_s
        self.buffer.sweep(self.clock.oldest_useful)
        max_ahead = self.newest_allowed_batch + 1 - self.clock.next_batch + 1
        num_batches = min(self.clock.batches_open_to(self.clock.version), max_ahead)
        room = self.buffer.room(num_batches) - self._open_train_rollouts
        spare = self.dispatch.admission.free - self.dispatch.num_waiting
        while room > 0 and spare > 0:
            group = self.source.next()
            self.dispatch.offer(group)
            self._open_train_rollouts += group.size
            room, spare = room - group.size, spare - group.size
        return self.dispatch.start(self.clock.version, now_s)

    def expired(self, now_s: float, is_served: bool = True) -> list[Request]:
        timeout_s = self.manifest.orchestrator.rollout_timeout_s
        return self.dispatch.expired(now_s, timeout_s, is_served and not self.updating)

    def drain(self) -> list[Request]:
        """Drop stale groups. Return the requests to cancel."""
        return self._give_up(self.dispatch.drop_stale(self.clock.oldest_useful))

    def end_training(self) -> list[Request]:
        return self._give_up(self.dispatch.drop_train())

    @property
    def newest_allowed_batch(self) -> int:
        return self.wanted + self.manifest.orchestrator.max_batches_ahead

    def take_batch(self) -> TrainBatch | None:
        step = self.clock.next_batch
        if self.clock.all_batches_taken or step > self.newest_allowed_batch:
            return None
        rollouts = self.buffer.take_batch(self.clock.oldest_version(step))
        if rollouts is None:
            return None
        self.clock.next_batch += 1
        tally, self.tally = self.tally, Tally()
        return TrainBatch(step, rollouts, tally)

    def may_update(self, version: int) -> bool:
        return version > self.clock.version and self.evaluations.pinned is None

    def begin_evaluation(self, now_s: float) -> bool:
        if not self.evaluations.due(self.clock.version):
            return False
        for group in self.evaluations.begin(self.clock.version, now_s):
            self.dispatch.offer(group)
        return True

    def stop_early(self, result: EvaluationResult) -> bool:
        """Return whether `result` reaches `evaluation.stop_at`. If so, take no more batches."""
        stop_at = self.manifest.orchestrator.evaluation.stop_at
        if stop_at is None or result.reward_mean < stop_at or self.clock.all_batches_taken:
            return False
        self.clock.num_batches = self.evaluations.last_step = self.clock.next_batch - 1
        return True

    @property
    def stopped_early(self) -> bool:
        return self.clock.num_batches < self.manifest.stages.rl.num_steps

    @property
    def done(self) -> bool:
        num_batches = self.clock.num_batches
        is_trained = self.clock.all_batches_taken and self.clock.version >= num_batches
        return is_trained and self.evaluations.last >= num_batches

    def updated(self, version: int) -> None:
        pinned = self.evaluations.pinned
        if pinned is not None:
            raise AssertionError(
                f"engines loaded version {version} during an evaluation of {pinned}"
            )
        self.clock.version = version

    def ended(
        self, request: Request, outcome: Rollout | Failed, now_s: float
    ) -> EvaluationResult | None:
        is_train = request.group.purpose == "train"
        if isinstance(outcome, Rollout) and outcome.engine in self._refused:
            outcome = Failed(SITE_REFUSED, "its site sent false samples")
        reason = outcome.reason if isinstance(outcome, Failed) else None
        if reason == ENGINE_GONE and not is_train:
            self.dispatch.restart(request.name)
            return None
        if not self.dispatch.leave(request.name):
            return None
        if isinstance(outcome, Rollout):
            self.tally.generated_tokens += int(outcome.trained.sum())
        elif is_train:
            self.buffer.count(outcome.reason, 1, outcome.detail)
        if not is_train:
            return self.evaluations.add(request, outcome, now_s)
        group = self.groups.add(request, outcome)
        if group is not None:
            self._open_train_rollouts -= group.request.size
            has_signal, task_index = self.buffer.add(group), group.request.task_index
            rewards = [rollout.reward for rollout in group.survivors]
            rewards += [0.0] * group.num_zeros
            self.tally.rewards.extend((task_index, reward, has_signal) for reward in rewards)
        self.buffer.check_not_starved()
        return None

    def drop_engine(self, engine: int) -> int:
        """Drop a refused site's rollouts, now and later. Return the number dropped now."""
        self._refused.add(engine)
        num_open = self.groups.drop_engine(engine)
        self.buffer.count(SITE_REFUSED, num_open)
        return num_open + self.buffer.drop_engines(lambda each: each == engine, SITE_REFUSED)

    def _give_up(self, dropped: Sequence[GroupDropped]) -> list[Request]:
        for group in dropped:
            self._open_train_rollouts -= group.group.size
            num_lost = self.groups.drop(group) + len(group.in_flight) + group.num_undispatched
            self.buffer.count(group.reason, num_lost)
        return [request for group in dropped for request in group.in_flight]

    def snapshot(self) -> Snapshot:
        """Return the state. A resumed run repeats unfinished groups and evaluations."""
        return Snapshot(
            next_batch=self.clock.next_batch,
            cursors=list(self.source.cursors),
            in_flight=[*self.dispatch.open_train_groups(), *self.source.unfinished],
            queue=[list(group) for group in self.buffer.queue],
            spare=[list(group) for group in self.buffer.spare],
            num_sampled=self.buffer.num_sampled,
            evaluated=self.evaluations.last,
            num_evaluation_groups=self.evaluations.num_groups,
            digests=dict(self.digests),
            num_batches=self.clock.num_batches,
            rewards=list(self.tally.rewards),
        )
