"""The engine client against a stand-in server: what it makes of answers, good and bad. The real vLLM is in the inference room's tests."""

import asyncio
from dataclasses import dataclass, field

import numpy as np
import pytest
from aiohttp import web

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.transport.engine import (
    START_VERSION,
    EngineClient,
    EngineFleet,
    EngineGone,
    GenerationFailed,
    TensorAttestation,
    UpdateFailed,
    compare,
)
from orrery.transport.weight_wire import Published

PUBLISHED = Published(3, "/nowhere/version_3", {"a": 1, "b": 2**64 - 1}, "d" * 16)
HELD = {"a": ["0000000000000001", "resident"], "b": ["ffffffffffffffff", "as_consumed"]}


def answer(token_ids, spans, logprobs=None, cached=5):
    logprobs = [-0.5] * len(token_ids) if logprobs is None else logprobs
    return {
        "request_id": "generate-tokens-r",
        "usage": {"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": cached}},
        "choices": [
            {
                "index": 0,
                "finish_reason": "length",
                "token_ids": token_ids,
                "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in spans],
                "logprobs": {"content": [{"token_id": t, "logprob": p, "rank": 1} for t, p in zip(token_ids, logprobs, strict=True)]},
            }
        ],
    }


@dataclass
class StandIn:
    """Answers as scripted, and remembers what it was asked."""

    generated: object = field(default_factory=lambda: answer([7, 8], [("3", 0, 2)]))
    held: dict = field(default_factory=lambda: HELD)
    fail: dict = field(default_factory=dict)  # path → (status, body)
    delay_s: float = 0.0
    asked: list = field(default_factory=list)

    async def handle(self, request):
        body = await request.json() if request.can_read_body else None
        self.asked.append((request.path_qs, body))
        if request.path in self.fail:
            status, content = self.fail[request.path]
            return web.json_response(content, status=status)
        if request.path == "/inference/v1/generate":
            await asyncio.sleep(self.delay_s)
            return web.json_response(self.generated)
        if request.path == "/collective_rpc":
            return web.json_response({"results": [self.held]})
        if request.path == "/metrics":
            return web.Response(
                text="# TYPE vllm:num_requests_running gauge\n"
                'vllm:num_requests_running{engine="0",model_name="policy"} 3.0\n'
                'vllm:num_requests_waiting{engine="0",model_name="policy"} 2.0\n'
                'vllm:num_requests_waiting_by_reason{reason="capacity"} 9.0\n'
                'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
                'vllm:generation_tokens_total{engine="0"} 1e+03\n'
            )
        return web.json_response({})

    def paths(self):
        return [path for path, _ in self.asked]


def run(stand_ins, scenario):
    """Start the stand-ins on loopback and run `scenario(urls)`."""

    async def main():
        runners, urls = [], []
        for each in stand_ins:
            application = web.Application()
            application.router.add_route("*", "/{tail:.*}", each.handle)
            runner = web.AppRunner(application)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            runners.append(runner)
            urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        try:
            return await scenario(urls)
        finally:
            for runner in runners:
                await runner.cleanup()

    return asyncio.run(main())


def generate(stand_in, **options):
    async def scenario(urls):
        async with EngineClient(urls[0], token="secret") as engine:
            return await engine.generate(
                np.array([1, 2], dtype=np.int32), max_tokens=4, temperature=0.5, cache_salt="3", request_id="r", **options
            )

    return run([stand_in], scenario)


def test_version_spans_become_one_version_a_token_and_the_start_label_is_minus_one():
    generation = generate(StandIn(generated=answer([5, 6, 7, 8], [("default", 0, 1), ("3", 1, 3), ("12", 3, 4)], [-1.0, -2.0, -3.0, -4.0])))
    assert generation.token_ids.tolist() == [5, 6, 7, 8] and generation.token_ids.dtype == np.int32
    assert generation.versions.tolist() == [START_VERSION, 3, 3, 12] and generation.versions.dtype == np.int32
    assert generation.logprobs.tolist() == [-1.0, -2.0, -3.0, -4.0] and generation.logprobs.dtype == np.float32
    assert (generation.finish_reason, generation.cached_tokens) == ("length", 5)


def test_an_empty_generation_is_empty_arrays():
    generation = generate(StandIn(generated=answer([], [])))
    assert len(generation.token_ids) == len(generation.versions) == len(generation.logprobs) == 0


def test_the_request_says_what_was_asked_for_and_nothing_else():
    stand_in = StandIn()
    generate(stand_in, stop_token_ids=[9], seed=4)
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


@pytest.mark.parametrize(
    ("generated", "says"),
    [
        (answer([5, 6], [("3", 0, 1)]), "1 tokens without a version"),
        (answer([5, 6], [("v3", 0, 2)]), "not a generation"),
        ({"choices": []}, "not a generation"),
        ({"surprise": 1}, "not a generation"),
    ],
)
def test_an_answer_that_is_not_whole_fails_the_generation(generated, says):
    with pytest.raises(GenerationFailed, match=says):
        generate(StandIn(generated=generated))


def test_a_refused_request_fails_with_the_engines_own_words():
    refusing = StandIn(fail={"/inference/v1/generate": (400, {"error": {"message": "prompt too long", "code": 400}})})
    with pytest.raises(GenerationFailed, match=r"request 'r' \(2 prompt tokens\): prompt too long \(HTTP 400\)"):
        generate(refusing)


def test_a_slow_generation_fails_alone_and_an_absent_engine_is_gone():
    with pytest.raises(GenerationFailed, match=r"did not finish request 'r' within 0\.05 s"):
        generate(StandIn(delay_s=5.0), timeout_s=0.05)

    async def scenario(urls):
        async with EngineClient("http://127.0.0.1:1") as engine:
            assert not await engine.health()
            with pytest.raises(EngineGone):
                await engine.pause()

    run([], scenario)


def test_metrics_are_summed_by_name_and_similar_names_are_not_mixed_up():
    async def scenario(urls):
        async with EngineClient(urls[0]) as engine:
            return await engine.metrics()

    metrics = run([StandIn()], scenario)
    assert (metrics.running, metrics.waiting, metrics.kv_usage, metrics.generation_tokens_total) == (3, 2, 0.25, 1000)
    assert metrics.preemptions_total == 0


def test_aborts_carry_the_prefix_that_the_engine_gives_ids():
    stand_in = StandIn()

    async def scenario(urls):
        async with EngineFleet(urls) as fleet:
            await fleet.abort(["a", "b"])
            await fleet.abort([])

    run([stand_in], scenario)
    assert stand_in.asked == [("/abort_requests", {"request_ids": ["generate-tokens-a", "generate-tokens-b"]})]


def test_an_update_pauses_all_then_loads_all_then_attests_then_resumes():
    engines, router = [StandIn(), StandIn()], StandIn()

    async def scenario(urls):
        async with EngineFleet(urls[:2], urls[2]) as fleet:
            report = await fleet.update(PUBLISHED)
            await fleet.generate([1], max_tokens=1, temperature=1.0, cache_salt="3", request_id="x")
            return report, fleet.version

    report, version = run([*engines, router], scenario)
    assert version == report.version == 3 and report.digest == PUBLISHED.digest
    assert report.attested == {"resident": 1, "as_consumed": 1}
    assert report.paused_s >= report.pause_s + report.update_s + report.attest_s
    for engine in engines:
        assert engine.paths() == [
            "/pause?mode=keep&clear_cache=false",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
            "/collective_rpc",
            "/resume",
        ]
        assert engine.asked[2][1] == {"update_info": {"path": PUBLISHED.path, "version": 3}}
        assert engine.asked[3][1] == {"weight_version": "3"}
    assert router.paths() == ["/inference/v1/generate"]


@pytest.mark.parametrize(
    ("held", "says"),
    [
        (HELD | {"b": ["fffffffffffffffe", "as_consumed"]}, r"engine 1: tensor 'b' \(attested as_consumed\) differs from"),
        ({"a": HELD["a"]}, r"engine 1: tensor 'b' is missing after published version 3"),
        (HELD | {"c": HELD["a"]}, r"engine 1: tensor 'c' \(attested resident\) is not part of published version 3"),
        ({}, r"engine 1: tensor 'a' is missing after published version 3 \(1 more like it\)"),
    ],
)
def test_an_engine_with_other_weights_ends_the_run_by_tensor_and_stays_paused(held, says):
    engines = [StandIn(), StandIn(held=held)]

    async def scenario(urls):
        async with EngineFleet(urls, urls[0]) as fleet:
            with pytest.raises(UpdateFailed, match=says) as failed:
                await fleet.update(PUBLISHED)
            assert isinstance(failed.value, RunFailed)
            return fleet.version

    assert run(engines, scenario) == START_VERSION
    assert all("/resume" not in engine.paths() for engine in engines)


def test_a_failed_load_is_told_in_the_engines_words_and_all_engines_are_waited_for():
    engines = [StandIn(fail={"/update_weights": (500, {"error": {"message": "tensor 'q' is cut off"}})}), StandIn()]

    async def scenario(urls):
        async with EngineFleet(urls, urls[0]) as fleet:
            with pytest.raises(UpdateFailed, match=r"engine 0: /update_weights failed: tensor 'q' is cut off \(HTTP 500\)"):
                await fleet.update(PUBLISHED)

    run(engines, scenario)
    assert "/finish_weight_update" in engines[1].paths()


def test_workers_of_one_engine_that_disagree_are_named():
    async def two_workers(request):
        return web.json_response({"results": [HELD, HELD | {"a": ["0000000000000002", "resident"]}]})

    stand_in = StandIn()
    stand_in.handle = two_workers

    async def scenario(urls):
        async with EngineClient(urls[0], name="engine 5") as engine:
            with pytest.raises(UpdateFailed, match=r"engine 5: its workers hold different weights in 'a'"):
                await engine.fingerprints()

    run([stand_in], scenario)


def test_several_engines_without_a_router_are_refused():
    with pytest.raises(OrreryError, match=r"2 engines need a router"):
        EngineFleet(["http://a", "http://b"])
    with pytest.raises(OrreryError, match=r"no engine"):
        EngineFleet([])


def test_equal_fingerprints_compare_silently():
    compare(3, {"a": 1}, {"a": TensorAttestation(1, "resident")}, "engine 0")
