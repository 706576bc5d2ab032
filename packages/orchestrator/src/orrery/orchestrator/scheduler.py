"""State: everything the loop decides, as one pure machine: no engine, no clock, no asyncio; events and times are arguments.

- In: what happened (`finished`, `failed`, `updated`, `wanted`). Out: what to do (`start`, `expired`, `drain`, `cut`, `begin_evaluation`).
- New groups are opened only as far as they can still be trained: rollouts in flight and queued stay within the batches to come that
  may hold the engines' version. So a slow trainer stops generation, instead of making it stale.
- Nor further than the trainer needs: one batch beyond those that may be cut. A trainer that is the slower end then finds its next batch
  ready, made by as new a policy as `max_batches_ahead` allows; where the engines are the slower end, this never binds.
- Times in `start`, `expired` and `batching.row` are monotonic, because decisions depend on them. All
  other times are wall-clock stamps.
- While an update is on its way (`updating`) nothing starts: a request must not begin under a version that is just leaving.
- `snapshot` between two cuts, then `restore`, goes on as if nothing had happened: queued groups are kept, groups in flight are redone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from orrery.manifest.schema import Manifest
from orrery.orchestrator.admission import Admission
from orrery.orchestrator.buffer import RolloutBuffer, Sample
from orrery.orchestrator.clock import NO_VERSION, Clock
from orrery.orchestrator.dispatch import Dispatch
from orrery.orchestrator.evaluation import EvaluationResult, Evaluations
from orrery.orchestrator.groups import Groups
from orrery.orchestrator.requests import Failed, Finished, GroupRequest, Request
from orrery.orchestrator.rollout import ENGINE_GONE, Rollout
from orrery.orchestrator.source import Source
from orrery.orchestrator.timeouts import TIMEOUT


@dataclass
class Tally:
    """What happened since the last cut."""

    # (position in manifest.tasks.train, reward, whether its group carries signal), trained or not
    rewards: list[tuple[int, float, bool]] = field(default_factory=list)
    generated_tokens: int = 0
    since_s: float | None = None


@dataclass(frozen=True)
class TrainBatch:
    """Batch `step`, of exactly `rollouts_per_batch` samples, and the tally since the cut before."""

    step: int
    samples: list[Sample]
    tally: Tally


@dataclass(frozen=True)
class Snapshot:
    """What a resumed run goes on from."""

    next_batch: int
    cursors: list[int]
    in_flight: list[GroupRequest]
    queue: list[list[Sample]]
    spare: list[list[Sample]]  # groups without signal
    num_sampled: int  # as `RolloutBuffer` counts
    evaluated: int  # newest version whose evaluation is finished
    num_evaluation_groups: int
    digests: dict[int, str]  # of the weights of every version that engines have had
    num_batches: int  # fewer than in the manifest if the stage ends early
    rewards: list[tuple[int, float, bool]]  # since the last cut; throughput restarts


class Scheduler:
    """The orchestrator of one run."""

    def __init__(self, manifest: Manifest, snapshot: Snapshot | None = None):
        settings, tasks = manifest.orchestrator, manifest.tasks
        self.manifest = manifest
        self.rollouts_per_batch = settings.rollouts_per_batch
        num_batches = snapshot.num_batches if snapshot else manifest.stages.rl.num_steps
        self.clock = Clock(settings.max_off_policy_steps, num_batches)
        self.dispatch = Dispatch(
            Admission(settings.admission, manifest.inference.max_model_len_tokens)
        )
        self.groups = Groups()
        self.buffer = RolloutBuffer(settings)
        self.wanted = 0  # the newest batch that the trainer has asked for
        self.updating = False
        self.digests = dict(snapshot.digests) if snapshot else {}
        self.tally = Tally(list(snapshot.rewards)) if snapshot else Tally()
        evaluation = settings.evaluation
        self.evaluations = Evaluations(
            tasks.evaluation, evaluation.interval_steps, evaluation.num_problems, evaluation.rollouts_per_problem,
            last_step=num_batches,
            # Evaluate the last version again: its rollouts are compared, and in no snapshot.
            last=min(snapshot.evaluated, num_batches - 1) if snapshot else NO_VERSION,
            num_groups=snapshot.num_evaluation_groups if snapshot else 0,
        )  # fmt: skip
        self.source = Source(
            tasks.train, settings.algorithm.group_size,
            cursors=snapshot.cursors if snapshot else None,
            unfinished=snapshot.in_flight if snapshot else (),
        )  # fmt: skip
        self._timeouts_are_zero = settings.on_timeout == "zero"
        self._open_train_rollouts = (
            0  # members of groups that are not whole yet, whatever has become of each
        )
        if snapshot:
            self.clock.next_batch = snapshot.next_batch
            self.wanted = snapshot.next_batch - 1  # it was cut, so it had been asked for, or nearly
            self.buffer.queue.extend(snapshot.queue)
            self.buffer.spare.extend(snapshot.spare)
            self.buffer.num_sampled = snapshot.num_sampled

    # What to do ------------------------------------------------------------------------------------------------------

    def start(self, now_s: float) -> list[Request]:
        """The requests to play now."""
        if self.updating or self.clock.version == NO_VERSION:
            return []
        if self.tally.since_s is None:
            self.tally.since_s = now_s
        self.buffer.sweep(self.clock.oldest_useful)
        num_batches = min(
            self.clock.batches_open_to(self.clock.version),
            self.newest_allowed_batch + 1 - self.clock.next_batch + 1,
        )
        room = self.buffer.room(num_batches) - self._open_train_rollouts
        spare = self.dispatch.admission.free - self.dispatch.num_waiting
        while room > 0 and spare > 0:
            group = self.source.next()
            self.dispatch.offer(group)
            self._open_train_rollouts += group.size
            room, spare = room - group.size, spare - group.size
        return self.dispatch.start(self.clock.version, now_s)

    def expired(self, now_s: float, is_served: bool = True) -> list[Request]:
        """Return the requests past their time, not counting an update's pause.

        `TimeoutClassifier` finds the reason. The caller then fails each of them.
        """
        return self.dispatch.expired(
            now_s, self.manifest.orchestrator.rollout_timeout_s, is_served and not self.updating
        )

    def drain(self) -> list[Request]:
        """Give up work in flight that no batch to come may hold; the requests to cancel."""
        return self._give_up(self.dispatch.drop_stale(self.clock.oldest_useful))

    def end_training(self) -> list[Request]:
        """After the last cut: give up all train work; the requests to cancel."""
        return self._give_up(self.dispatch.drop_train("run_over"))

    @property
    def newest_allowed_batch(self) -> int:
        """The newest batch that may go to the wire now."""
        return self.wanted + self.manifest.orchestrator.max_batches_ahead

    def take_batch(self) -> TrainBatch | None:
        """The next batch, if the trainer is near enough to want it and there is enough for it."""
        step = self.clock.next_batch
        if self.clock.all_batches_taken or step > self.newest_allowed_batch:
            return None
        samples = self.buffer.take_batch(self.clock.oldest_version(step))
        if samples is None:
            return None
        self.clock.next_batch += 1
        tally, self.tally = self.tally, Tally()
        return TrainBatch(step, samples, tally)

    def may_update(self, version: int) -> bool:
        """Whether engines may go to `version` now: an active evaluation keeps them where they are."""
        return version > self.clock.version and self.evaluations.pinned is None

    def begin_evaluation(self, now_s: float) -> bool:
        """Pin the engines' version and offer the held-out problems, if an evaluation is due; its rollouts start before any other."""
        if not self.evaluations.due(self.clock.version):
            return False
        for group in self.evaluations.begin(self.clock.version, now_s):
            self.dispatch.offer(group)
        return True

    def stop_early(self, result: EvaluationResult) -> bool:
        """Cut no further batch if `result` has reached `evaluation.stop_at`.

        Return whether this ends the stage earlier.
        """
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
        """The last batch is trained, and the policy it made is evaluated."""
        return (
            self.clock.all_batches_taken
            and self.clock.version >= self.clock.num_batches
            and self.evaluations.last >= self.clock.num_batches
        )

    # What happened ---------------------------------------------------------------------------------------------------

    def updated(self, version: int) -> None:
        """All engines hold `version`."""
        if self.evaluations.pinned is not None:
            raise AssertionError(
                f"version {version} went in while evaluation had {self.evaluations.pinned} pinned"
            )
        self.clock.version = version

    def finished(self, request: Request, rollout: Rollout, now_s: float) -> EvaluationResult | None:
        """A rollout has come to its judgement; the evaluation's result, if this was its last."""
        if not self.dispatch.leave(request.name):
            return None
        self.tally.generated_tokens += int(rollout.trained.sum())
        return self._leave(Finished(request, rollout), now_s)

    def failed(
        self, request: Request, reason: str, detail: str, now_s: float
    ) -> EvaluationResult | None:
        """A rollout has come to nothing; the same result as `finished`. One of an evaluation that its engine took along starts again."""
        if request.group.purpose == "evaluation" and reason == ENGINE_GONE:
            self.dispatch.restart(request.name)
            return None
        if not self.dispatch.leave(request.name):
            return None
        if request.group.purpose == "train":
            self.buffer.count(reason, 1, detail)
        return self._leave(
            Failed(request, reason, detail, reason == TIMEOUT and self._timeouts_are_zero), now_s
        )

    def _leave(self, outcome: Finished | Failed, now_s: float) -> EvaluationResult | None:
        if outcome.request.group.purpose == "evaluation":
            return self.evaluations.add(outcome, now_s)
        group = self.groups.add(outcome)
        if group is not None:
            self._open_train_rollouts -= group.request.size
            has_signal, task_index = self.buffer.add(group), group.request.task_index
            rewards = [
                *(rollout.reward for rollout in group.survivors.values()),
                *[0.0] * group.num_zeros,
            ]
            self.tally.rewards.extend((task_index, reward, has_signal) for reward in rewards)
        self.buffer.check_not_starved()
        return None

    def _give_up(self, dropped: Sequence) -> list[Request]:
        for group in dropped:
            self._open_train_rollouts -= group.group.size
            self.buffer.count(
                group.reason,
                self.groups.drop(group) + len(group.in_flight) + group.num_undispatched,
            )
        return [request for group in dropped for request in group.in_flight]

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The state as of the last cut and all that ended since. Groups in flight count as not begun; an active evaluation too."""
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
