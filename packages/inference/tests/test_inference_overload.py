"""One real engine with a small cache, asked for more than it holds: what it preempts with as many rollouts in flight as the manifest
says, and with as many as the orchestrator's admission finds that fit."""

import asyncio
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pytest
from inference_servers import DENSE, STAGE, engine, make_run, with_fleet

from orrery.manifest.schema import AdaptiveAdmission, FixedAdmission
from orrery.observe.process import RoleProcess
from orrery.orchestrator.admission import Admission
from orrery.orchestrator.engine_load import look

pytestmark = [pytest.mark.timeout(150), pytest.mark.engine, pytest.mark.slow]

TOKEN_BYTES = 2 * DENSE["num_layers"] * DENSE["num_kv_heads"] * DENSE["head_dim"] * 4
CACHE_TOKENS = 8192
PROMPT_TOKENS = 32
LENGTHS = np.random.default_rng(1).integers(64, 448, 160).tolist()  # of answers; a rollout holds 160 tokens on average, so 51 fit
OVERLOAD = 112
FLOOR = 4
POLL_S = 0.05  # these rollouts take seconds, where a run's take minutes


@dataclass
class Played:
    """What became of all rollouts: sampled tokens, ends, preemptions, and the limit at each look while there was something to admit."""

    lengths: list[int]
    reasons: set[str]
    preemptions: int
    limits: list[int]


async def play(me, fleet, name, admission):
    """One rollout a length, as many in flight as there are permits."""
    before = (await fleet.metrics())[0].preemptions_total
    chance, limits, changed = np.random.default_rng(2), [], asyncio.Event()
    prompts = chance.integers(3, DENSE["vocab_size"], (len(LENGTHS), PROMPT_TOKENS), dtype=np.int32)
    playing = []

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
            admission.give_back()
            changed.set()

    async def watch():
        while True:
            await look(me, fleet, admission)
            limits.append(admission.limit)
            changed.set()
            await asyncio.sleep(POLL_S)

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        while len(playing) < len(LENGTHS):
            while admission.free and len(playing) < len(LENGTHS):
                admission.take()
                playing.append(group.create_task(rollout(len(playing))))
            changed.clear()
            await changed.wait()
        num_looks = len(limits)
        answers = await asyncio.gather(*playing)
        watching.cancel()
    preemptions = (await fleet.metrics())[0].preemptions_total - before
    return Played([len(each.token_ids) for each in answers], {each.finish_reason for each in answers}, preemptions, limits[:num_looks])


def test_admission_that_follows_the_engine_keeps_it_from_preempting_what_a_fixed_limit_would(tmp_path):
    inference = {"kv_cache_bytes": CACHE_TOKENS * TOKEN_BYTES, "max_num_sequences": OVERLOAD, "router": {"kind": "none"}}
    run_dir = make_run(tmp_path / "run", DENSE, inference=inference)
    fixed = FixedAdmission(kind="fixed", max_in_flight=OVERLOAD)
    adaptive = AdaptiveAdmission(kind="adaptive", min_in_flight=FLOOR, max_in_flight=OVERLOAD)
    me = RoleProcess("orchestrator", run_dir, STAGE, 0, 1, 0)
    context = me.manifest.inference.max_model_len_tokens

    async def both(fleet):
        return [await play(me, fleet, each.kind, Admission(each, context)) for each in (fixed, adaptive)]

    with closing(me.metrics), engine(run_dir) as (_, url):
        overloaded, followed = with_fleet(both, [url])
    for each in (overloaded, followed):
        assert each.lengths == LENGTHS
        assert each.reasons == {"length"}
    assert overloaded.preemptions > 0
    assert 2 * followed.preemptions <= overloaded.preemptions  # a third in general; more on a machine that stalls for seconds
    # Half of all looks, not each: a busy machine may sleep through whole rollouts, after which one look sees young ones alone.
    assert FLOOR < np.median(followed.limits) < OVERLOAD / 2
