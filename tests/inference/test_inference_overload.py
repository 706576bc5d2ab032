"""One real engine with a small cache, asked for more than it holds: what it preempts, and how much
it computes for what it samples, with
as many rollouts in flight as the manifest says, and with as many as the orchestrator's admission
finds that fit.
"""

import asyncio
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pytest
from counted_engine import scheduled
from inference_servers import DENSE, STAGE, await_published, make_run, start_role, stop, with_fleet

from orrery.manifest.schema import AdaptiveAdmission, FixedAdmission
from orrery.orchestrator.admission import Admission, poll_engines
from orrery.runtime.role_context import RoleContext

pytestmark = [pytest.mark.timeout(150), pytest.mark.engine, pytest.mark.slow]

TOKEN_BYTES = 2 * DENSE["num_layers"] * DENSE["num_kv_heads"] * DENSE["head_dim"] * 4
CACHE_TOKENS = 8192
PROMPT_TOKENS = 32
LENGTHS = (
    np.random.default_rng(1).integers(64, 448, 240).tolist()
)  # of answers; a rollout holds 160 tokens on average, so 51 fit
OVERLOAD = 112
BEST_FIXED = 40  # of 16, 24, 32, 40, 48 and 112, by `tokens_for_work`
WARM_UP = 60  # rollouts that have ended
# what a step costs beside its tokens, in tokens: so this engine's times are for 16 and for 112 in
# flight
STEP_TOKENS = 50
FLOOR = 4
POLL_S = 0.05  # these rollouts take seconds, where a run's take minutes


@dataclass
class Played:
    """What became of all rollouts: sampled tokens, ends, preemptions, and the limit at each look
    while there was something to admit.
    """

    lengths: list[int]
    reasons: set[str]
    preemptions: int
    limits: list[int]
    # sampled ones, over computed ones and steps in tokens, between the warm-up and the last start:
    # throughput
    tokens_for_work: float
    # without a clock, which a busy machine hardly changes


async def play(ctx, fleet, name, admission, counts):
    """One rollout a length, as many in flight as there are permits. `counts` are those of
    `counted_engine`.
    """
    before = (await fleet.metrics())[0].preemptions_total
    chance, limits, changed = np.random.default_rng(2), [], asyncio.Event()
    prompts = chance.integers(3, DENSE["vocab_size"], (len(LENGTHS), PROMPT_TOKENS), dtype=np.int32)
    playing, done, marks = [], [], []

    async def mark():
        sampled = (await fleet.metrics())[0].generation_tokens_total
        marks.append((sampled, counts @ (STEP_TOKENS, 1)))

    async def rollout(number):
        try:
            return await fleet.generate(
                prompts[number],
                max_tokens=LENGTHS[number],
                temperature=1.0,
                cache_salt=name,
                request_id=f"{name}-{number}",
                ignore_eos=True,
            )
        finally:
            done.append(number)
            admission.give_back()
            changed.set()

    async def watch():
        while True:
            await poll_engines(ctx, fleet, admission)
            limits.append(admission.limit)
            changed.set()
            await asyncio.sleep(POLL_S)

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        while len(playing) < len(LENGTHS):
            while admission.free and len(playing) < len(LENGTHS):
                admission.take()
                playing.append(group.create_task(rollout(len(playing))))
            if not marks and len(done) >= WARM_UP:
                await mark()
            changed.clear()
            await changed.wait()
        await mark()
        num_looks = len(limits)
        answers = await asyncio.gather(*playing)
        watching.cancel()
    preemptions = (await fleet.metrics())[0].preemptions_total - before
    (sampled, work), (sampled_then, work_then) = marks
    return Played(
        [len(each.token_ids) for each in answers],
        {each.finish_reason for each in answers},
        preemptions,
        limits[:num_looks],
        (sampled_then - sampled) / (work_then - work),
    )


def test_adaptive_admission_preempts_less_and_is_nearly_as_fast_as_the_best_limit(
    tmp_path,
):
    inference = {
        "kv_cache_bytes": CACHE_TOKENS * TOKEN_BYTES,
        "max_num_sequences": OVERLOAD,
        "router": {"kind": "none"},
    }
    run_dir = make_run(tmp_path / "run", DENSE, inference=inference)
    overload, best = (
        FixedAdmission(kind="fixed", max_in_flight=limit) for limit in (OVERLOAD, BEST_FIXED)
    )
    adaptive = AdaptiveAdmission(kind="adaptive", min_in_flight=FLOOR, max_in_flight=OVERLOAD)
    ctx = RoleContext("orchestrator", run_dir, STAGE, 0, 1, 0)
    context = ctx.manifest.inference.max_model_len_tokens

    async def all_three(fleet):
        counts = scheduled(run_dir)
        return [
            await play(ctx, fleet, str(i), Admission(each, context), counts)
            for i, each in enumerate((overload, best, adaptive))
        ]

    with closing(ctx.metrics):
        process = start_role("counted_engine", run_dir, 0)
        try:
            overloaded, fitting, followed = with_fleet(
                all_three, [await_published(run_dir, "inference", 0, process)]
            )
        finally:
            stop(process)
    for each in (overloaded, fitting, followed):
        assert each.lengths == LENGTHS
        assert each.reasons == {"length"}
    assert overloaded.preemptions > 0
    assert (
        2 * followed.preemptions <= overloaded.preemptions
    )  # a third in general; more on a machine that stalls for seconds
    # Half of all looks, not each: a busy machine may sleep through whole rollouts, after which one
    # look sees young ones alone.
    assert FLOOR < np.median(followed.limits) < OVERLOAD / 2
    # 0.97 to 1.00; where other programs take both cores, whoever starts rollouts is late now and
    # then: a tenth less, of either.
    assert followed.tokens_for_work >= 0.85 * fitting.tokens_for_work
