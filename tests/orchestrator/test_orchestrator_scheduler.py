"""Any order of events: hypothesis runs engine, trainer and clock against dispatch and scheduler."""

import random
from collections import Counter

import numpy as np
import orchestrator_fakes as fakes
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orrery.manifest.errors import RunFailed
from orrery.manifest.schema import FixedAdmission
from orrery.orchestrator.dispatch import Admission, Dispatch, GroupRequest
from orrery.orchestrator.groups import RolloutBuffer
from orrery.orchestrator.rollout import Failed
from orrery.orchestrator.scheduler import Scheduler, Snapshot

QUICK = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


class DispatchMachine(RuleBasedStateMachine):
    """Every request leaves exactly once; a permit is one rollout in flight."""

    @initialize(limit=st.integers(1, 6))
    def begin(self, limit):
        self.dispatch = Dispatch(
            Admission(FixedAdmission(kind="fixed", max_in_flight=limit), max_model_len_tokens=64)
        )
        self.offered, self.left, self.in_flight, self.version = {}, Counter(), {}, 0
        self.salts = {}
        self.now_s = 0.0

    @rule(purpose=st.sampled_from(["train", "evaluation"]), size=st.integers(1, 5))
    def offer(self, purpose, size):
        group = GroupRequest(purpose, len(self.offered), 0, 0, size)
        self.offered[group.key] = group
        self.dispatch.offer(group)

    @rule()
    def start(self):
        self.now_s += 1
        waiting_evaluations = sum(
            group.size
            - self.left[group.key]
            - sum(each.group == group for each in self.in_flight.values())
            for group in self.offered.values() if group.purpose == "evaluation"
        )  # fmt: skip
        requests = self.dispatch.start(self.version, self.now_s)
        for request in requests:
            assert request.name not in self.in_flight
            assert self.salts.setdefault(request.group.key, self.version) == request.version, (
                "members of one group have one salt"
            )
            self.in_flight[request.name] = request
        if any(request.group.purpose == "train" for request in requests):
            assert waiting_evaluations == sum(
                request.group.purpose == "evaluation" for request in requests
            ), "evaluation first"

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def leave(self, data):
        name = data.draw(st.sampled_from(sorted(self.in_flight)))
        assert self.dispatch.leave(name)
        assert not self.dispatch.leave(name), "a second end of the same request is void"
        self.left[self.in_flight.pop(name).group.key] += 1

    @rule()
    def new_version(self):
        self.version += 1

    @rule(age=st.integers(0, 3), everything=st.booleans())
    def drop(self, age, everything):
        oldest = self.version - age
        dropped = self.dispatch.drop_train() if everything else self.dispatch.drop_stale(oldest)
        for group in dropped:
            assert group.group.purpose == "train"
            assert everything or self.salts[group.group.key] < oldest
            for request in group.in_flight:
                assert self.in_flight.pop(request.name) == request
                assert not self.dispatch.leave(request.name), "it left with its group"
            self.left[group.group.key] += len(group.in_flight) + group.num_undispatched
            assert self.left[group.group.key] == group.group.size

    @rule(limit_s=st.integers(0, 20), is_served=st.booleans())
    def expire(self, limit_s, is_served):
        expired = self.dispatch.expired(self.now_s, limit_s, is_served)
        assert {request.name for request in expired} <= self.in_flight.keys()
        assert is_served or not expired

    @invariant()
    def permits_are_the_rollouts_in_flight(self):
        if hasattr(self, "dispatch"):
            assert (
                self.dispatch.admission.taken
                == len(self.in_flight)
                == self.dispatch.num_in_flight
                <= self.dispatch.admission.limit
            )
            assert all(self.left[key] <= group.size for key, group in self.offered.items())
            waiting = sum(
                group.size - self.left[group.key] for group in self.offered.values()
            ) - len(self.in_flight)
            assert self.dispatch.num_waiting == waiting, (
                "a request that has not left is waiting or in flight"
            )


TestDispatch = DispatchMachine.TestCase
TestDispatch.settings = QUICK


def content_of(queue):
    return [
        [(sample.group_id, sample.member, sample.token_id.tobytes()) for sample in group]
        for group in queue
    ]


class StateMachine(RuleBasedStateMachine):
    """Answers in any order, a trainer of any pace, updates at any time, kills at any checkpoint."""

    @initialize(
        bound=st.integers(0, 3), ahead=st.integers(0, 2), permits=st.integers(1, 12),
        per_batch=st.sampled_from([4, 8, 12]),
        ratio=st.sampled_from([1.0, 1.3, 3.0]),
    )  # fmt: skip
    def begin(self, bound, ahead, permits, per_batch, ratio):
        self.manifest = fakes.manifest(
            max_off_policy_steps=bound,
            max_batches_ahead=min(ahead, bound),  # a manifest has no more
            max_in_flight=permits,
            rollouts_per_batch=per_batch,
            max_sampled_ratio=ratio,
            num_steps=30,
            interval_steps=5,
        )
        self.bound, self.ratio = bound, ratio
        self.scheduler = Scheduler(self.manifest)
        # Request name -> request, engine version at its first token.
        self.in_flight, self.began_at = (
            {},
            {},
        )
        self.published, self.trained_rollouts = 0, []
        self.cut_step, self.now_s, self.num_begun = 0, 0.0, 0
        self.failures = Counter()
        self.snapshot, self.trained_at_snapshot = None, 0
        # By earlier attempts, and in all when the snapshot was taken.
        self.dropped_before, self.dropped_at_snapshot = (
            Counter(),
            Counter(),
        )

    @rule()
    def start(self):
        self.now_s += 1
        for request in self.scheduler.start(self.now_s):
            assert request.name not in self.in_flight
            assert request.version <= self.scheduler.clock.version
            self.in_flight[request.name] = request
            self.began_at[request.name] = self.scheduler.clock.version

    @precondition(lambda self: self.in_flight)
    @rule(
        seed=st.integers(0, 99),
        fate=st.sampled_from(["varied", "varied", "varied", "equal", "fail"]),
        num=st.integers(1, 12),
    )
    def end_some(self, seed, fate, num):
        names = sorted(self.in_flight)
        for name in random.Random(seed).sample(names, min(num, len(names))):
            request, first, last = (
                self.in_flight.pop(name),
                self.began_at.pop(name),
                self.scheduler.clock.version,
            )
            self.now_s += 1
            try:
                if fate == "fail":
                    self.failures[request.group.purpose] += 1
                    self.scheduler.ended(request, Failed("engine", "gone"), self.now_s)
                else:
                    versions = sorted({first, last})
                    # No mix of 0, 1 and 0.3 has one of them as its mean, so only equals give 0.
                    self.scheduler.ended(
                        request,
                        fakes.rollout(request, versions * 2, 0.3 if fate == "equal" else None),
                        self.now_s,
                    )
            except RunFailed as error:
                assert "engine" in str(error)  # starved, and says of what
                self.scheduler.buffer._barren.clear()

    @precondition(lambda self: self.published < self.cut_step)
    @rule()
    def trainer_publishes(self):
        self.published += 1

    @rule()
    def update(self):
        if not self.scheduler.may_update(self.published):
            assert (
                self.scheduler.evaluations.pinned is not None
                or self.published <= self.scheduler.clock.version
            )
            return
        self.scheduler.updating = True
        assert self.scheduler.start(self.now_s) == [], "nothing starts during an update"
        for request in self.scheduler.drain():
            assert self.in_flight.pop(request.name) == request and request.group.purpose == "train"
            assert request.version < self.scheduler.clock.oldest_useful
        self.scheduler.updated(self.published)
        self.scheduler.updating = False
        self.scheduler.begin_evaluation(self.now_s)

    @rule()
    def take_batch(self):
        self.scheduler.wanted = self.published + 1
        num_sampled = self.scheduler.buffer.num_sampled
        batch = self.scheduler.take_batch()
        if batch is None:
            return
        self.cut_step += 1
        assert batch.step == self.cut_step, "batch numbers rise by one"
        assert batch.step <= self.published + 1 + self.manifest.orchestrator.max_batches_ahead
        assert len(batch.rollouts) == self.scheduler.rollouts_per_batch, "a batch never shrinks"
        for sample in batch.rollouts:
            versions = sample.sampled_versions
            assert versions.min() >= batch.step - 1 - self.bound, "a token older than the bound"
            assert versions.max() <= batch.step - 1, (
                "a token of a version that this batch has yet to make"
            )
            assert (
                sample.advantage != 0
                or num_sampled >= self.ratio * self.scheduler.rollouts_per_batch
            ), "filled before it had to be"
            assert sample.dispatch_version <= versions.min()
        self.trained_rollouts.extend((sample.group_id, sample.member) for sample in batch.rollouts)
        assert len(set(self.trained_rollouts)) == len(self.trained_rollouts), (
            "a rollout was trained twice"
        )
        self._keep()

    def _keep(self):
        self.snapshot, self.trained_at_snapshot = (
            self.scheduler.snapshot(),
            len(self.trained_rollouts),
        )
        self.dropped_at_snapshot = self.dropped_before + Counter(self.scheduler.buffer.dropped)
        for group in self.scheduler.groups._groups.values():  # failures in open groups are redone
            self.dropped_at_snapshot["engine"] -= group.num_ended - len(group.survivors)

    @precondition(lambda self: self.snapshot is not None)
    @rule()
    def kill_and_resume(self):
        """Resume from the newest checkpoint; engines and trainer start from its version."""
        step = self.snapshot.next_batch - 1
        self.scheduler = Scheduler(self.manifest, self.snapshot)
        self.dropped_before = self.dropped_at_snapshot
        self.in_flight, self.began_at, self.failures = {}, {}, Counter()
        self.cut_step = self.published = step
        self.trained_rollouts = self.trained_rollouts[: self.trained_at_snapshot]

    @precondition(lambda self: self.cut_step)
    @rule()
    def wind_down_and_resume(self):
        """Resume from the state at any moment, once the trainer trained every sent batch."""
        before, num_trained = self.scheduler, len(self.trained_rollouts)
        self._keep()
        self.kill_and_resume()
        assert content_of(self.scheduler.buffer.queue) == content_of(before.buffer.queue)
        assert (
            content_of(self.scheduler.buffer.spare) == content_of(before.buffer.spare)
            and self.scheduler.buffer.num_sampled == before.buffer.num_sampled
        )
        assert self.scheduler.tally.rewards == before.tally.rewards
        assert (
            len(self.trained_rollouts) == num_trained
            and self.scheduler.clock.next_batch == before.clock.next_batch
        )

    @precondition(lambda self: self.scheduler.clock.version >= 0)
    @rule()
    def nothing_is_lost(self):
        """Each rollout behind the cursors is trained, counted as dropped, kept, or in flight."""
        scheduler = self.scheduler
        passed = sum(scheduler.source.cursors) * scheduler.source.group_size
        waiting = sum(group.size for group in scheduler.snapshot().in_flight)
        gone = Counter(scheduler.buffer.dropped) + self.dropped_before
        # Already counted, and their group waits.
        failed_in_open_groups = sum(
            group.num_ended - len(group.survivors) for group in scheduler.groups._groups.values()
        )
        trained, num_spare = (
            len(self.trained_rollouts),
            sum(len(group) for group in scheduler.buffer.spare),
        )
        assert (
            passed
            == trained
            + scheduler.buffer.num_queued
            + num_spare
            + waiting
            + sum(gone.values())
            - failed_in_open_groups
        )

    @invariant()
    def permits_and_limits_hold(self):
        if not hasattr(self, "state"):
            return
        scheduler = self.scheduler
        assert (
            0
            <= scheduler.dispatch.admission.taken
            == len(self.in_flight)
            <= scheduler.dispatch.admission.limit
        )
        if scheduler.evaluations.pinned is not None:
            assert scheduler.clock.version == scheduler.evaluations.pinned, (
                "an evaluation's version stays"
            )
        in_open_groups = sum(group.size for group in scheduler.dispatch.open_train_groups())
        assert scheduler._open_train_rollouts == in_open_groups
        # Nothing is generated that could not be trained any more when it was begun.
        assert (
            in_open_groups + scheduler.buffer.num_queued
            < (self.bound + 1) * scheduler.rollouts_per_batch + 4
        )
        assert sum(len(group) for group in scheduler.buffer.spare) < scheduler.buffer.max_spare + 4


TestState = StateMachine.TestCase
TestState.settings = QUICK


@given(seed=st.integers(0, 2**32), bound=st.integers(0, 3), ahead=st.integers(0, 2))
@settings(max_examples=30, deadline=None)
def test_long_runs_in_any_order_keep_every_promise(seed, bound, ahead):
    """Run hundreds of events, further than a search gets: queues fill, go stale and are resumed."""
    rng, machine = random.Random(seed), StateMachine()
    machine.begin(
        bound=bound,
        ahead=ahead,
        permits=rng.randint(4, 24),
        per_batch=rng.choice([4, 8, 12]),
        ratio=rng.choice([1.0, 1.3, 3.0]),
    )
    for _ in range(400):
        what = rng.choices(
            ["start", "end", "publish", "update", "cut", "kill", "wind_down"],
            [8, 8, 3, 3, 3, 0.2, 0.2],
        )[0]
        if what == "start":
            machine.start()
        elif what == "end" and machine.in_flight:
            machine.end_some(
                seed=rng.randint(0, 99),
                fate=rng.choice(["varied", "varied", "equal", "fail"]),
                num=rng.randint(1, 8),
            )
        elif what == "publish" and machine.published < machine.cut_step:
            machine.trainer_publishes()
        elif what == "update":
            machine.update()
        elif what == "cut":
            machine.take_batch()
        elif what == "kill" and machine.snapshot is not None:
            machine.kill_and_resume()
        elif what == "wind_down" and machine.cut_step:
            machine.wind_down_and_resume()
        machine.permits_and_limits_hold()
    machine.nothing_is_lost()


def play(scheduler, engine_order, until_step, published=0, train=True, crash=None):
    """Run deterministically: `engine_order` orders the ends, and the trainer trains at once."""
    batches, in_flight = [], []
    scheduler.updated(published)
    for tick in range(10_000):
        scheduler.begin_evaluation(float(tick))
        in_flight += scheduler.start(float(tick))
        if in_flight:
            request = in_flight.pop(engine_order(tick, len(in_flight)))
            scheduler.ended(
                request, fakes.rollout(request, [scheduler.clock.version] * 3), float(tick)
            )
        scheduler.wanted = published + 1
        batch = scheduler.take_batch()
        if batch is not None:
            batches.append(batch)
            if crash is not None and batch.step == crash:
                return batches
            published = batch.step
        if scheduler.may_update(published):
            for request in scheduler.drain():
                in_flight.remove(request)
            scheduler.updated(published)
        if len(batches) and batches[-1].step == until_step:
            return batches
    raise AssertionError(f"stopped at batch {len(batches)}")


def content(batches):
    return [
        [
            (s.group_id, s.member, s.task_index, s.advantage, s.token_id.tobytes())
            for s in batch.rollouts
        ]
        for batch in batches
    ]


@given(st.integers(1, 7), st.integers(1, 24))
@settings(max_examples=25, deadline=None)
def test_a_run_that_is_killed_and_resumed_trains_what_it_would_have_trained(crash, permits):
    """With answers in order and the same tokens per problem, a resumed run is the same run."""
    manifest = fakes.manifest(
        max_in_flight=permits,
        num_steps=9,
        max_batches_ahead=0,
        max_off_policy_steps=20,
        weights=(1.0, 2.0),
    )
    in_order = lambda tick, n: 0  # noqa: E731
    whole = content(play(Scheduler(manifest), in_order, 9))
    scheduler = Scheduler(manifest)
    before = play(scheduler, in_order, 9, crash=crash)
    after = play(Scheduler(manifest, scheduler.snapshot()), in_order, 9, published=crash)
    assert content(before) + content(after) == whole


@given(st.integers(1, 7), st.integers(1, 24), st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_a_resumed_run_loses_no_problem_and_trains_none_twice_whatever_the_order(
    crash, permits, seed
):
    manifest = fakes.manifest(max_in_flight=permits, num_steps=9, max_off_policy_steps=20)
    rng = np.random.default_rng(seed)
    any_order = lambda tick, n: int(rng.integers(n))  # noqa: E731
    scheduler = Scheduler(manifest)
    batches = play(scheduler, any_order, 9, crash=crash)
    resumed = Scheduler(manifest, scheduler.snapshot())
    batches += play(resumed, any_order, 9, published=crash)
    trained = [(s.group_id, s.member) for batch in batches for s in batch.rollouts]
    assert len(trained) == len(set(trained)) == 9 * 8
    kept = {group.group_id for group in resumed.snapshot().in_flight} | {
        s.group_id for g in resumed.buffer.queue for s in g
    }
    assert {group for group, _ in trained} | kept == set(range(sum(resumed.source.cursors)))


def test_the_same_events_make_the_same_run():
    manifest = fakes.manifest(num_steps=9, weights=(1.0, 2.0))
    runs = []
    for _ in range(2):
        rng = np.random.default_rng(3)
        runs.append(content(play(Scheduler(manifest), lambda tick, n: int(rng.integers(n)), 9)))  # noqa: B023
    assert runs[0] == runs[1]


def test_a_dropped_group_releases_its_permits_and_its_finished_members_are_counted():
    manifest = fakes.manifest(
        max_off_policy_steps=0, max_batches_ahead=0, max_in_flight=8, interval_steps=100
    )
    scheduler = Scheduler(manifest)
    scheduler.evaluations.last = 0
    scheduler.updated(0)
    requests = scheduler.start(0.0)
    scheduler.ended(requests[0], fakes.rollout(requests[0], [0]), 1.0)
    scheduler.clock.next_batch = 2
    cancelled = scheduler.drain()
    assert {request.name for request in cancelled} == {request.name for request in requests[1:]}
    assert scheduler.dispatch.admission.taken == 0 and scheduler.buffer.dropped == {
        "stale_in_flight": 8
    }
    assert scheduler.ended(requests[1], fakes.rollout(requests[1], [0]), 2.0) is None, (
        "what comes back late is void"
    )
    assert scheduler.buffer.num_queued == 0 and scheduler.groups.num_rollouts == 0


def test_on_policy_training_waits_for_every_version():
    """With bound 0 and no batch ahead, batch n holds version n − 1 only, and generation pauses."""
    manifest = fakes.manifest(
        max_off_policy_steps=0,
        max_batches_ahead=0,
        max_in_flight=64,
        interval_steps=100,
        num_steps=4,
    )
    scheduler = Scheduler(manifest)
    scheduler.evaluations.last = 0
    scheduler.updated(0)
    requests = scheduler.start(0.0)
    assert len(requests) == 8
    for request in requests:
        scheduler.ended(request, fakes.rollout(request, [0]), 1.0)
    scheduler.wanted = 1
    assert scheduler.take_batch().step == 1
    assert scheduler.start(2.0) == []
    scheduler.updated(1)
    assert {request.version for request in scheduler.start(3.0)} == {1}


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_slow_trainer_finds_its_next_batches_ready_and_no_more_is_made(ahead):
    """The trainer works on batch 1; the bound would let 9 batches be made of version 0."""
    manifest = fakes.manifest(
        max_off_policy_steps=8,
        max_batches_ahead=ahead,
        max_in_flight=999,
        interval_steps=100,
        num_steps=20,
    )
    scheduler = Scheduler(manifest)
    scheduler.evaluations.last = 0
    scheduler.updated(0)
    scheduler.wanted = 1
    num_made = 0
    for tick in range(20):
        for request in scheduler.start(float(tick)):
            scheduler.ended(request, fakes.rollout(request, [0]), float(tick))
            num_made += 1
        scheduler.take_batch()
    assert scheduler.clock.next_batch == 2 + ahead and num_made == 8 * (1 + ahead + 1)
    assert scheduler.buffer.num_queued == 8


def test_a_stuck_member_does_not_block_its_group():
    scheduler = Scheduler(fakes.manifest(max_in_flight=4))
    scheduler.evaluations.last = 0
    scheduler.updated(0)
    stuck, *others = scheduler.start(0.0)
    for request in others:
        scheduler.ended(request, fakes.rollout(request, [0]), 1.0)
    assert scheduler.expired(29.0) == [] and scheduler.expired(31.0) == [stuck]
    scheduler.ended(stuck, Failed("timeout", "too long"), 31.0)
    assert scheduler.buffer.num_queued == 3 and scheduler.buffer.dropped == {"timeout": 1}


def test_time_in_which_nobody_serves_is_no_rollouts_own():
    scheduler = Scheduler(fakes.manifest(max_in_flight=4))  # rollouts may take 30 s
    scheduler.evaluations.last = 0
    scheduler.updated(0)
    started = scheduler.start(0.0)
    assert (
        scheduler.expired(20.0, is_served=False) == scheduler.expired(500.0, is_served=False) == []
    )
    assert scheduler.expired(520.0) == [], "500 of these seconds are not theirs"
    scheduler.updating = True
    assert scheduler.expired(522.0) == []
    scheduler.updating = False
    assert scheduler.expired(530.0) == scheduler.expired(537.0) == [], (
        "nor is what an update took: 29 seconds are theirs"
    )
    assert scheduler.expired(539.0) == started


@pytest.mark.parametrize(
    ("ratio", "ahead", "permits"), [(1.0, 0, 4), (3.0, 1, 8), (3.0, 2, 64), (2.5, 1, 24)]
)
def test_a_task_that_is_learned_samples_no_more_than_the_ratio_for_each_batch(
    ratio, ahead, permits
):
    """All rewards are equal. With a batch every 40 rollouts, generation must not run ahead."""
    manifest = fakes.manifest(
        max_sampled_ratio=ratio,
        max_batches_ahead=ahead,
        max_off_policy_steps=2,
        max_in_flight=permits,
        num_steps=12,
        interval_steps=100,
    )
    scheduler = Scheduler(manifest)
    scheduler.evaluations.last, scheduler.clock.version = 0, 0
    num_sampled, num_cut, published, cuts = 0, 0, 0, []
    in_flight = []
    for tick in range(2000):
        in_flight += scheduler.start(float(tick))
        if in_flight:
            request = in_flight.pop(0)
            scheduler.ended(
                request, fakes.rollout(request, [scheduler.clock.version], 1.0), float(tick)
            )
            num_sampled += 1
        scheduler.wanted = published + 1
        if batch := scheduler.take_batch():
            assert len(batch.rollouts) == 8 and not any(
                sample.advantage for sample in batch.rollouts
            )
            num_cut += 1
            cuts.append(num_sampled)
        if tick % 40 == 39 and published < num_cut:
            published += 1
            for request in scheduler.drain():
                in_flight.remove(request)
            scheduler.updated(published)
        if num_cut == 12:
            break
    assert num_cut == 12, "the run goes on without any signal"
    # The two batches beyond the wanted one may be sampled completely.
    assert all(
        sampled <= 8 * ratio * (number + ahead + 1) + 4 for number, sampled in enumerate(cuts, 1)
    )
    assert num_sampled <= 8 * ratio * 12 + 4 and scheduler.buffer.dropped["too_few_survivors"] == 0


def test_a_sink_without_groups_is_not_starved():
    RolloutBuffer(fakes.manifest().orchestrator).check_not_starved()


def test_groups_to_redo_that_have_not_begun_again_are_in_the_next_snapshot_too():
    manifest = fakes.manifest(max_in_flight=4)
    again = [GroupRequest("train", number, 0, number, 4) for number in range(3)]
    scheduler = Scheduler(
        manifest,
        Snapshot(
            2,
            [3],
            again,
            [],
            [],
            0,
            evaluated=1,
            num_evaluation_groups=0,
            digests={},
            num_batches=6,
            rewards=[],
        ),
    )
    scheduler.updated(1)
    assert {request.group.group_id for request in scheduler.start(0.0)} == {0}
    assert sorted(group.group_id for group in scheduler.snapshot().in_flight) == [0, 1, 2]
