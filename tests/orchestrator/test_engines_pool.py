"""The engine pool against stand-in servers: updates, losses and recovery."""

import asyncio
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from orchestrator_engine_stand_in import HELD, StandIn, served

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.orchestrator.engines import client as client_module
from orrery.orchestrator.engines import pool as pool_module
from orrery.orchestrator.engines import recovery as recovery_module
from orrery.orchestrator.engines.client import compare
from orrery.orchestrator.engines.messages import (
    START_VERSION,
    EngineGone,
    GenerationFailed,
    TensorAttestation,
    UpdateFailed,
    UpdateInterrupted,
    WeightsDiffer,
)
from orrery.orchestrator.engines.pool import EnginePool, Phase
from orrery.runtime import process_control
from orrery.runtime.health import read_health
from orrery.runtime.metrics import read
from orrery.runtime.role_context import RoleContext
from orrery.wire import rendezvous
from orrery.wire.fingerprint import digest
from orrery.wire.weight_wire import Published
from orrery.wire.weight_wire.leases import ELSEWHERE, GONE, LeaseClient, LeaseTable

FINGERPRINTS = {"a": 1, "b": 2**64 - 1}
PUBLISHED = Published(3, "/", FINGERPRINTS, digest(FINGERPRINTS))


async def test_aborts_carry_the_prefix_that_the_engine_gives_ids():
    stand_in = StandIn()

    async with served([stand_in]) as urls, EnginePool(urls) as fleet:
        await fleet.abort(["a", "b"])
        await fleet.abort([])
    assert stand_in.asked == [
        ("/abort_requests", {"request_ids": ["generate-tokens-a", "generate-tokens-b"]})
    ]


async def test_an_update_pauses_each_engine_then_loads_then_attests_then_resumes():
    engines, router = [StandIn(), StandIn()], StandIn()

    async with served([*engines, router]) as urls, EnginePool(urls[:2], urls[2]) as fleet:
        report = await fleet.update(PUBLISHED)
        await fleet.generate([1], max_tokens=1, temperature=1.0, cache_salt="3", request_id="x")
        version = fleet.version
    assert version == report.version == 3 and report.digest == PUBLISHED.digest
    assert report.attested == {"resident": 1, "as_consumed": 1}
    assert report.paused_s >= report.pause_s + report.update_s + report.attest_s
    for index, engine in enumerate(engines):
        assert engine.paths() == [
            "/pause?mode=keep&clear_cache=false",
            "/start_weight_update",
            "/update_weights",
            "/collective_rpc",
            "/finish_weight_update",
            "/collective_rpc",
            "/resume",
        ]
        assert engine.asked[2][1] == {
            "update_info": {"path": PUBLISHED.path, "version": 3, "engine": f"engine {index}"}
        }
        assert engine.asked[4][1] == {"weight_version": "3"}
        assert engine.calls() == ["untaken", "attested"]
    assert router.paths() == ["/inference/v1/generate"]


@pytest.mark.parametrize(
    ("held", "says"),
    [
        (
            HELD | {"b": ["fffffffffffffffe", "as_consumed"]},
            r"engine 1: tensor 'b' \(attested as_consumed\) differs from",
        ),
        ({"a": HELD["a"]}, r"engine 1: tensor 'b' is missing after published version 3"),
        (
            HELD | {"c": HELD["a"]},
            r"engine 1: tensor 'c' \(attested resident\) is not part of published version 3",
        ),
        ({}, r"engine 1: tensor 'a' is missing after published version 3 \(1 more like it\)"),
    ],
)
async def test_an_engine_with_other_weights_ends_the_run_by_tensor_and_stays_paused(held, says):
    engines = [StandIn(), StandIn(held=held)]

    async with served(engines) as urls, EnginePool(urls, urls[0]) as fleet:
        with pytest.raises(UpdateFailed, match=says) as failed:
            await fleet.update(PUBLISHED)
        assert isinstance(failed.value, RunFailed)
        assert fleet.version == START_VERSION
    assert "/resume" not in engines[1].paths()


async def test_a_failed_load_is_told_in_the_engines_words_and_all_engines_are_waited_for():
    engines = [StandIn(untaken=["tensor 'q' is cut off"]), StandIn()]

    async with served(engines) as urls, EnginePool(urls, urls[0]) as fleet:
        with pytest.raises(
            UpdateFailed, match=r"engine 0 did not take version 3: tensor 'q' is cut off"
        ):
            await fleet.update(PUBLISHED)
    assert (
        engines[0].calls() == ["untaken", "give_up_update"]
        and "/finish_weight_update" not in engines[0].paths()
    )
    assert "/finish_weight_update" in engines[1].paths()


async def test_an_update_that_an_engine_answers_with_an_error_is_told_in_its_words():
    engines = [
        StandIn(fail={"/update_weights": (500, {"error": {"message": "the engine core died"}})}),
        StandIn(),
    ]

    async with served(engines) as urls, EnginePool(urls, urls[0]) as fleet:
        with pytest.raises(
            UpdateFailed,
            match=r"engine 0: /update_weights failed: the engine core died \(HTTP 500\)",
        ):
            await fleet.update(PUBLISHED)
    assert "/finish_weight_update" in engines[1].paths()


def test_several_engines_without_a_router_are_refused():
    with pytest.raises(OrreryError, match=r"2 engines need a router"):
        EnginePool(["http://a", "http://b"])
    with pytest.raises(OrreryError, match=r"no engine"):
        EnginePool([])


def test_equal_fingerprints_compare_silently():
    compare(3, {"a": 1}, {"a": TensorAttestation(1, "resident")}, "engine 0")


# Lost engines that return


class Trainer:
    """The trainer's leases, and the orchestrator's end of them. It publishes version 3 first."""

    def __init__(self):
        self.table = LeaseTable()
        self.leases = LeaseClient(lambda request: self.leases.reported(self.table.apply(request)))

    def publish(self, folder, version=3):
        folder.mkdir(exist_ok=True)
        self.table.open(version)
        return Published(version, str(folder), PUBLISHED.fingerprints, PUBLISHED.digest)

    def step(self):
        self.table.settle(3, 20, lambda: None)


@dataclass
class Engines:
    """Stand-ins for two engines, their router, and the restarted second engine."""

    ctx: RoleContext
    fleet: EnginePool
    urls: list[str]
    stand_ins: list[StandIn]

    def start_again(self, incarnation=1):
        """Publish the new process's address, as the launcher's restart does."""
        port = int(self.urls[3].rpartition(":")[2])
        rendezvous.publish(
            RoleContext("inference", self.ctx.run_dir, "rl", 1, 1, port, incarnation), self.urls[3]
        )

    def waits(self):
        return {wait.what for wait in read_health(self.ctx.run_dir, "rl")["orchestrator.0"].waits}

    def rows(self, event):
        return [
            row
            for row in read(self.ctx.run_dir / "metrics" / "orchestrator.0.jsonl")
            if row.get("event") == event
        ]


@pytest.fixture
def ctx(tmp_path, monkeypatch):
    monkeypatch.setattr("orrery.runtime.network._token", "t")
    monkeypatch.setattr(recovery_module, "TEND_S", 0.01)
    ctx = RoleContext("orchestrator", tmp_path, "rl", 0, 1, 0)
    yield ctx
    ctx.metrics.close()


@pytest.fixture
def lossy(ctx):
    """`lossy(*stand_ins)` yields Engines over engine 0, engine 1, router and engine 1 once more."""

    @asynccontextmanager
    async def start(*stand_ins, trainer=None):
        leases = trainer and trainer.leases
        async with (
            served(stand_ins) as urls,
            EnginePool(urls[:2], urls[2], restarting=ctx, model="adapter", leases=leases) as fleet,
            asyncio.timeout(20),
        ):
            yield Engines(ctx, fleet, urls, stand_ins)

    return start


LOST = {"/metrics": (500, {}), "/health": (503, {})}  # a lost stand-in's answers


async def back_without_a_version(engines, folder, lost, trainer):
    """Both engines hold version 3; engine 1 is lost and returns when that version is gone."""
    await engines.fleet.update(trainer.publish(folder))
    lost.fail |= LOST
    await engines.fleet.metrics()
    assert engines.waits() == {"inference.1 to serve again"}
    trainer.step()  # an evaluation keeps version 3
    engines.start_again()
    await until(lambda: engines.waits() == set())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


async def test_an_engine_that_hangs_in_an_update_is_fenced_and_updated_before_the_router_has_it(
    lossy, tmp_path, monkeypatch
):
    monkeypatch.setattr(client_module, "LOAD_TIMEOUT_S", 0.3)
    stand_ins = [StandIn(), StandIn(hang={"/update_weights"}), StandIn(), StandIn()]

    async with lossy(*stand_ins) as engines:
        fleet = engines.fleet
        report = await fleet.update(PUBLISHED)
        assert report.version == 3 and engines.stand_ins[0].paths()[-1] == "/resume", (
            "the other one goes on"
        )
        assert fleet.registry.at(Phase.HEALTHY) == [0] and fleet.registry.at(Phase.FENCED) == [1]
        [asked] = process_control.fenced(tmp_path, "rl", 1)
        assert (asked.name, asked.incarnation) == (
            "inference.1",
            0,
        ) and "did not finish /update_weights within 0.3 s" in asked.why
        engines.start_again()
        await until(lambda: fleet.registry.at(Phase.HEALTHY) == [0, 1])
        assert "/resume" not in engines.stand_ins[1].paths()
    assert stand_ins[3].paths()[0] == "/pause?mode=keep&clear_cache=false"
    assert stand_ins[3].paths()[2:] == [
        "/update_weights",
        "/collective_rpc",
        "/finish_weight_update",
        "/collective_rpc",
        "/resume",
    ]
    assert stand_ins[2].paths() == [
        f"/remove_worker?url={engines.urls[1]}",
        f"/add_worker?url={engines.urls[3]}",
    ]
    [lost], [back] = engines.rows("engine_fenced"), engines.rows("engine_healthy")
    assert (lost["engine"], back["engine"], back["version"], back["incarnation"]) == (1, 1, 3, 1)


async def test_a_request_that_fails_with_its_engine_is_engine_gone_and_one_that_fails_alone_is_not(
    lossy,
):
    stand_ins = [
        StandIn(),
        StandIn(),
        StandIn(fail={"/inference/v1/generate": (500, {"error": "sent to nobody"})}),
        StandIn(),
    ]
    request = {"max_tokens": 1, "temperature": 1.0, "cache_salt": "0", "request_id": "r"}

    async with lossy(*stand_ins) as engines:
        with pytest.raises(GenerationFailed, match="sent to nobody"):
            await engines.fleet.generate([1], **request)
        assert engines.fleet.registry.at(Phase.HEALTHY) == [0, 1]
        stand_ins[1].fail["/health"] = (503, {})
        with pytest.raises(EngineGone, match=r"sent to nobody.*engine 1 is unhealthy"):
            await engines.fleet.generate([1], share="group", **request)
        assert (await engines.fleet.metrics()).keys() == {0}
        engines.start_again()
        await until(lambda: engines.fleet.registry.at(Phase.HEALTHY) == [0, 1])
        assert "/pause?mode=keep&clear_cache=false" not in stand_ins[3].paths(), (
            "no version is wanted yet but the one that it starts with"
        )


async def test_a_rollout_that_is_cancelled_while_it_has_engines_fenced_leaves_none_half_fenced(
    lossy, tmp_path
):
    told = threading.Event()
    router = StandIn(
        fail={"/inference/v1/generate": (500, {"error": "x"})},
        before={"/remove_worker": lambda _: told.wait(20)},
    )
    stand_ins = [
        StandIn(fail={"/health": (503, {})}),
        StandIn(fail={"/health": (503, {})}),
        router,
        StandIn(),
    ]

    async with lossy(*stand_ins) as engines:
        fleet = engines.fleet
        try:
            asking = asyncio.create_task(
                fleet.generate([1], max_tokens=1, temperature=1.0, cache_salt="0", request_id="r")
            )
            await until(lambda: len(router.paths()) == 2)
            asking.cancel()
            assert [
                type(error) for error in await asyncio.gather(asking, return_exceptions=True)
            ] == [asyncio.CancelledError]
        finally:
            told.set()
        await until(lambda: len(router.paths()) == 3)
        assert fleet.registry.at(Phase.FENCED) == [0, 1]
        assert {one.name for one in process_control.fenced(tmp_path, "rl", 1)} == {
            "inference.0",
            "inference.1",
        }
        assert router.paths()[1:] == [f"/remove_worker?url={url}" for url in engines.urls[:2]]


async def test_an_engine_that_is_lost_while_the_router_adds_it_is_dropped_after_that(lossy):
    dropped = threading.Event()
    router = StandIn(before={"/add_worker": lambda _: dropped.wait(20)})
    stand_ins = [StandIn(), StandIn(fail=dict(LOST)), router, StandIn()]

    async with lossy(*stand_ins) as engines:
        fleet, url = engines.fleet, engines.urls[3]
        try:
            await fleet.metrics()
            engines.start_again()
            await until(lambda: f"/add_worker?url={url}" in router.paths())
            stand_ins[3].fail |= LOST
            await fleet.metrics()
            assert router.paths().count(f"/remove_worker?url={url}") == 1, (
                "who dies is dropped at once"
            )
        finally:
            dropped.set()
        await until(lambda: router.paths().count(f"/remove_worker?url={url}") == 2)
        assert fleet.registry.at(Phase.FENCED) == [1] and (await fleet.metrics()).keys() == {0}


async def test_an_engine_that_the_router_does_not_drop_is_started_again_all_the_same(
    lossy, tmp_path
):
    lost = StandIn(fail=dict(LOST))
    stand_ins = [StandIn(), lost, StandIn(fail={"/remove_worker": (500, {})}), StandIn()]

    async with lossy(*stand_ins) as engines:
        with pytest.raises(RunFailed, match="router: /remove_worker"):
            await engines.fleet.metrics()
        assert [one.name for one in process_control.fenced(tmp_path, "rl", 1)] == ["inference.1"]


async def test_where_no_engine_is_left_requests_wait_and_an_update_is_over_when_one_is_back(
    lossy,
):
    stand_ins = [StandIn(fail={"/pause": (500, {}), "/health": (503, {})}) for _ in range(2)] + [
        StandIn(),
        StandIn(),
    ]

    async with lossy(*stand_ins) as engines:
        fleet = engines.fleet
        assert await fleet.metrics()
        stand_ins[0].fail["/metrics"] = stand_ins[1].fail["/metrics"] = (500, {})
        assert await fleet.metrics() == {} and not fleet.is_serving
        updating = asyncio.create_task(fleet.update(PUBLISHED))
        asking = asyncio.create_task(
            fleet.generate(
                [1], max_tokens=1, temperature=1.0, cache_salt="3", request_id="b", timeout_s=2.0
            )
        )
        await asyncio.sleep(2.1)
        assert not updating.done() and not asking.done(), "a request's time begins when it is sent"
        engines.start_again()
        assert (await updating).version == 3 and len((await asking).token_ids) == 2
        assert fleet.registry.at(Phase.HEALTHY) == [1]
        await fleet.engines[1].generate(
            [1], max_tokens=1, temperature=1.0, cache_salt="3", request_id="c"
        )
        for asked in (stand_ins[2].asked[-1], stand_ins[3].asked[-1]):
            assert asked[0] == "/inference/v1/generate" and asked[1]["model"] == "adapter"


async def test_an_update_that_every_engine_refuses_ends_the_run(lossy, tmp_path):
    stand_ins = [
        StandIn(untaken=["tensor 'q' is cut off"]),
        StandIn(untaken=["tensor 'q' is cut off"]),
        StandIn(),
        StandIn(),
    ]

    async with lossy(*stand_ins) as engines:
        with pytest.raises(UpdateFailed, match=r"tensor 'q' is cut off"):
            await engines.fleet.update(PUBLISHED)
        assert not process_control.fenced(tmp_path, "rl", 1)


async def test_engines_that_die_over_an_update_are_started_again_whatever_they_said_of_it(lossy):
    dying = {
        "fail": {
            "/update_weights": (500, {"error": {"message": "cancelled"}}),
            "/health": (503, {}),
        }
    }
    stand_ins = [StandIn(**dying), StandIn(**dying), StandIn(), StandIn()]

    async with lossy(*stand_ins) as engines:
        updating = asyncio.create_task(engines.fleet.update(PUBLISHED))
        await until(lambda: engines.fleet.registry.at(Phase.FENCED) == [0, 1])
        engines.start_again()
        assert (await updating).version == 3
        assert all("is unhealthy" in row["why"] for row in engines.rows("engine_fenced"))


async def test_other_weights_than_those_published_end_the_run_whatever_may_be_started_again(lossy):
    async with lossy(StandIn(), StandIn(held={"a": HELD["a"]}), StandIn(), StandIn()) as engines:
        with pytest.raises(WeightsDiffer, match="engine 1: tensor 'b' is missing"):
            await engines.fleet.update(PUBLISHED)


async def test_an_engine_that_stays_away_ends_the_run_by_its_name(lossy, monkeypatch):
    monkeypatch.setattr(recovery_module, "RETURN_S", 0.2)
    stand_ins = [StandIn(), StandIn(), StandIn(), StandIn()]

    async with lossy(*stand_ins) as engines:
        stand_ins[1].fail |= LOST
        await engines.fleet.metrics()
        with pytest.raises(
            RunFailed,
            match=r"engine 1 did not serve again within 0\.2 s \(engine 1 is unhealthy",
        ):
            while True:
                engines.fleet.check()
                await asyncio.sleep(0.01)


# Direct wires

ALONG = f"transfer 1 {ELSEWHERE}: trainer 0 did not send its slices"


@pytest.mark.parametrize(
    "workers",
    [[ALONG], [None, ALONG]],
    ids=["of one worker", "of two, one of which has everything"],
)
async def test_an_interrupted_engine_gets_the_version_without_the_lost_one_under_one_lease(
    lossy, tmp_path, workers
):
    folder, seen, trainer = tmp_path / "wire", [], Trainer()

    def look(body):
        number = body["update_info"]["transfer"]
        seen.append((trainer.table._leased, trainer.table.transfer(number).engines))
        if len(seen) == 1:  # the lost engine is reported, so no engine waits for it
            while trainer.table.transfer(number):
                time.sleep(0.01)
            assert trainer.table._leased == 3

    def end(body):
        while not seen:
            time.sleep(0.01)
        time.sleep(0.2)

    stand_ins = [
        StandIn(
            untaken=[None] * len(workers),
            untaken_at_first=[workers],
            before={"/update_weights": look},
        ),
        StandIn(
            fail={"/update_weights": (500, {}), "/health": (503, {})},
            before={"/update_weights": end},
        ),
        StandIn(),
        StandIn(),
    ]

    async with lossy(*stand_ins, trainer=trainer) as engines:
        fleet = engines.fleet
        report = await fleet.update(trainer.publish(folder))
        assert report.version == 3 and report.update_s < 0.2 <= report.paused_s, (
            "it was paused through both takes"
        )
        assert fleet.registry.at(Phase.HEALTHY) == [0] and fleet.registry.at(Phase.FENCED) == [1]
        assert [engines for _, engines in seen] == [
            ("engine 0", "engine 1"),
            ("engine 0",),
        ] and seen[0][0] == seen[1][0]
        assert engines.stand_ins[0].paths()[-1] == "/resume"
        assert engines.stand_ins[0].calls() == ["untaken", "give_up_update", "untaken", "attested"]
        assert engines.stand_ins[0].paths().count("/finish_weight_update") == 1
        engines.start_again()
        await until(lambda: fleet.registry.at(Phase.HEALTHY) == [0, 1])
        await until(lambda: trainer.table._leased is None)


async def test_an_engine_may_be_interrupted_while_another_is_asked_for_its_health(lossy, tmp_path):
    first, lost = StandIn(untaken_at_first=[[ALONG]]), StandIn(fail=dict(LOST))
    lost.fail["/update_weights"] = 500, {}

    def await_health(body):
        while "/health" not in lost.paths():
            time.sleep(0.01)

    def await_interruption(body):
        while "give_up_update" not in first.calls():
            time.sleep(0.01)
        time.sleep(0.1)

    first.before["/update_weights"] = await_health
    lost.before["/health"] = await_interruption
    trainer = Trainer()
    async with lossy(first, lost, StandIn(), StandIn(), trainer=trainer) as engines:
        fleet = engines.fleet
        assert (await fleet.update(trainer.publish(tmp_path / "wire"))).version == 3
        assert fleet.registry.at(Phase.HEALTHY) == [0] and fleet.registry.at(Phase.FENCED) == [1]


async def test_a_retry_after_the_trainer_has_stepped_waits_for_the_next_version_unfenced(
    lossy, tmp_path
):
    late = f"transfer 2 {ELSEWHERE}: version 3 {GONE}"
    trainer = Trainer()
    stand_ins = [
        StandIn(untaken_at_first=[[ALONG], [late]]),
        StandIn(untaken_at_first=[[ALONG], [late]]),
        StandIn(),
        StandIn(),
    ]

    async with lossy(*stand_ins, trainer=trainer) as engines:
        fleet = engines.fleet
        assert await fleet.update(trainer.publish(tmp_path / "wire")) is None
        assert fleet.registry.at(Phase.STALE) == [0, 1] and all(
            "/resume" not in one.paths() for one in stand_ins
        ), "they stand paused"
        assert (await fleet.update(trainer.publish(tmp_path / "wire", version=4))).version == 4
        assert fleet.registry.at(Phase.HEALTHY) == [0, 1]


async def test_a_version_of_a_direct_wire_waits_for_an_engine_if_all_are_lost(lossy, tmp_path):
    trainer = Trainer()
    stand_ins = [StandIn(fail=dict(LOST)), StandIn(fail=dict(LOST)), StandIn(), StandIn()]

    async with lossy(*stand_ins, trainer=trainer) as engines:
        await engines.fleet.metrics()
        assert engines.fleet.registry.at(Phase.FENCED) == [0, 1]
        updating = asyncio.create_task(engines.fleet.update(trainer.publish(tmp_path / "wire")))
        done, _ = await asyncio.wait({updating}, timeout=0.3)
        assert not done
        engines.start_again()
        assert (await updating).version == 3
        assert engines.fleet.registry.at(Phase.HEALTHY) == [1]


async def test_a_take_that_fails_twice_though_nobody_is_lost_ends_the_run(lossy, tmp_path):
    trainer = Trainer()
    stand_ins = [StandIn(untaken=[ALONG]), StandIn(untaken=[None, ALONG]), StandIn(), StandIn()]

    async with lossy(*stand_ins, trainer=trainer) as engines:
        with pytest.raises(UpdateInterrupted, match="trainer 0 did not send its slices"):
            await engines.fleet.update(trainer.publish(tmp_path / "wire"))
        assert [stand_in.paths().count("/update_weights") for stand_in in stand_ins] == [2, 2, 0, 0]


async def test_an_engine_that_hangs_in_a_take_is_lost_soon_after_the_take_was_over_for_another(
    lossy, tmp_path, monkeypatch
):
    monkeypatch.setattr(pool_module, "ALONG_S", 0.2)
    trainer = Trainer()
    stand_ins = [
        StandIn(untaken_at_first=[[ALONG]]),
        StandIn(hang={"/update_weights"}),
        StandIn(),
        StandIn(),
    ]

    async with lossy(*stand_ins, trainer=trainer) as engines:
        fleet = engines.fleet
        assert (await fleet.update(trainer.publish(tmp_path / "wire"))).version == 3
        assert fleet.registry.at(Phase.HEALTHY) == [0]
        assert (
            "engine 1 was still in a weight transfer 0.2 s after another engine"
            in fleet.registry[1].why
        )


async def test_a_returning_engine_that_hangs_keeps_the_trainer_only_until_its_call_ends(
    lossy, tmp_path, monkeypatch
):
    monkeypatch.setattr(client_module, "LOAD_TIMEOUT_S", 0.5)
    trainer = Trainer()
    stand_ins = [StandIn(), StandIn(fail=dict(LOST)), StandIn(), StandIn(hang={"/update_weights"})]
    folder, request = tmp_path / "wire", {"max_tokens": 1, "temperature": 1.0, "cache_salt": "3"}

    async with lossy(*stand_ins, trainer=trainer) as engines:
        fleet = engines.fleet
        await fleet.metrics()
        assert (await fleet.update(trainer.publish(folder))).version == 3
        engines.start_again()
        await until(lambda: "/update_weights" in stand_ins[3].paths())
        stepping = asyncio.create_task(asyncio.to_thread(trainer.step))  # it waits for leases
        served = 0
        while not stepping.done():
            await fleet.generate([1], request_id=f"r{served}", **request)
            served += 1
        assert served and fleet.registry.at(Phase.HEALTHY) == [0]
        await until(lambda: fleet.registry.at(Phase.FENCED) == [1])
        assert "did not finish /update_weights within 0.5 s" in fleet.registry[1].why
        assert (await fleet.update(trainer.publish(folder, 4))).version == 4 and fleet.registry.at(
            Phase.HEALTHY
        ) == [0]


async def test_after_all_engines_were_lost_and_the_version_is_gone_the_update_is_over(
    lossy, tmp_path
):
    gone = {"/pause": (500, {}), "/health": (503, {})}
    trainer = Trainer()
    stand_ins = [StandIn(fail=dict(gone)), StandIn(fail=dict(gone)), StandIn(), StandIn()]

    async with lossy(*stand_ins, trainer=trainer) as engines:
        folder, fleet = tmp_path / "wire", engines.fleet
        updating = asyncio.create_task(fleet.update(trainer.publish(folder)))
        await until(lambda: fleet.registry.at(Phase.FENCED) == [0, 1])
        trainer.step()
        engines.start_again()
        assert await updating is None
        assert fleet.registry.at(Phase.STALE) == [1] and not fleet.is_serving
        assert (await fleet.update(trainer.publish(folder, 4))).version == 4 and fleet.registry.at(
            Phase.HEALTHY
        ) == [1]


async def test_an_update_whose_files_have_gone_while_no_engine_was_there_is_over_for_a_newer_one(
    lossy, tmp_path
):
    gone = {"/pause": (500, {}), "/health": (503, {})}
    stand_ins = [StandIn(fail=dict(gone)), StandIn(fail=dict(gone)), StandIn(), StandIn()]

    async with lossy(*stand_ins) as engines:
        folder, fleet = tmp_path / "version_3", engines.fleet
        folder.mkdir()
        updating = asyncio.create_task(
            fleet.update(Published(3, str(folder), FINGERPRINTS, PUBLISHED.digest))
        )
        await until(lambda: fleet.registry.at(Phase.FENCED) == [0, 1])
        folder.rmdir()
        engines.start_again()
        assert await updating is None
        assert fleet.registry.at(Phase.STALE) == [1] and not fleet.is_serving


async def test_the_clock_of_a_returned_engine_stands_while_it_waits_for_the_next_version(
    lossy, tmp_path, monkeypatch
):
    back, seen = {"inference.1 to serve again"}, []
    trainer = Trainer()
    stand_ins = [StandIn(), StandIn(), StandIn(), StandIn()]

    async with lossy(*stand_ins, trainer=trainer) as engines:
        folder, fleet = tmp_path / "wire", engines.fleet
        await back_without_a_version(engines, folder, stand_ins[1], trainer)
        assert fleet.registry.at(Phase.STALE) == [1] and fleet.is_serving
        monkeypatch.setattr(recovery_module, "RETURN_S", 0.0)
        await asyncio.sleep(0.1)
        fleet.check()
        monkeypatch.setattr(recovery_module, "RETURN_S", 600.0)
        stand_ins[3].before["/update_weights"] = lambda _: seen.append(engines.waits())
        assert (await fleet.update(trainer.publish(folder, 4))).version == 4
        await until(lambda: fleet.registry.at(Phase.HEALTHY) == [0, 1])
        assert seen == [back] and engines.waits() == set(), (
            "it has a version to take, and has taken it"
        )
        assert [row["version"] for row in engines.rows("engine_healthy")] == [4]


async def test_the_clock_of_a_waiting_engine_begins_anew_when_no_engine_serves(
    lossy, tmp_path, monkeypatch
):
    trainer = Trainer()
    stand_ins = [StandIn(), StandIn(), StandIn(), StandIn()]

    async with lossy(*stand_ins, trainer=trainer) as engines:
        fleet = engines.fleet
        await back_without_a_version(engines, tmp_path / "wire", stand_ins[1], trainer)
        stand_ins[0].fail |= LOST
        await fleet.metrics()
        assert not fleet.is_serving
        await until(
            lambda: engines.waits() == {"inference.0 to serve again", "inference.1 to serve again"}
        )
        monkeypatch.setattr(recovery_module, "RETURN_S", 0.0)
        with pytest.raises(RunFailed, match=r"engine [01] did not serve again within 0 s"):
            while True:
                fleet.check()
                await asyncio.sleep(0.01)


async def test_without_restarts_the_first_loss_ends_the_run_in_the_words_of_the_one_at_fault(
    tmp_path,
):
    trainer = Trainer()
    stand_ins = [StandIn(untaken=[ALONG]), StandIn(untaken=[ALONG, "cut off"])]

    async with served(stand_ins) as urls, EnginePool(urls, urls[0]) as fleet:
        with pytest.raises(UpdateFailed, match="engine 1 did not take version 3: cut off"):
            await fleet.update(trainer.publish(tmp_path / "wire"))
    assert stand_ins[0].paths().count("/update_weights") == 1


async def test_without_a_prefill_engine_requests_wait_and_its_readers_learn_of_its_end(
    ctx, tmp_path
):
    prefill, decode, again = stand_ins = [StandIn(), StandIn(), StandIn()]

    def listen(incarnation, url):
        info = {"kv_engine_id": f"incarnation {incarnation}", "kv_bootstrap": url}
        rendezvous.publish(
            RoleContext("inference", tmp_path, "rl", 0, 1, 0, incarnation), url, **info
        )
        return info

    def ask():
        return fleet.generate([1], max_tokens=2, temperature=1.0, cache_salt="0", request_id="r")

    async with (
        served(stand_ins) as urls,
        EnginePool(urls[:2], restarting=ctx, handovers=[listen(0, urls[0])]) as fleet,
        asyncio.timeout(20),
    ):
        prefill.fail |= {
            "/inference/v1/generate": (500, {"error": "dying"}),
            "/health": (503, {}),
        }
        with pytest.raises(EngineGone, match=r"dying.*engine 0 is unhealthy"):
            await ask()
        assert not fleet.is_serving and (await fleet.metrics()).keys() == {1}
        waiting = asyncio.create_task(ask())
        await asyncio.sleep(0.1)
        assert not waiting.done() and "/collective_rpc" not in decode.paths(), (
            "it may write into its readers' blocks yet"
        )
        (tmp_path / "stages/rl/endpoints/inference.0.json").unlink()
        await until(lambda: "/collective_rpc" in decode.paths())
        assert decode.asked[-1][1] == {"method": "read_no_more", "args": ["incarnation 0"]}
        listen(1, urls[2])
        assert len((await waiting).token_ids) == 2
        await fleet.abort(["r"])
    assert "/abort_requests" in decode.paths() and "/abort_requests" not in again.paths()
    [asked] = [body for path, body in decode.asked if path == "/inference/v1/generate"]
    assert asked["kv_transfer_params"]["remote_engine_id"] == "incarnation 1"
