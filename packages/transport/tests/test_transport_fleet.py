"""The fleet against stand-in servers: what it does to all engines, and what it makes of one that fails."""

import pytest
from engine_stand_in import HELD, StandIn, run

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.transport.engine import START_VERSION, TensorAttestation, UpdateFailed
from orrery.transport.fleet import EngineFleet
from orrery.transport.update import compare
from orrery.transport.weight_wire import Published

PUBLISHED = Published(3, "/nowhere/version_3", {"a": 1, "b": 2**64 - 1}, "d" * 16)


def test_aborts_carry_the_prefix_that_the_engine_gives_ids():
    stand_in = StandIn()

    async def scenario(urls):
        async with EngineFleet(urls) as fleet:
            await fleet.abort(["a", "b"])
            await fleet.abort([])

    run([stand_in], scenario)
    assert stand_in.asked == [("/abort_requests", {"request_ids": ["generate-tokens-a", "generate-tokens-b"]})]


def test_an_update_pauses_each_engine_then_loads_then_attests_then_resumes():
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
    assert "/resume" not in engines[1].paths()


def test_a_failed_load_is_told_in_the_engines_words_and_all_engines_are_waited_for():
    engines = [StandIn(fail={"/update_weights": (500, {"error": {"message": "tensor 'q' is cut off"}})}), StandIn()]

    async def scenario(urls):
        async with EngineFleet(urls, urls[0]) as fleet:
            with pytest.raises(UpdateFailed, match=r"engine 0: /update_weights failed: tensor 'q' is cut off \(HTTP 500\)"):
                await fleet.update(PUBLISHED)

    run(engines, scenario)
    assert "/finish_weight_update" in engines[1].paths()


def test_several_engines_without_a_router_are_refused():
    with pytest.raises(OrreryError, match=r"2 engines need a router"):
        EngineFleet(["http://a", "http://b"])
    with pytest.raises(OrreryError, match=r"no engine"):
        EngineFleet([])


def test_equal_fingerprints_compare_silently():
    compare(3, {"a": 1}, {"a": TensorAttestation(1, "resident")}, "engine 0")
