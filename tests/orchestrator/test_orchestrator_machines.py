"""The small machines: clock, algorithms, source, buffer, evaluation, snapshots, samples."""

import json
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from pathlib import Path

import numpy as np
import orchestrator_fakes as fakes
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replaced import replaced

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.manifest.identity import load
from orrery.manifest.schema import Grpo, MaxRl
from orrery.orchestrator import assemble, batching, snapshot
from orrery.orchestrator.dispatch import (
    PIECE_S,
    PROOF_S,
    EngineActivity,
    GroupRequest,
    Request,
    Source,
    TimeoutClassifier,
)
from orrery.orchestrator.evaluate import summary
from orrery.orchestrator.groups import ALGORITHMS, BARREN_BATCHES, Group, RolloutBuffer, advantages
from orrery.orchestrator.rollout import Failed
from orrery.orchestrator.scheduler import Clock, Evaluations, Snapshot, describe_counts
from orrery.tasks.task import Message, ToolCall
from orrery.wire import checkpoints
from orrery.wire.routed_experts import RouteShape, without_routes

GRPO = Grpo(kind="grpo", group_size=4, normalize_std=False)


# Clock


@given(st.integers(0, 9), st.integers(1, 40), st.integers(0, 40), st.integers(1, 30))
def test_batches_open_to_a_version_are_those_that_the_formula_admits(
    bound, next_batch, version, num_batches
):
    clock = Clock(bound, num_batches, next_batch, version)
    admitted = [n for n in range(next_batch, num_batches + 1) if version >= n - 1 - bound]
    assert clock.batches_open_to(version) == len(admitted)


# Algorithms


@pytest.mark.parametrize("kind", ALGORITHMS)
@given(rewards=st.lists(st.floats(0, 1, width=32), min_size=2, max_size=16))
def test_advantages_of_a_group_sum_to_zero_and_equal_rewards_give_exactly_none(kind, rewards):
    algorithm = MaxRl(kind="max_rl", group_size=4) if kind == "max_rl" else GRPO
    gained = advantages(np.array(rewards, np.float32), algorithm)
    assert gained.dtype == np.float32 and np.isfinite(gained).all()
    assert abs(float(gained.astype(np.float64).sum())) <= 1e-5 * max(
        1.0, float(np.abs(gained).sum())
    )
    if len(set(rewards)) == 1:
        assert not gained.any()


def test_grpo_subtracts_the_mean_and_divides_only_when_asked():
    rewards = np.array([0.0, 0.0, 1.0, 1.0], np.float32)
    np.testing.assert_array_equal(advantages(rewards, GRPO), np.float32([-0.5, -0.5, 0.5, 0.5]))
    np.testing.assert_allclose(
        advantages(rewards, GRPO.model_copy(update={"normalize_std": True})), [-1, -1, 1, 1]
    )


def test_max_rl_divides_by_the_mean_and_is_silent_without_a_success():
    max_rl = MaxRl(kind="max_rl", group_size=4)
    np.testing.assert_allclose(
        advantages(np.array([0, 0, 0, 1], np.float32), max_rl), [-1, -1, -1, 3]
    )
    assert not advantages(np.zeros(4, np.float32), max_rl).any()


# Source


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 60), st.integers(0, 60))
def test_every_stretch_of_groups_holds_the_asked_for_mixture_and_a_restored_source_goes_on(
    weights, length, split
):
    tasks = fakes.manifest(weights=tuple(float(weight) for weight in weights)).tasks.train
    source = Source(tasks, 4)
    groups = []
    for index in range(length):
        if index == split:
            source = Source(tasks, 4, cursors=source.cursors)
        groups.append(source.next())
    assert [group.group_id for group in groups] == list(range(length))
    for task in range(len(weights)):
        indices = [group.problem_index for group in groups if group.task_index == task]
        assert indices == list(range(len(indices))), "a cursor skipped or repeated a problem"
        assert abs(len(indices) - Fraction(weights[task], sum(weights)) * length) < len(weights)


def test_groups_to_redo_come_first_under_their_old_numbers():
    tasks = fakes.manifest().tasks.train
    source = Source(
        tasks,
        4,
        cursors=[7],
        unfinished=[GroupRequest("train", 5, 0, 5, 4), GroupRequest("train", 2, 0, 2, 4)],
    )
    assert [source.next().group_id for _ in range(4)] == [2, 5, 7, 8]


def test_sites_draw_other_problems_and_draw_them_again_when_they_return(tmp_path):
    run = fakes.manifest()
    elastic = load(Path(__file__).parents[2] / "manifests/elastic_text.json").trainer.elastic
    run = replaced(run, "trainer", elastic=elastic)

    def drawn(name: str) -> set[int]:
        place = {"listen": "", "join": "", "certificates": "", "name": name}
        (tmp_path / "site.json").write_text(json.dumps(place))
        source = assemble.scheduler(fakes.FakeContext(tmp_path, run)).source
        return {source.next().problem_index for _ in range(100)}

    assert not drawn("oslo") & drawn("lima") and drawn("oslo") == drawn("oslo")


# Sink


def whole(group_id, rewards, version=0):
    request = GroupRequest("train", group_id, 0, group_id, 4)
    survivors = [
        fakes.rollout(Request(request, member, version), [version] * 3, reward)
        for member, reward in rewards.items()
    ]
    return Group(request, survivors)


def sink_of(per_batch, **orchestrator):
    orchestrator.setdefault("drop_zero_advantage_groups", True)
    settings = fakes.manifest(**orchestrator).orchestrator
    # Any number, to split groups.
    return RolloutBuffer(
        settings.model_copy(update={"algorithm": GRPO, "rollouts_per_batch": per_batch})
    )


MIXED, EQUAL = {0: 0, 1: 1, 2: 0, 3: 1}, {0: 1, 1: 1, 2: 1, 3: 1}


def test_groups_without_signal_wait_aside_until_the_ratio_of_the_batch_has_been_sampled():
    buffer = sink_of(8, max_sampled_ratio=2.0)
    buffer.add(whole(0, MIXED))
    for group in (1, 2):
        assert not buffer.add(whole(group, EQUAL)) and buffer.take_batch(0) is None, (
            "12 rollouts are fewer than 2 · 8"
        )
    assert not buffer.add(whole(3, EQUAL))
    batch = buffer.take_batch(0)
    assert [(sample.group_id, sample.advantage != 0) for sample in batch] == [(0, True)] * 4 + [
        (1, False)
    ] * 4
    assert buffer.num_sampled == 0 and buffer.take_batch(0) is None, (
        "the next batch has a budget of its own"
    )
    assert {sample.group_id for group in buffer.spare for sample in group} == {
        2,
        3,
    } and not buffer.dropped


def test_a_batch_is_of_signal_alone_where_that_comes_before_the_ratio():
    buffer = sink_of(8, max_sampled_ratio=2.0)
    for group, rewards in enumerate((EQUAL, MIXED, MIXED)):
        buffer.add(whole(group, rewards))
    assert all(sample.advantage for sample in buffer.take_batch(0))


def test_a_batch_without_any_signal_is_cut_too():
    buffer = sink_of(8, max_sampled_ratio=1.0)
    for group in range(2):
        buffer.add(whole(group, EQUAL))
    assert [sample.advantage for sample in buffer.take_batch(0)] == [0.0] * 8


def test_groups_without_signal_are_bounded_and_the_oldest_leave_first():
    buffer = sink_of(4, max_sampled_ratio=100.0, max_batches_ahead=1)
    for group in range(9):
        buffer.add(whole(group, EQUAL))
    assert [group[0].group_id for group in buffer.spare] == [6, 7, 8] and buffer.dropped == {
        "zero_advantage": 24
    }


def test_groups_without_signal_obey_the_staleness_bound_and_their_loss_makes_room_for_others():
    buffer = sink_of(8, max_sampled_ratio=1.0)
    buffer.add(whole(0, EQUAL, version=1))
    buffer.add(whole(1, EQUAL, version=2))
    assert buffer.room(1) == 0
    assert buffer.take_batch(2) is None and buffer.dropped == {"zero_advantage": 4}
    assert buffer.room(1) == 4, "no batch would ever be whole"
    buffer.add(whole(2, MIXED, version=2))
    assert [sample.group_id for sample in buffer.take_batch(2)] == [2] * 4 + [1] * 4


def test_zero_advantage_groups_train_where_the_manifest_keeps_them():
    buffer = sink_of(4, drop_zero_advantage_groups=False)
    assert not buffer.add(whole(1, EQUAL)) and len(buffer.take_batch(0)) == 4


def test_a_group_trains_on_two_survivors_and_not_on_one():
    buffer = sink_of(2)
    assert not buffer.add(whole(0, {2: 1}))
    assert buffer.dropped == {"too_few_survivors": 1}
    assert buffer.add(whole(1, {0: 0, 3: 1}))
    assert [sample.advantage for sample in buffer.take_batch(0)] == [-0.5, 0.5]


def test_timeouts_that_are_zeros_belong_to_the_baseline_and_are_not_trained():
    buffer = sink_of(2)
    assert not buffer.add(replace(whole(0, {}), num_zeros=4)) and not buffer.add(
        replace(whole(1, {2: 1}), num_zeros=0)
    )
    assert buffer.add(replace(whole(2, {0: 1, 3: 1}), num_zeros=2)), (
        "equal rewards, but for the timeouts"
    )
    assert [sample.advantage for sample in buffer.take_batch(0)] == [0.5, 0.5]
    assert buffer.add(replace(whole(3, {1: 1}), num_zeros=1)), (
        "one survivor and a zero are two rewards"
    )
    assert not buffer.add(replace(whole(4, {0: 0, 1: 0}), num_zeros=2)), "all are 0"


def test_the_row_of_an_evaluation_says_how_many_of_its_rewards_are_timeouts():
    machine = evaluations()
    first, second = machine.begin(0, 1.0)
    for group in (first, second):
        for member in range(2):
            request = Request(group, member, 0)
            failed = Failed("timeout", "slow", is_zero=True)
            outcome = failed if group is first else fakes.rollout(request, [0], 1.0)
            result = machine.add(request, outcome, 5.0)
    (row,) = result.rows
    assert (row["reward_mean"], row["num_rollouts"], row["num_failed"], row["num_timeouts"]) == (
        0.5,
        4,
        0,
        2,
    )
    assert describe_counts(row) == "4 rollouts, 2 of them timed out"


def loads_of(*tokens, running=1):
    return {index: fakes.load(running, tokens=number) for index, number in enumerate(tokens)}


def test_a_rollout_is_timed_out_once_every_engine_that_has_requests_makes_tokens():
    machine, slow = TimeoutClassifier(9.0), Request(GroupRequest("train", 0, 0, 0, 4), 0, 0)
    machine.observe(loads_of(1, 1))
    assert machine.reasons([slow], lambda _: True, 10.0) == [], (
        "whether engines live is not known yet"
    )
    machine.observe(loads_of(5, 5))
    machine.observe({})
    machine.observe(loads_of(6, 5))
    assert machine.reasons([slow], lambda _: True, 11.0) == [], "the second engine may be the one"
    machine.observe(loads_of(6, 5) | {1: fakes.load(0, tokens=5)})
    ((request, reason, sentence),) = machine.reasons([slow], lambda _: True, 12.0)
    assert (request, reason) == (slow, "timeout") and "rollout_timeout_s = 9 s" in sentence


def test_engines_that_make_no_tokens_or_lost_the_request_are_no_timeout():
    slow = Request(GroupRequest("train", 0, 0, 0, 4), 0, 0)
    for running in (1, 0):
        machine = TimeoutClassifier(9.0)
        for now_s in (10.0, 11.0, 10.0 + PROOF_S):
            assert machine.reasons([slow], lambda _: True, now_s) == []
            machine.observe(loads_of(7, running=running))
        assert [
            reason for _, reason, _ in machine.reasons([slow], lambda _: True, 11.0 + PROOF_S)
        ] == ["engine_still"]


def test_what_an_update_interrupts_is_looked_at_anew():
    machine, slow = TimeoutClassifier(9.0), Request(GroupRequest("train", 0, 0, 0, 4), 0, 0)
    machine.reasons([slow], lambda _: True, 10.0)
    machine.observe(loads_of(1))
    assert machine.reasons([], lambda _: True, 11.0) == [], "it is not expired during an update"
    machine.observe(loads_of(2))
    assert machine.reasons([slow], lambda _: True, 12.0) == []
    assert [reason for _, reason, _ in machine.reasons([slow], lambda _: False, 13.0)] == [
        "no_answer"
    ]


def test_what_does_not_fit_leads_the_next_batch():
    buffer = sink_of(5)
    for group in range(3):
        buffer.add(whole(group, {0: 0, 1: 1, 2: 0, 3: 1}))
    names = [
        [(sample.group_id, sample.member) for sample in buffer.take_batch(0)] for _ in range(2)
    ]
    assert names[0] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]
    assert names[1] == [(1, 1), (1, 2), (1, 3), (2, 0), (2, 1)]


def test_the_sweep_at_the_cut_drops_whole_groups_and_counts_them():
    buffer = sink_of(4)
    buffer.add(whole(0, {0: 0, 1: 1, 2: 0, 3: 1}, version=1))
    buffer.add(whole(1, {0: 0, 1: 1, 2: 0, 3: 1}, version=2))
    assert {sample.group_id for sample in buffer.take_batch(2)} == {1}
    assert buffer.dropped == {"stale_in_queue": 4}


def test_any_number_of_rollouts_lost_with_engines_is_no_starvation():
    buffer = sink_of(8)
    buffer.count("engine_gone", 100 * BARREN_BATCHES)
    buffer.check_not_starved()
    assert buffer.dropped["engine_gone"] == 100 * BARREN_BATCHES


def test_starvation_names_reasons_and_counts_and_one_group_that_may_train_ends_it():
    buffer = sink_of(4)
    for group in range(BARREN_BATCHES - 1):
        buffer.count("judge", 3, "the judge is gone")
        buffer.add(whole(group, {0: 1}))
        buffer.check_not_starved()
    buffer.add(whole(90, EQUAL))
    for group in range(BARREN_BATCHES):
        buffer.check_not_starved()
        buffer.count("timeout", 3)
        buffer.add(whole(100 + group, {0: 1}))
    with pytest.raises(RunFailed, match=r"timeout 30, too_few_survivors 10.*rollout_timeout_s"):
        buffer.check_not_starved()


# Evaluation


def evaluations(last_step=10, interval=4):
    return Evaluations(
        fakes.manifest().tasks.evaluation,
        interval,
        num_problems=2,
        rollouts_per_problem=2,
        last_step=last_step,
    )


def finish(machine, groups, version, rewards):
    result = None
    for group, reward in zip(groups, rewards, strict=True):
        for member in range(group.size):
            request = Request(group, member, version)
            outcome = Failed("engine", "gone")
            if reward is not None:
                outcome = fakes.rollout(request, [version], reward)
            result = machine.add(request, outcome, 5.0)
    return result


def test_evaluations_are_due_at_the_first_version_at_every_interval_and_at_the_last():
    machine, evaluated = evaluations(), []
    for version in range(11):
        if machine.due(version):
            evaluated.append(version)
            finish(machine, machine.begin(version, 0.0), version, [1.0, 0.0])
        assert not machine.due(version)
    assert evaluated == [0, 4, 8, 10]


def test_an_interval_that_updates_skipped_over_is_evaluated_at_the_next_version():
    machine = evaluations()
    finish(machine, machine.begin(0, 0.0), 0, [1.0, 0.0])
    assert not machine.due(3) and machine.due(5)


def test_failed_evaluation_rollouts_are_left_out_of_the_mean_and_counted_by_reason():
    machine = evaluations()
    result = finish(machine, machine.begin(0, 1.0), 0, [1.0, None])
    assert result.rows == [
        {"version": 0, "task": "held_out", "reward_mean": 1.0, "num_rollouts": 2, "num_failed": 2,
        "failures": {"engine": 2},
         "num_timeouts": 0, "start_s": 1.0, "end_s": 5.0}
    ]  # fmt: skip
    assert describe_counts(result.rows[0]) == "2 rollouts, 2 failed: 2 engine"


def test_a_task_whose_rollouts_fail_keeps_its_weight_in_the_reward_of_a_policy():
    (task,) = fakes.manifest().tasks.evaluation
    machine = Evaluations(
        [task, task.model_copy(update={"name": "hard"})],
        4,
        num_problems=2,
        rollouts_per_problem=2,
        last_step=10,
    )
    groups = machine.begin(0, 1.0)
    assert [group.task_index for group in groups] == [0, 1, 0, 1]
    result = finish(machine, groups, 0, [1.0, 0.0, 1.0, None])
    content = summary({"after": result})
    assert content["after"] == {
        "reward_mean": 0.5,
        "num_rollouts": 6,
        "num_failed": 2,
        "failures": {"engine": 2},
        "num_timeouts": 0,
    }
    none = {"num_failed": 0, "failures": {}, "num_timeouts": 0}
    assert content["tasks"]["held_out"]["after"] == {"reward_mean": 1.0, "num_rollouts": 4} | none
    assert content["tasks"]["hard"]["after"] == {"reward_mean": 0.0, "num_rollouts": 2} | none | {
        "num_failed": 2,
        "failures": {"engine": 2},
    }
    assert describe_counts(result.rows[0]) == "4 rollouts"


def test_an_evaluation_of_which_nothing_is_left_is_an_error_not_a_reward_of_zero():
    machine = evaluations()
    with pytest.raises(RunFailed, match=r"held_out.*engine"):
        finish(machine, machine.begin(0, 1.0), 0, [None, None])


def test_an_evaluation_rollout_of_two_versions_ends_the_run():
    machine = evaluations()
    group = machine.begin(3, 0.0)[0]
    request = Request(group, 0, 3)
    with pytest.raises(RunFailed, match="versions 3 to 4"):
        machine.add(request, fakes.rollout(request, [3, 4], 1.0), 1.0)


def test_held_out_problems_are_the_same_each_time_and_groups_have_new_numbers():
    machine = evaluations()
    first = machine.begin(0, 0.0)
    finish(machine, first, 0, [1.0, 1.0])
    second = machine.begin(4, 0.0)
    assert [group.problem_index for group in first] == [group.problem_index for group in second]
    assert not {group.key for group in first} & {group.key for group in second}


# Snapshot files


def example_snapshot():
    request = GroupRequest("train", 3, 0, 3, 4)
    rollouts = [fakes.rollout(Request(request, m, 1), [1, 1, 2], m % 2) for m in range(4)]
    rollouts = [
        replace(each, truncated=m == 1, metrics={"exact": m / 4, f"only{m}": 1.0})
        for m, each in enumerate(rollouts)
    ]
    group = [replace(each, advantage=(m % 2) - 0.3333) for m, each in enumerate(rollouts)]
    return Snapshot(
        5,
        [9],
        [GroupRequest("train", 8, 0, 8, 4)],
        [group, group[:2]],
        [[replace(each, advantage=0.0, group_id=4) for each in group[1:]]],
        num_sampled=17,
        num_batches=30,
        evaluated=4,
        num_evaluation_groups=6,
        digests={1: "aa", 2: "bb"},
        rewards=[(0, 0.5, True), (1, 1.0, False)],
    )


def test_a_snapshot_reads_back_as_it_was_written(tmp_path):
    kept = example_snapshot()
    snapshot.write(tmp_path, 4, 1, kept, 1.0)
    snapshot.write(tmp_path, 4, 1, kept, 1.0)  # replaces what is there
    back = snapshot.read(checkpoints.checkpoint_dir(tmp_path, 4, 1), 4)
    assert (
        back.next_batch,
        back.cursors,
        back.in_flight,
        back.evaluated,
        back.num_evaluation_groups,
    ) == (5, [9], kept.in_flight, 4, 6)
    assert [len(group) for group in back.queue] == [4, 2] and back.digests == {1: "aa", 2: "bb"}
    assert (
        back.rewards == kept.rewards
        and (back.num_sampled, back.num_batches) == (17, 30)
        and [len(group) for group in back.spare] == [3]
    )
    for old, new in zip(
        chain(*kept.queue, *kept.spare), chain(*back.queue, *back.spare), strict=True
    ):
        assert (old.advantage, old.group_id, old.member, old.task_index, old.dispatch_version) == (
            new.advantage, new.group_id, new.member, new.task_index,
            new.dispatch_version)  # fmt: skip
        for name in ("token_id", "logprob", "trained", "version"):
            np.testing.assert_array_equal(getattr(old, name), getattr(new, name))
        for name in ("messages", "reward", "truncated", "metrics"):
            assert getattr(old, name) == getattr(new, name), name
    assert sorted(path.name for path in snapshot.folder(tmp_path, 4, 1).parent.iterdir()) == [
        "orchestrator"
    ]


def test_a_snapshot_keeps_routes_and_those_that_no_engine_told(tmp_path):
    kept, shape = example_snapshot(), RouteShape(3, 2, 300)
    said = [
        np.arange(6 * each.num_tokens, dtype=np.uint16).reshape(-1, 3, 2) for each in kept.queue[0]
    ]
    said[1] = without_routes(len(said[1]), shape)
    queue = [
        [replace(each, routed_experts=of) for each, of in zip(kept.queue[0], said, strict=True)]
    ]
    snapshot.write(tmp_path, 4, 1, replace(kept, queue=queue, spare=[]), 1.0)
    for new, routes in zip(
        snapshot.read(checkpoints.checkpoint_dir(tmp_path, 4, 1), 4).queue[0], said, strict=True
    ):
        assert new.routed_experts.dtype == np.uint16
        np.testing.assert_array_equal(new.routed_experts, routes)
        np.testing.assert_array_equal(batching.document(new, 1.0).token["routed_experts"], routes)


def test_an_empty_queue_is_a_snapshot_too(tmp_path):
    snapshot.write(tmp_path, 2, 1, Snapshot(3, [1], [], [], [], 0, -1, 0, {}, 9, []), 1.0)
    assert snapshot.read(checkpoints.checkpoint_dir(tmp_path, 2, 1), 2).queue == []


@pytest.mark.parametrize("file", ["state.json", "queue.safetensors"])
def test_a_damaged_snapshot_is_one_sentence(tmp_path, file):
    path = snapshot.write(tmp_path, 4, 1, example_snapshot(), 1.0) / file
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(OrreryError, match="step_4"):
        snapshot.read(checkpoints.checkpoint_dir(tmp_path, 4, 1), 4)


# Metrics and messages


def test_activity_is_spans_while_requests_are_in_flight_in_pieces():
    spans = []
    activity = EngineActivity(lambda name, start, end, engine: spans.append((engine, start, end)))
    for now, count in (
        (0.0, 0),
        (1.0, 2),
        (2.0, 1),
        (3.0, 0),
        (4.0, 1),
        (4.0 + PIECE_S, 1),
        (10.0, 0),
    ):
        activity.observe(0, count, now)
    activity.close(11.0)
    assert spans == [(0, 1.0, 3.0), (0, 4.0, 4.0 + PIECE_S), (0, 4.0 + PIECE_S, 10.0)]


def test_a_line_after_a_torn_one_is_whole(tmp_path):
    path = tmp_path / "rollouts" / "samples.jsonl"
    rollout = fakes.rollout(Request(GroupRequest("train", 0, 0, 0, 4), 0, 0), [0], 1.0)
    batching.append_samples(path, [batching.sample(rollout, step=1)])
    with path.open("ab") as file:
        file.write(b'{"step": 2, "mess')
    batching.append_samples(path, [batching.sample(rollout, step=3)])
    lines = path.read_text().splitlines()
    assert json.loads(lines[0])["step"] == 1 and json.loads(lines[2])["step"] == 3
    assert json.loads(lines[0])["messages"][1] == {"role": "assistant", "content": "said"}


def test_of_a_long_conversation_a_sample_has_beginnings_and_ends_and_says_what_is_left_out(
    tmp_path,
):
    path = tmp_path / "rollouts" / "samples.jsonl"
    call = ToolCall("search", {"input": "q" * 10_000})
    long = Message("assistant", "a" * 2000 + "b" * 100_000 + "c" * 2000, (call,))
    turns = [Message("user", f"turn {turn}") for turn in range(20)]
    rollout = fakes.rollout(Request(GroupRequest("train", 0, 0, 0, 4), 0, 0), [0], 1.0)
    for messages in ([long], turns, turns[:16], [Message("user", "x" * 4000)]):
        batching.append_samples(path, [batching.sample(replace(rollout, messages=messages))])
    (one,), some, sixteen, whole = [
        json.loads(line)["messages"] for line in path.read_text().splitlines()
    ]
    assert (
        one["role"] == "assistant"
        and one["content"] == "a" * 2000 + "\n[… 100000 characters left out …]\n" + "c" * 2000
    )
    assert (
        one["tool_calls"].startswith('[{"name":"search"')
        and "characters left out" in one["tool_calls"]
    )
    assert [each["content"] for each in some] == [
        *(f"turn {turn}" for turn in range(8)), "4 messages",
        *(f"turn {turn}" for turn in range(12, 20)),
    ]  # fmt: skip
    assert [each["content"] for each in sixteen] == [f"turn {turn}" for turn in range(16)] and len(
        whole[0]["content"]
    ) == 4000
    endless = [Message("tool", "\n" * 500_000, name="n" * 500_000), long] * 1000
    batching.append_samples(path, [batching.sample(replace(rollout, messages=endless))])
    # A line break takes two characters in JSON.
    assert len(path.read_text().splitlines()[-1]) < 16 * 3 * 2 * 4100


def test_rollouts_of_the_evaluate_stage_are_kept_whole(tmp_path):
    path = tmp_path / "rollouts" / "evaluate.jsonl"
    rollout = fakes.rollout(Request(GroupRequest("evaluation", 0, 0, 0, 4), 0, 0), [0], 1.0)
    batching.write_samples(
        path,
        [batching.sample(replace(rollout, messages=[Message("assistant", "a" * 100_000)] * 20))],
    )
    assert [len(each["content"]) for each in json.loads(path.read_text())["messages"]] == [
        100_000
    ] * 20
