"""One episode: a rollout's arrays, and failures."""

import asyncio
import threading

import msgspec
import numpy as np
import orchestrator_fakes as fakes
import pytest

from orrery.orchestrator.dispatch import GroupRequest, Request
from orrery.orchestrator.rollout import RolloutFailed, RolloutRunner, open_problem, run_episode
from orrery.runtime.role_context import TERMINATED, Terminated
from orrery.tasks.task import JudgeBroken, Judgement
from orrery.wire.routed_experts import RouteShape


async def episode(pool, task=None, max_turns=3, max_model_len=64, **options):
    task, renderer = task or fakes.FakeTask(), fakes.FakeRenderer()
    return await run_episode(
        task=task, opening=await open_problem(task, 4, renderer), max_turns=max_turns,
        renderer=renderer, engine=pool,
        sampling=fakes.manifest().orchestrator.sampling, max_model_len_tokens=max_model_len,
        cache_salt="7", name="train-1-0",
        timeout_s=9.0, **options,
    )  # fmt: skip


def test_sampled_tokens_stay_verbatim_over_turns_and_only_they_are_trained():
    pool = fakes.FakePool(version=3)
    rollout = asyncio.run(episode(pool, fakes.FakeTask(replies=1)))
    first, second = pool.requests
    np.testing.assert_array_equal(first["token_ids"], [5, 6, 14])
    # The prompt and the first turn, as sampled.
    np.testing.assert_array_equal(second["token_ids"][:7], rollout.token_id[:7])
    assert rollout.trained.tolist() == [False] * 3 + [True] * 4 + [False] * 2 + [True] * 4
    assert rollout.version.tolist() == [-1] * 3 + [3] * 4 + [-1] * 2 + [3] * 4
    assert (rollout.logprob[rollout.trained] == np.float32(-0.25)).all() and (
        rollout.logprob[~rollout.trained] == 0
    ).all()
    assert [message.role for message in rollout.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert not rollout.truncated
    assert (
        rollout.token_id.dtype == np.int32
        and rollout.logprob.dtype == np.float32
        and rollout.version.dtype == np.int32
    )


def test_all_turns_of_a_rollout_have_one_salt_and_ids_of_their_own():
    pool = fakes.FakePool(version=9)
    asyncio.run(episode(pool, fakes.FakeTask(replies=2)))
    assert [request["cache_salt"] for request in pool.requests] == ["7"] * 3
    assert len({request["request_id"] for request in pool.requests}) == 3


def test_each_turn_samples_with_the_seed_after_the_turn_befores():
    for seed, seeds in ((41, [41, 42, 43]), (0, [0, 1, 2]), (None, [None] * 3)):
        pool = fakes.FakePool(version=9)
        asyncio.run(episode(pool, fakes.FakeTask(replies=2), seed=seed))
        assert [request["seed"] for request in pool.requests] == seeds


def test_routes_of_all_turns_make_one_column_and_no_turn_asks_for_those_that_are_there():
    pool = fakes.FakePool(version=3)
    rollout = asyncio.run(episode(pool, fakes.FakeTask(replies=2), routes=RouteShape(2, 2, 200)))
    assert rollout.num_tokens == 3 + 4 + 2 + 4 + 2 + 4
    # The last sampled token of a turn is an input of the next.
    assert [request["routes_from"] for request in pool.requests] == [
        0,
        6,
        12,
    ]
    assert rollout.routed_experts.shape == (19, 2, 2) and rollout.routed_experts.dtype == np.uint8
    np.testing.assert_array_equal(rollout.routed_experts[:18, 1, 0], np.arange(18))
    assert (rollout.routed_experts[18] == 255).all()
    assert asyncio.run(episode(fakes.FakePool(version=3))).routed_experts is None


def test_a_turn_that_is_cut_by_its_length_ends_the_episode_truncated():
    pool = fakes.FakePool(version=0, script={"train-1-0-0": "length"})
    rollout = asyncio.run(episode(pool, fakes.FakeTask(replies=2)))
    assert rollout.truncated and len(pool.requests) == 1


def test_a_problem_that_names_a_length_gets_it_whatever_is_sampled():
    class Exact(fakes.FakeTask):
        def problem(self, index):
            return msgspec.structs.replace(super().problem(index), exact_tokens=40)

    pool = fakes.FakePool(version=0, num_tokens=40, script={"train-1-0-0": "length"})
    rollout = asyncio.run(episode(pool, Exact()))
    request = pool.requests[0]
    assert request["max_tokens"] == 40 > fakes.manifest().orchestrator.sampling.max_tokens_per_turn
    assert request["ignore_eos"] and not request["stop_token_ids"]
    assert int(rollout.trained.sum()) == 40 and not rollout.truncated


def test_no_rollout_is_longer_than_the_engine_can_hold():
    pool = fakes.FakePool(version=0, num_tokens=8)
    rollout = asyncio.run(episode(pool, fakes.FakeTask(replies=9), max_turns=9, max_model_len=16))
    assert rollout.truncated and rollout.num_tokens == 16
    assert [request["max_tokens"] for request in pool.requests] == [8, 3]


def test_a_reply_that_leaves_no_room_for_an_answer_is_not_part_of_the_rollout():
    pool = fakes.FakePool(version=0)
    rollout = asyncio.run(episode(pool, fakes.FakeTask(replies=1), max_model_len=9))
    assert rollout.truncated and rollout.num_tokens == 7 and rollout.trained[-1]


def test_max_turns_ends_the_episode():
    pool = fakes.FakePool(version=0)
    asyncio.run(episode(pool, fakes.FakeTask(replies=9), max_turns=2))
    assert len(pool.requests) == 2


@pytest.mark.parametrize(
    ("script", "broken", "reason"),
    [("fail", None, "engine"), ("empty", None, "empty"), ("abort", None, "aborted"),
     ("", "judge", "judge"), ("", "reply", "task"), ("", "problem", "task")],
)  # fmt: skip
def test_what_is_not_the_policys_doing_is_a_failure_with_a_reason_and_never_a_reward(
    script, broken, reason
):
    pool = fakes.FakePool(version=0, script={"train-1-0-0": script})
    with pytest.raises(RolloutFailed) as failed:
        asyncio.run(episode(pool, fakes.FakeTask(broken=broken)))
    assert failed.value.reason == reason and failed.value.detail


class Leaving(fakes.FakeTask):
    """Raises `error` out of `where`, at once or once it is awaited."""

    def __init__(self, error, where, is_async=False):
        super().__init__(replies=1)
        self.error, self.where, self.is_async = error, where, is_async

    def _leave(self, where, otherwise):
        async def later():
            raise self.error

        if where != self.where:
            return otherwise()
        if self.is_async:
            return later()
        raise self.error

    def problem(self, index):
        return self._leave("problem", lambda: super(Leaving, self).problem(index))

    def reply(self, problem, messages):
        return self._leave("reply", lambda: super(Leaving, self).reply(problem, messages))

    def judge(self, problem, messages):
        return self._leave("judge", lambda: super(Leaving, self).judge(problem, messages))


DOORS = [
    ("problem", False, "task"),
    ("reply", False, "task"),
    ("reply", True, "task"),
    ("judge", False, "judge"),
    ("judge", True, "judge"),
]


@pytest.mark.parametrize(("where", "is_async", "reason"), DOORS)
def test_a_task_that_exits_ends_its_rollout_and_not_the_run(where, is_async, reason):
    with pytest.raises(RolloutFailed, match=f"{reason} raised SystemExit: 0") as failed:
        asyncio.run(episode(fakes.FakePool(version=0), Leaving(SystemExit(0), where, is_async)))
    assert failed.value.reason == reason


@pytest.mark.parametrize(
    "error", [Terminated(TERMINATED), KeyboardInterrupt(), asyncio.CancelledError()]
)
@pytest.mark.parametrize(("where", "is_async", "reason"), DOORS)
def test_the_end_of_the_process_or_the_rollout_passes_through_a_task(
    where, is_async, reason, error
):
    with pytest.raises(type(error)):
        asyncio.run(episode(fakes.FakePool(version=0), Leaving(error, where, is_async)))


def test_the_event_loop_goes_on_while_a_problem_is_made():
    class Slow(fakes.FakeTask):
        def problem(self, index):
            assert made.wait(timeout=60.0)
            return super().problem(index)

    async def run():
        playing = asyncio.create_task(episode(fakes.FakePool(version=0), Slow()))
        await asyncio.sleep(0.01)
        assert not playing.done()
        made.set()
        return await playing

    made = threading.Event()
    assert asyncio.run(run()).num_tokens > 0


def test_tokens_of_no_published_version_are_refused():
    with pytest.raises(RolloutFailed) as failed:
        asyncio.run(episode(fakes.FakePool(version=-1)))
    assert failed.value.reason == "unversioned"


def test_a_prompt_that_fills_the_context_is_a_failure():
    with pytest.raises(RolloutFailed) as failed:
        asyncio.run(episode(fakes.FakePool(version=0), max_model_len=3))
    assert failed.value.reason == "prompt_too_long"


@pytest.mark.parametrize(
    ("reward", "metrics"),
    [
        (float("nan"), {}),
        ("good", {}),
        (1.0, {"share": float("nan")}),
        (1.0, {"share": float("inf")}),
        (1e39, {}),
        (1.0, {"share": None}),
        (1.0, None),
    ],
)
def test_a_reward_or_metric_that_is_no_number_is_a_failure_of_the_judge(reward, metrics):
    class Strange(fakes.FakeTask):
        def judge(self, problem, messages):
            return Judgement(reward, metrics)

    with pytest.raises(RolloutFailed) as failed:
        asyncio.run(episode(fakes.FakePool(version=0), Strange()))
    assert failed.value.reason == "judge"


def test_a_judge_that_is_broken_ends_more_than_its_rollout():
    class Broken(fakes.FakeTask):
        async def judge(self, problem, messages):
            raise JudgeBroken("a known answer was scored wrongly")

    with pytest.raises(JudgeBroken, match="a known answer"):
        asyncio.run(episode(fakes.FakePool(version=0), Broken()))


def test_metrics_of_other_number_types_become_plain_numbers_that_files_can_hold():
    class Counting(fakes.FakeTask):
        def judge(self, problem, messages):
            return Judgement(
                np.float32(0.5), {"share": np.float64(0.25), "count": np.int64(3), "right": True}
            )

    rollout = asyncio.run(episode(fakes.FakePool(version=0), Counting()))
    assert (
        msgspec.json.decode(msgspec.json.encode(rollout.metrics))
        == {"share": 0.25, "count": 3, "right": 1}
        and rollout.reward == 0.5
    )


def runner_of(pool, **options):
    spec, failed = fakes.manifest(), []
    tasks = {purpose: [fakes.FakeTask()] * 9 for purpose in ("train", "evaluation")}
    runner = RolloutRunner(
        spec,
        tasks,
        fakes.FakeRenderer(),
        pool,
        lambda *of: failed.append(of),
        **options,
    )
    return runner, failed


def requests(purpose, version=3):
    return [Request(GroupRequest(purpose, 1, 0, 4, 2), member, version) for member in range(2)]


async def test_a_rollout_that_is_cancelled_before_it_begins_is_no_longer_playing():
    runner, failed = runner_of(fakes.FakePool(version=3))
    runner.start(requests("train"))
    assert runner.num_running == 2
    await runner.cancel(requests("train"))
    await asyncio.sleep(0)
    assert (runner.num_running, failed) == (0, [])
    runner.check()


async def test_an_update_waits_for_the_aborts_of_all_that_were_cancelled_before_it():
    pool = fakes.FakePool(version=3, script={"train-1-0-0": "hang", "train-1-1-0": "hang"})
    runner, _ = runner_of(pool)
    first, second = requests("train")
    runner.start([first, second])
    while len(pool.in_flight) < 2:
        await asyncio.sleep(0.01)
    runner.cancel([first])  # a timeout, without a wait for its end
    await runner.cancel([])  # an update without stale rollouts
    assert pool.aborted == ["train-1-0-0"] and list(pool.in_flight) == ["train-1-1-0"]
    await runner.close()


@pytest.mark.parametrize(
    ("purpose", "version", "asks"),
    [("train", 3, True), ("evaluation", 3, False), ("evaluation", 7, True)],
)
async def test_only_what_is_trained_or_compared_asks_for_routes(purpose, version, asks):
    pool = fakes.FakePool(version=version)
    runner, _ = runner_of(pool, is_compared=lambda version: version == 7)
    runner._routes = RouteShape(2, 2, 200)
    runner.start(requests(purpose, version))
    while runner.num_running:
        await asyncio.sleep(0.01)
    runner.check()
    assert (
        [request.get("routes_from") is not None for request in pool.requests]
        == [asks] * len(pool.requests)
        != []
    )


async def test_cancelling_a_rollout_aborts_its_request_in_the_engine():
    pool = fakes.FakePool(version=0, script={"train-1-0-0": "hang"})
    task = asyncio.create_task(episode(pool))
    while not pool.in_flight:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pool.aborted == ["train-1-0-0"] and not pool.in_flight
