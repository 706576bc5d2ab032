"""Make every decision of the loop, without engines, clocks or asyncio.

- A new group starts only while unfinished and queued rollouts do not fill the next batches: those
  that may contain the engines' version, up to one beyond `max_batches_ahead`.
- No rollout starts during a weight update (`updating`).
- `start`, `expired` and `batching.row` take monotonic times, other functions wall-clock times.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from orrery.manifest.schema import Manifest
from orrery.orchestrator.admission import Admission
from orrery.orchestrator.advantages import Groups
from orrery.orchestrator.buffer import RolloutBuffer
from orrery.orchestrator.dispatch import Dispatch, GroupDropped, GroupRequest, Request, Source
from orrery.orchestrator.evaluation import EvaluationResult, Evaluations
from orrery.orchestrator.rollout import ENGINE_GONE, NO_VERSION, Failed, Rollout


@dataclass
class Clock:
    """Policy versions, batch numbers and the staleness formula.

    - Versions start at 0. Batch n (from 1) trains version n − 1 and makes version n.
    - A token may enter batch n only if its version ≥ n − 1 − `max_off_policy_steps`.
    """

    max_off_policy_steps: int
    num_batches: int
    next_batch: int = 1
    version: int = NO_VERSION  # loaded by the engines

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
    # For each rollout: (position in manifest.tasks.train, reward, whether its group has a signal).
    rewards: list[tuple[int, float, bool]] = field(default_factory=list)
    generated_tokens: int = 0
    since_s: float | None = None


@dataclass(frozen=True)
class TrainBatch:
    """Batch `step` of exactly `rollouts_per_batch` rollouts, and its tally."""

    step: int
    rollouts: list[Rollout]
    tally: Tally


@dataclass(frozen=True)
class Snapshot:
    next_batch: int
    cursors: list[int]
    in_flight: list[GroupRequest]
    queue: list[list[Rollout]]
    spare: list[list[Rollout]]  # groups whose advantages are zero
    num_sampled: int
    evaluated: int
    num_evaluation_groups: int
    digests: dict[int, str]
    num_batches: int  # below the manifest's number if the stage ends early
    rewards: list[tuple[int, float, bool]]


class Scheduler:
    def __init__(self, manifest: Manifest, snapshot: Snapshot | None = None):
        settings, tasks = manifest.orchestrator, manifest.tasks
        self.manifest = manifest
        self.rollouts_per_batch = settings.rollouts_per_batch
        num_batches = snapshot.num_batches if snapshot else manifest.stages.rl.num_steps
        self.clock = Clock(settings.max_off_policy_steps, num_batches)
        max_model_len_tokens = manifest.inference.max_model_len_tokens
        self.dispatch = Dispatch(Admission(settings.admission, max_model_len_tokens))
        self.groups = Groups()
        self.buffer = RolloutBuffer(settings)
        self.wanted = 0  # the newest batch that the trainer has asked for
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
            # Evaluate the last version again, because snapshots lack the evaluation's rollouts.
            last=min(snapshot.evaluated, num_batches - 1) if snapshot else NO_VERSION,
            num_groups=snapshot.num_evaluation_groups if snapshot else 0,
        )
        self.source = Source(
            tasks.train,
            settings.algorithm.group_size,
            cursors=snapshot.cursors if snapshot else None,
            unfinished=snapshot.in_flight if snapshot else (),
        )
        self._open_train_rollouts = 0
        if snapshot:
            self.clock.next_batch = snapshot.next_batch
            self.wanted = snapshot.next_batch - 1
            self.buffer.queue.extend(snapshot.queue)
            self.buffer.spare.extend(snapshot.spare)
            self.buffer.num_sampled = snapshot.num_sampled

    # Actions

    def start(self, now_s: float) -> list[Request]:
        if self.updating or self.clock.version == NO_VERSION:
            return []
        if self.tally.since_s is None:
            self.tally.since_s = now_s
        self.buffer.sweep(self.clock.oldest_useful)
        most_ahead = self.newest_allowed_batch + 1 - self.clock.next_batch + 1
        num_batches = min(self.clock.batches_open_to(self.clock.version), most_ahead)
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
        """Drop groups in flight too old for any later batch. Return the requests to cancel."""
        return self._give_up(self.dispatch.drop_stale(self.clock.oldest_useful))

    def end_training(self) -> list[Request]:
        """Drop all train groups. Return the requests to cancel."""
        return self._give_up(self.dispatch.drop_train("run_over"))

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
        """Return whether engines may update now. An active evaluation pins their version."""
        return version > self.clock.version and self.evaluations.pinned is None

    def begin_evaluation(self, now_s: float) -> bool:
        if not self.evaluations.due(self.clock.version):
            return False
        for group in self.evaluations.begin(self.clock.version, now_s):
            self.dispatch.offer(group)
        return True

    def stop_early(self, result: EvaluationResult) -> bool:
        """If `result` reached `evaluation.stop_at`, take no more batches and return True."""
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

    # Events

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
        """Record a rollout's end. Return the evaluation's result after its last rollout."""
        is_train = request.group.purpose == "train"
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

    def _give_up(self, dropped: Sequence[GroupDropped]) -> list[Request]:
        for group in dropped:
            self._open_train_rollouts -= group.group.size
            num_lost = self.groups.drop(group) + len(group.in_flight) + group.num_undispatched
            self.buffer.count(group.reason, num_lost)
        return [request for group in dropped for request in group.in_flight]

    def snapshot(self) -> Snapshot:
        """Return the state. Groups in flight and an active evaluation restart on resume."""
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
