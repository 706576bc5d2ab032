"""The limit of rollouts in flight: its changes at each poll, and where it settles."""

import math
from dataclasses import replace

import orchestrator_fakes as fakes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestrator_simulated_engine import Costs, SimulatedEngine, simulate
from replaced import replaced

from orrery.manifest.errors import RunFailed
from orrery.manifest.schema import AdaptiveAdmission, FixedAdmission
from orrery.orchestrator.dispatch import Admission, poll_engines

QUICK = settings(max_examples=60, deadline=None)
CONTEXT = 4096
BOUNDS = AdaptiveAdmission(kind="adaptive", min_in_flight=4, max_in_flight=400)

loads = st.builds(
    fakes.load,
    running=st.integers(0, 300),
    waiting=st.integers(0, 300),
    kv_usage=st.floats(0, 1),
    preemptions_total=st.integers(0, 50),
    kv_tokens=st.sampled_from([0, CONTEXT, 32_000, 10**7]),
)


def adaptive(bounds=BOUNDS):
    return Admission(bounds, CONTEXT)


def settled(kv_usage=0.5, num_engines=1):
    """Return a full pool that took `kv_usage` of the caches at its last poll, with the loads."""
    admission = adaptive()
    admission.observe(
        {index: fakes.load(0, kv_tokens=50 * CONTEXT) for index in range(num_engines)}
    )
    fill(admission)
    each = {
        index: fakes.load(admission.taken // num_engines, kv_usage=kv_usage)
        for index in range(num_engines)
    }
    admission.observe(each)
    return admission, each


def fill(admission):
    while admission.free:
        admission.take()


def turn_over(admission, count):
    """`count` rollouts end and others take their permits."""
    admission.give_back(count)
    fill(admission)


@QUICK
@given(
    st.lists(
        st.tuples(st.dictionaries(st.integers(0, 3), loads), st.integers(0, 40), st.booleans()),
        max_size=30,
    )
)
def test_whatever_engines_say_the_limit_stays_between_its_bounds_and_permits_are_kept(looks):
    admission = adaptive()
    for engines, num_ended, refill in looks:
        admission.give_back(min(num_ended, admission.taken))
        if refill:
            fill(admission)
        taken = admission.taken
        admission.observe(engines)
        assert BOUNDS.min_in_flight <= admission.limit <= BOUNDS.max_in_flight
        assert admission.taken == taken and admission.free == max(0, admission.limit - taken), (
            "lowering never cancels"
        )


@QUICK
@given(loads, loads, st.integers(0, 60), st.data())
def test_more_load_never_gives_a_higher_limit_and_more_ended_rollouts_never_a_lower_one(
    before, now, num_ended, data
):
    def limit(now, num_ended):
        admission = adaptive()
        admission.observe({0: before})
        fill(admission)
        turn_over(admission, min(num_ended, admission.taken))
        admission.observe({0: now})
        return admission.limit

    heavier = replace(
        now,
        waiting=now.waiting + data.draw(st.integers(0, 50)),
        kv_usage=data.draw(st.floats(now.kv_usage, 1)),
        preemptions_total=now.preemptions_total + data.draw(st.integers(0, 50))
        if now.preemptions_total >= before.preemptions_total
        else 0,
    )
    if heavier.preemptions_total >= now.preemptions_total:
        assert limit(heavier, num_ended) <= limit(now, num_ended)
    if not now.waiting:  # with a queue, the count tells how many waiting rollouts are new
        assert limit(now, num_ended + 1) >= limit(now, num_ended)


@QUICK
@given(st.floats(0.1, 1), st.integers(1, 500))
def test_a_preemption_lowers_the_limit_by_what_did_not_fit_and_a_storm_by_a_bounded_part(
    kv_usage, num_preempted
):
    admission, engines = settled(kv_usage)
    before = admission.limit
    admission.observe({0: replace(engines[0], preemptions_total=num_preempted)})
    lowered = before - admission.limit
    assert (
        1
        <= lowered
        <= max(2, math.ceil(0.05 * before) + 1, before - 1 / (kv_usage / admission.taken))
    )
    assert admission.taken > admission.limit
    admission.observe({0: replace(engines[0], preemptions_total=2 * num_preempted)})
    assert before - admission.limit == lowered, "not again before the pool has come down"


@QUICK
@given(st.floats(0.01, 0.5))
def test_a_full_pool_without_pressure_grows_with_every_rollout_that_ends_up_to_what_the_caches_hold(
    kv_usage,
):
    admission, engines = settled(kv_usage)
    fits = admission.taken / kv_usage
    for _ in range(150):
        before = admission.limit
        turn_over(admission, admission.taken // 4)
        share = kv_usage / engines[0].running
        admission.observe(
            {0: fakes.load(admission.taken, kv_usage=min(1.0, share * admission.taken))}
        )
        assert admission.limit >= before
    assert admission.limit == pytest.approx(min(fits, BOUNDS.max_in_flight), abs=2)


def test_a_pool_that_is_not_full_does_not_grow():
    admission, engines = settled(0.3)
    before = admission.limit
    admission.give_back(20)
    admission.observe(engines)  # it was full at the look before
    before = admission.limit
    for _ in range(10):
        admission.give_back(1)
        admission.take()
        admission.observe({0: fakes.load(admission.taken, kv_usage=0.1)})
    assert admission.limit == before


def test_requests_that_queue_lower_the_limit_at_once_where_caches_are_full_and_else_only_hold_it():
    admission, _ = settled(0.9)
    running = admission.taken
    admission.observe({0: fakes.load(running - 20, waiting=20, kv_usage=0.99)})
    assert admission.limit == int((running - 20) / 0.99)
    admission, _ = settled(0.2)
    before = admission.limit
    turn_over(admission, 10)
    admission.observe({0: fakes.load(admission.taken - 20, waiting=20, kv_usage=0.15)})
    assert admission.limit == before


def test_an_engine_that_is_gone_takes_its_share_of_the_limit_along_and_brings_it_back():
    admission, engines = settled(1.0, num_engines=2)
    both = admission.limit
    admission.observe({1: engines[1]})
    admission.give_back(admission.taken // 2)
    admission.observe({1: engines[1]})
    assert admission.limit == pytest.approx(both / 2, abs=1)
    admission.observe({0: fakes.load(0, kv_tokens=50 * CONTEXT), 1: engines[1]})
    assert admission.limit == pytest.approx(both, abs=1)


def test_a_restarted_engine_counts_from_zero_again_and_the_first_look_at_one_counts_nothing():
    admission, engines = settled(0.5)
    admission.observe({0: replace(engines[0], preemptions_total=7)})
    after = admission.limit
    admission.give_back(admission.taken - admission.limit)
    for now in (
        {0: replace(engines[0], running=admission.taken, kv_usage=0.4)},
        {
            0: replace(engines[0], running=admission.taken, kv_usage=0.4),
            1: fakes.load(0, preemptions_total=9),
        },
    ):
        admission.observe(now)
        assert admission.limit >= after


def test_preemptions_of_a_restarted_engine_lower_the_limit_as_new_ones_do():
    def limits(preemptions_total):
        admission, engines = settled(0.5, num_engines=2)
        admission.observe({**engines, 0: replace(engines[0], preemptions_total=7)})
        after = admission.limit
        admission.give_back(admission.taken - after)
        admission.observe({**engines, 0: replace(engines[0], preemptions_total=preemptions_total)})
        return after, admission.limit

    after, now = limits(7 + 3)
    assert now == after - 3
    assert limits(3) == (after, now), "all 3, though 7 were counted before"
    assert limits(0) == limits(7) and limits(0)[1] >= after, "none"


def test_it_starts_with_what_the_caches_hold_of_the_longest_rollouts_or_with_the_floor():
    admission = adaptive()
    assert admission.limit == BOUNDS.min_in_flight
    admission.observe(
        {0: fakes.load(0, kv_tokens=40 * CONTEXT), 1: fakes.load(0, kv_tokens=40 * CONTEXT)}
    )
    assert admission.limit == 80
    admission = adaptive()
    admission.observe({0: fakes.load(0)})
    assert admission.limit == BOUNDS.min_in_flight


def test_a_fixed_limit_stays_whatever_engines_say():
    admission = Admission(FixedAdmission(kind="fixed", max_in_flight=9), CONTEXT)
    admission.observe({0: fakes.load(9, 50, 1.0, 30)})
    assert admission.limit == 9


# Closed loops with simulated engines

LENGTHS = {
    "log-normal": lambda chance: (
        128,
        128 + int(min(3900, max(8, 300 * math.exp(0.8 * chance.gauss(0, 1))))),
    ),
    "uniform": lambda chance: (64, 64 + chance.randint(16, 1024)),
}
COSTS = {
    "prefill is cheap": Costs(),
    "prefill is dear": Costs(step_s=0.003, sequence_s=0.0005, prefill_token_s=0.0002),
}


def engines(costs, count=1):
    return [SimulatedEngine(2000, costs=costs) for _ in range(count)]


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_on_full_engines_it_comes_to_nearly_the_best_fixed_limit_without_a_storm_and_stays_there(
    lengths, costs
):
    fixed = {
        limit: simulate(
            Admission(FixedAdmission(kind="fixed", max_in_flight=limit), CONTEXT),
            engines(COSTS[costs]),
            LENGTHS[lengths],
            400,
            130,
        )
        for limit in (48, 64, 80, 128)
    }
    found = simulate(adaptive(), engines(COSTS[costs]), LENGTHS[lengths], 400, 130)
    best = max(fixed.values(), key=lambda each: each.tokens_per_s)
    assert found.tokens_per_s >= 0.95 * best.tokens_per_s
    assert fixed[128].preemptions_per_rollout > 1, "128 are an overload"
    assert found.preemptions_per_rollout < 0.25 * fixed[128].preemptions_per_rollout
    middle = sorted(found.limits)[len(found.limits) // 2]
    assert max(found.limits) <= 1.5 * middle and min(found.limits) >= 0.6 * middle


def test_four_engines_get_four_times_as_many_as_one():
    one = simulate(adaptive(), engines(COSTS["prefill is dear"]), LENGTHS["uniform"], 200, 100)
    four = simulate(adaptive(), engines(COSTS["prefill is dear"], 4), LENGTHS["uniform"], 200, 100)
    assert sum(four.limits) / len(four.limits) == pytest.approx(
        4 * sum(one.limits) / len(one.limits), rel=0.15
    )
    assert four.preemptions_per_rollout < 1


# One poll of the pool


class Pool:
    def __init__(self, *answers):
        self.answers = answers

    async def metrics(self):
        if isinstance(self.answers[0], Exception):
            raise self.answers[0]
        return {index: answer for index, answer in enumerate(self.answers) if answer is not None}


async def test_a_poll_skips_prefill_and_missing_engines_and_keeps_the_limit_without_answers(
    tmp_path,
):
    manifest = fakes.manifest(admission=BOUNDS.model_dump())
    manifest = replaced(manifest, "inference", num_replicas=3, prefill_replicas=1)
    ctx, admission = fakes.FakeContext(tmp_path, manifest), adaptive()
    prefill = fakes.load(0, kv_tokens=CONTEXT)
    totals = {"prompt_tokens_total": 128, "external_hit_tokens_total": 96}
    serving = replace(fakes.load(0, kv_tokens=50 * CONTEXT), **totals)
    assert list(await poll_engines(ctx, Pool(prefill, serving, serving), admission)) == [0, 1, 2]
    assert admission.limit == 100
    assert list(await poll_engines(ctx, Pool(prefill, None, serving), admission)) == [0, 2]
    assert admission.limit == 50
    assert (
        await poll_engines(
            ctx, Pool(RunFailed("engine 1 did not finish GET /metrics within 10 s")), admission
        )
        == {}
    )
    assert admission.limit == 50
    assert [row["limit"] for row in ctx.events("admission")] == [100, 50]
    names = "engine", "prompt_tokens", "external_hit_tokens"
    assert [tuple(row[name] for name in names) for row in ctx.events("engine")] == [
        (0, 0, 0),
        (1, 128, 96),
        (2, 128, 96),
        (0, 0, 0),
        (2, 128, 96),
    ]
