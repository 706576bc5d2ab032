"""The engine client against a stand-in server, with good and bad answers."""

import asyncio
import base64
import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from aiohttp import web
from orchestrator_engine_stand_in import HELD, StandIn, answer, attested, served

from orrery.orchestrator.engines.client import EngineClient, update_engine
from orrery.orchestrator.engines.messages import (
    START_VERSION,
    EngineGone,
    GenerationFailed,
    UpdateFailed,
)
from orrery.wire.fingerprint import digest
from orrery.wire.weight_wire import Published

REQUEST = {"max_tokens": 4, "temperature": 0.5, "cache_salt": "3", "request_id": "r"}


async def generate(stand_in, **options):
    async with served([stand_in]) as urls, EngineClient(urls[0], token="secret") as engine:
        return await engine.generate(np.array([1, 2], dtype=np.int32), **REQUEST, **options)


async def generate_each(stand_in, num_samples=3):
    """Return the samples that the client delivers, and its error or None."""
    samples = []
    async with served([stand_in]) as urls, EngineClient(urls[0], token="secret") as engine:
        try:
            await engine.generate_each([1, 2], num_samples, samples.append, **REQUEST)
        except (GenerationFailed, EngineGone) as error:
            return samples, error
    return samples, None


def lines(*samples):
    """Return the engine's JSON lines, one for each sample (index, tokens)."""
    return b"".join(
        json.dumps(answer(tokens, [("3", 0, len(tokens))], index=index)).encode() + b"\n"
        for index, tokens in samples
    )


async def test_samples_of_one_request_are_delivered_as_they_end_however_the_bytes_arrive():
    whole = lines((2, [7]), (0, [8, 9]), (1, [10] * 30_000))
    stand_in = StandIn(streamed=[whole[:9], whole[9:500], whole[500:90_000], whole[90_000:]])
    samples, error = await generate_each(stand_in)
    assert error is None
    found = [(each.sample, each.token_ids.tolist()) for each in samples]
    assert found == [(2, [7]), (0, [8, 9]), (1, [10] * 30_000)]
    [(_, body)] = stand_in.asked
    assert (body["sampling_params"]["n"], body["stream"]) == (3, True)
    await generate(alone := StandIn())
    [(_, body)] = alone.asked
    assert "n" not in body["sampling_params"] and "stream" not in body


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        (
            {"streamed": [lines((0, [7]))]},
            GenerationFailed,
            "did not return samples [1, 2] of request 'r'",
        ),
        (
            {"streamed": [lines((0, [7]), (0, [8]))]},
            GenerationFailed,
            "gave an unexpected sample 0 of request 'r'",
        ),
        (
            {"streamed": [lines((0, [7])), b'{"error": {"message": "a NaN"}}']},
            GenerationFailed,
            "failed request 'r': a NaN",
        ),
        ({"streamed": [lines((0, [7]))], "cuts": True}, GenerationFailed, "but is healthy"),
        (
            {"streamed": [lines((0, [7]))], "cuts": True, "fail": {"/health": (503, {})}},
            EngineGone,
            "is gone",
        ),
    ],
    ids=["too few", "twice", "an error", "cut", "cut by a dead server"],
)
async def test_a_request_that_ends_early_raises_after_the_samples_that_ended(options, kind, says):
    samples, error = await generate_each(StandIn(**options))
    assert [each.sample for each in samples] == [0]
    assert type(error) is kind and says in str(error)


async def test_version_spans_become_one_version_a_token_and_the_start_label_is_minus_one():
    generation = await generate(
        StandIn(
            generated=answer(
                [5, 6, 7, 8],
                [("default", 0, 1), ("3", 1, 3), ("12", 3, 4)],
                [-1.0, -2.0, -3.0, -4.0],
            )
        )
    )
    assert generation.token_ids.tolist() == [5, 6, 7, 8] and generation.token_ids.dtype == np.int32
    assert (
        generation.versions.tolist() == [START_VERSION, 3, 3, 12]
        and generation.versions.dtype == np.int32
    )
    assert (
        generation.logprobs.tolist() == [-1.0, -2.0, -3.0, -4.0]
        and generation.logprobs.dtype == np.float32
    )
    assert (generation.finish_reason, generation.cached_tokens) == ("length", 5)


async def test_an_empty_generation_is_empty_arrays():
    generation = await generate(StandIn(generated=answer([], [])))
    assert len(generation.token_ids) == len(generation.versions) == len(generation.logprobs) == 0


async def test_the_request_says_what_was_asked_for_and_nothing_else():
    stand_in = StandIn()
    await generate(stand_in, stop_token_ids=[9], seed=4)
    assert stand_in.asked == [
        (
            "/inference/v1/generate",
            {
                "request_id": "r",
                "token_ids": [1, 2],
                "cache_salt": "3",
                "sampling_params": {
                    "max_tokens": 4,
                    "temperature": 0.5,
                    "logprobs": 0,
                    "detokenize": False,
                    "skip_special_tokens": False,
                    "stop_token_ids": [9],
                    "seed": 4,
                },
            },
        )
    ]


def with_routes(num_rows):
    generated = answer([7, 8], [("3", 0, 2)])
    file = io.BytesIO()
    np.save(file, np.arange(num_rows * 4, dtype=np.uint16).reshape(num_rows, 2, 2))
    generated["choices"][0]["routed_experts"] = base64.b64encode(file.getvalue()).decode()
    return generated


async def test_routes_are_asked_for_from_a_position_and_come_beside_the_tokens():
    stand_in = StandIn(generated=with_routes(2))
    generation = await generate(stand_in, routes_from=1)
    assert stand_in.asked[0][1]["sampling_params"]["routed_experts_prompt_start"] == 1
    (part,) = generation.routes
    assert (part.start, part.shape) == (1, (2, 2, 2)) and generation.token_ids.tolist() == [7, 8]
    assert (await generate(StandIn(generated=with_routes(3)))).routes == ()  # not requested


@pytest.mark.parametrize(
    ("generated", "says"),
    [(with_routes(2), "3 tokens .* routes of 2"), (answer([7, 8], [("3", 0, 2)]), "no routes")],
)
async def test_routes_that_were_asked_for_and_are_not_all_there_fail_the_generation(
    generated, says
):
    with pytest.raises(GenerationFailed, match=says):
        await generate(StandIn(generated=generated), routes_from=0)


@pytest.mark.parametrize(
    ("generated", "says"),
    [
        (answer([5, 6], [("3", 0, 1)]), "1 tokens without a version"),
        (answer([5, 6], [("v3", 0, 2)]), "not a generation"),
        ({"choices": []}, "not a generation"),
        (answer([2**40], [("3", 0, 1)]), "not a generation"),
        ({"surprise": 1}, "not a generation"),
    ],
)
async def test_an_answer_that_is_not_whole_fails_the_generation(generated, says):
    with pytest.raises(GenerationFailed, match=says):
        await generate(StandIn(generated=generated))


async def test_a_refused_request_fails_with_the_engines_own_words():
    refusing = StandIn(
        fail={
            "/inference/v1/generate": (400, {"error": {"message": "prompt too long", "code": 400}})
        }
    )
    with pytest.raises(
        GenerationFailed, match=r"request 'r' \(2 prompt tokens\): prompt too long \(HTTP 400\)"
    ):
        await generate(refusing)


async def test_a_slow_generation_fails_alone_and_an_absent_engine_is_gone():
    with pytest.raises(GenerationFailed, match=r"did not finish request 'r' within 0\.05 s"):
        await generate(StandIn(delay_s=5.0), timeout_s=0.05)

    async with EngineClient("http://127.0.0.1:1") as engine:
        assert not await engine.health()
        with pytest.raises(EngineGone):
            await engine.pause()


NO_ROOM = """
import asyncio, os, resource, sys, time
import numpy as np
from orrery.orchestrator.engines.client import EngineClient
from orrery.orchestrator.engines.messages import GenerationFailed, OutOfConnections

async def main():
    async with EngineClient(sys.argv[1], token="secret") as engine:
        def generate(**options):
            prompt = np.array([1, 2], dtype=np.int32)
            options |= {"max_tokens": 4, "temperature": 0.5, "cache_salt": "3"}
            return engine.generate(prompt, request_id="r", **options)

        assert await engine.health()
        await asyncio.sleep(0.2)  # until its connection is closed
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        held = []
        try:
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        try:
            await generate(timeout_s=0.3)
        except GenerationFailed as error:
            assert "could not open a connection" in str(error) and "ulimit" in str(error), error
        else:
            raise AssertionError("it had room")
        begin_s = time.monotonic()
        try:
            await engine._control("/pause", timeout_s=0.3)
        except OutOfConnections:
            assert time.monotonic() - begin_s < 0.5
        else:
            raise AssertionError("it had room")
        waiting, dying = asyncio.ensure_future(generate()), asyncio.ensure_future(engine.death())
        await asyncio.sleep(0.5)
        assert not waiting.done() and not dying.done()
        for each in held:
            os.close(each)
        assert len((await waiting).token_ids) == 2 and await dying is None

asyncio.run(main())
"""


async def test_a_process_without_room_for_a_connection_waits_and_takes_no_engine_for_dead():
    async with served([StandIn(generated=answer([5, 6], [("default", 0, 2)]))]) as urls:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", NO_ROOM, urls[0]]
        done = await asyncio.to_thread(
            subprocess.run, command, env=environment, capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 0, done.stderr


async def test_metrics_are_summed_by_name_and_similar_names_are_not_mixed_up():
    async with served([StandIn()]) as urls, EngineClient(urls[0]) as engine:
        metrics = await engine.metrics()
    assert (
        metrics.running,
        metrics.waiting,
        metrics.kv_usage,
        metrics.generation_tokens_total,
    ) == (3, 2, 0.5, 1000)
    assert metrics.preemptions_total == 0 and metrics.kv_tokens == 2 * 100 * 32
    assert (metrics.prompt_tokens_total, metrics.external_hit_tokens_total) == (800, 96)


async def test_workers_of_one_engine_that_disagree_are_named():
    async def two_workers(request):
        return web.json_response(
            {"results": [HELD, HELD | {"a": ["0000000000000002", "resident"]}]}
        )

    stand_in = StandIn()
    stand_in.handle = two_workers

    async with served([stand_in]) as urls, EngineClient(urls[0], name="engine 5") as engine:
        with pytest.raises(
            UpdateFailed, match=r"engine 5: its workers hold different weights in 'a'"
        ):
            await engine.fingerprints()


async def test_an_engine_whose_workers_disagree_does_not_go_on():
    """Each by itself has what was published, or has not: only together they show it."""
    other = HELD | {"a": ["0000000000000002", "resident"]}
    published = Published(
        3,
        "/",
        fingerprints := {name: int(value, 16) for name, (value, _) in HELD.items()},
        digest(fingerprints),
    )

    class TwoWorkers(StandIn):
        def answers(self, method):
            every = {"fingerprints": [HELD, other], "attested": [attested(HELD), attested(other)]}
            return every.get(method) or super().answers(method)

    async with (
        served([stand_in := TwoWorkers()]) as urls,
        EngineClient(urls[0], name="engine 5") as engine,
    ):
        with pytest.raises(
            UpdateFailed, match=r"engine 5: its workers hold different weights in 'a'"
        ):
            await update_engine(engine, published)
    assert "/update_weights" in stand_in.paths() and "/resume" not in stand_in.paths()
