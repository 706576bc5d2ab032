"""Disaggregated prefill over NIXL and Mooncake with two real engines.

The decode engine also serves whole requests, as the reference.
"""

import asyncio
import itertools
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from direct_trainer import our_logprobs
from inference_servers import (
    EXCHANGE,
    MIXTURE,
    STAGE,
    await_published,
    family,
    make_module,
    make_run,
    start_role,
    stop,
    with_fleet,
)
from network_alone import alone_in_a_network

from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import load
from orrery.models.weights import named_hf_tensors
from orrery.orchestrator.engines.messages import START_VERSION, EngineGone, GenerationFailed
from orrery.orchestrator.engines.pool import Phase
from orrery.orchestrator.engines.requests import Address
from orrery.runtime.role_context import RoleContext
from orrery.wire.routed_experts import RouteShape, column
from orrery.wire.weight_wire import WeightPublisher

pytestmark = [pytest.mark.timeout(300), pytest.mark.engine, pytest.mark.slow]
torch.set_num_threads(1)

KINDS = {"nixl": {"kind": "nixl"}, "mooncake": {"kind": "mooncake", "protocol": "tcp"}}
MOST_UPDATES = MOST_ABORTS = 8
MEANWHILE = "meanwhile"  # the stage in whose folder engines publish that start early
# Six blocks and a part.
PROMPT = np.random.default_rng(3).integers(3, 48, 200).astype(np.int32)


@pytest.fixture(scope="module", params=KINDS)
def run_dir(request, tmp_path_factory):
    apart = {"prefill_replicas": 1, "kv_transfer": KINDS[request.param], "router": {"kind": "none"}}
    return make_run(
        tmp_path_factory.mktemp(request.param) / "run",
        MIXTURE,
        num_replicas=2,
        inference=apart,
        routed_experts=True,
    )


@pytest.fixture(scope="module")
def engines(run_dir):
    """Yield both server processes, their addresses, and the prefill engine's handover."""
    with (
        alone_in_a_network("Mooncake listens on every interface")
        if by_mooncake(run_dir)
        else nullcontext()
    ):
        processes = [start_role("orrery.inference", run_dir, index) for index in (0, 1)]
        try:
            urls = [
                await_published(run_dir, "inference", index, process)
                for index, process in enumerate(processes)
            ]
            yield (
                processes,
                urls,
                json.loads((run_dir / "stages/rl/endpoints/inference.0.json").read_text())["info"],
            )
        finally:
            for process in processes:
                stop(process)


def by_mooncake(run_dir):
    return load(run_dir / "manifest.json").inference.kv_transfer.kind == "mooncake"


@pytest.fixture(scope="module")
def publisher(engines):
    publisher = WeightPublisher(Path(f"/dev/shm/orrery-test-{os.getpid()}-apart"))
    yield publisher
    publisher.close()


def drive(engines, scenario, **options):
    return with_fleet(scenario, engines[1], handovers=[engines[2]], **options)


def ask(fleet, name, salt, prompt=PROMPT, max_tokens=24, **options):
    options = {
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "ignore_eos": True,
        "seed": 5,
        "routes_from": 0,
    } | options
    return fleet.generate(prompt, cache_salt=salt, request_id=name, **options)


def whole(fleet, name, salt, **options):
    """Send the same request to the decode engine alone."""
    return ask(fleet.engines[1], name, salt, **options)


def same(one, other):
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert one.versions.tolist() == other.versions.tolist()
    assert np.abs(one.logprobs - other.logprobs).max() <= 1e-5
    np.testing.assert_array_equal(routes_of(one), routes_of(other))


def routes_of(generation):
    """Return the expert choices of input tokens, from the first requested token on, all known."""
    start, end = (
        generation.routes[0].start,
        max(part.start + part.num_rows for part in generation.routes),
    )
    routes = column(end, generation.routes, RouteShape(num_layers=2, top_k=2, num_experts=4))[
        start:
    ]
    assert (routes < 4).all()
    return np.sort(routes, axis=-1)


def test_tokens_logprobs_and_routes_are_those_of_one_whole_engine_and_turns_meet_their_caches(
    engines,
):
    async def scenario(fleet):
        before = await fleet.metrics()
        apart = await ask(fleet, "apart", "a", session="r")
        after = await fleet.metrics()
        again = await ask(fleet, "again", "a", session="r")
        other_salt = await ask(fleet, "salt", "b", session="r")
        longer = np.concatenate([PROMPT, apart.token_ids, PROMPT[:30]])
        told = len(PROMPT) + len(apart.token_ids) - 1
        turn = await ask(fleet, "turn", "a", prompt=longer, session="r", routes_from=told)
        reference = await whole(fleet, "whole", "c")
        return (
            before,
            after,
            apart,
            again,
            other_salt,
            turn,
            reference,
            await whole(fleet, "w2", "c", prompt=longer, routes_from=told),
        )

    before, after, apart, again, other_salt, turn, reference, reference_turn = drive(
        engines, scenario
    )
    assert [part.num_rows for part in apart.routes] == [200, 24] and sum(
        part.num_rows for part in reference.routes
    ) == 223
    same(apart, reference)
    same(again, reference)
    same(turn, reference_turn)
    # One engine computed the prompt, the other sampled.
    assert after[0].generation_tokens_total - before[0].generation_tokens_total == 1
    assert after[1].generation_tokens_total - before[1].generation_tokens_total == 24
    assert (
        apart.cached_tokens,
        again.cached_tokens,
        other_salt.cached_tokens,
        turn.cached_tokens,
    ) == (0, 192, 0, 192)


def test_requests_in_hand_over_survive_an_update_that_waits_for_none_of_them(
    engines, run_dir, publisher
):
    manifest = load(run_dir / "manifest.json")
    module = make_module(manifest, seed=101)

    async def scenario(fleet):
        # An unread cache: the prefill engine holds its blocks until the lease ends.
        _, where = await fleet.disaggregated._prefill(
            fleet.disaggregated.peer(Address(0, 0)), PROMPT, "unread", 60.0, "u"
        )
        updated = asyncio.Event()
        answers = [[] for _ in range(12)]

        async def one_after_another(i):
            # Twelve lengths, so that an update meets requests in prefill, handover and sampling.
            while not updated.is_set():
                name, prompt = (
                    f"flight-{i}-{len(answers[i])}",
                    np.roll(PROMPT, 10 * i + len(answers[i])),
                )
                answers[i].append(
                    await ask(
                        fleet, name, "f", prompt=prompt, max_tokens=100 + 16 * i, session=str(i)
                    )
                )

        running = [asyncio.create_task(one_after_another(i)) for i in range(len(answers))]
        reports, took_s = [], []
        # An engine this small may be done with all that it samples before the pause reaches it:
        # then the next update shows more.
        while len(reports) < MOST_UPDATES and not any(
            len(set(each.versions.tolist())) > 1 for every in answers for each in every
        ):
            ended = [len(every) for every in answers]
            published = publisher.publish(len(reports) + 1, named_hf_tensors(module))
            begin = time.monotonic()
            reports.append(await fleet.update(published))
            took_s.append(time.monotonic() - begin)
            while any(
                len(every) <= before + 1 for every, before in zip(answers, ended, strict=True)
            ):
                await asyncio.sleep(0.01)
        updated.set()
        late = await fleet.engines[1].generate(
            PROMPT,
            max_tokens=8,
            temperature=1.0,
            cache_salt="u",
            request_id="unread",
            ignore_eos=True,
            kv_transfer=where,
        )
        await asyncio.gather(*running)
        return (
            reports,
            took_s,
            answers,
            late,
            await ask(fleet, "new", "1"),
            await whole(fleet, "new-whole", "x"),
        )

    reports, took_s, answers, late, new, reference = drive(engines, scenario)
    newest = len(reports)
    # Upstream: until the lease ends, 600 s and more.
    assert max(took_s) < 10 and max(report.pause_s for report in reports) < 5
    generations = [(each, 100 + 16 * i) for i, every in enumerate(answers) for each in every]
    for each, length in generations:
        assert len(each.token_ids) == length and (np.diff(each.versions) >= 0).all()
        assert set(each.versions.tolist()) <= {START_VERSION, *range(1, newest + 1)}
    assert any(len(set(each.versions.tolist())) > 1 for each, _ in generations)
    assert (late.versions == newest).all() and len(late.token_ids) == 8
    assert (new.versions == newest).all()
    same(new, reference)


def test_an_abort_reaches_a_request_wherever_it_is_and_no_block_stays_behind(engines):
    async def scenario(fleet):
        # An engine this small may be done before an abort reaches it.
        for attempt in range(MOST_ABORTS):
            name = f"decoding-{attempt}"
            decoding = asyncio.create_task(ask(fleet, name, "a", max_tokens=290, session="1"))
            while not fleet.disaggregated._prefilling:
                await asyncio.sleep(0)
            while fleet.disaggregated._prefilling:
                await asyncio.sleep(0.001)
            while not decoding.done():  # an abort that comes before the request is ignored
                await fleet.abort([name])
                await asyncio.wait({decoding}, timeout=0.01)
            if (await decoding).finish_reason == "abort":
                break
        # Between the engines: in or after prefill, before the first sampled token.
        between = asyncio.create_task(ask(fleet, "between", "b", session="2"))
        while "between" not in fleet.disaggregated._prefilling:
            await asyncio.sleep(0)
        await fleet.abort(["between"])
        cancelled = [
            asyncio.create_task(ask(fleet, f"cancelled-{i}", f"c{i}", session=str(i)))
            for i in range(6)
        ]
        for i, task in enumerate(cancelled):
            await asyncio.sleep(0.01 * i)
            task.cancel()
        outcomes = [
            await decoding,
            await between,
            *await asyncio.gather(*cancelled, return_exceptions=True),
        ]
        await fleet.disaggregated.close()
        end = time.monotonic() + 20
        while (
            any(each.kv_usage for each in (await fleet.metrics()).values())
            and time.monotonic() < end
        ):
            await asyncio.sleep(0.05)
        return outcomes, await fleet.metrics()

    (decoding, between, *cancelled), metrics = drive(engines, scenario)
    assert (
        decoding.finish_reason == between.finish_reason == "abort" and len(between.token_ids) == 0
    )
    assert any(isinstance(each, asyncio.CancelledError) for each in cancelled)
    assert [each.kv_usage for each in metrics.values()] == [0.0, 0.0]


def test_a_cache_that_cannot_be_read_fails_the_request(engines):
    nowhere = {
        "remote_engine_id": "of-an-engine-that-is-gone",
        "remote_port": 1,
        "remote_bootstrap_addr": "http://127.0.0.1:1",
    }

    async def scenario(fleet):
        _, where = await fleet.disaggregated._prefill(
            fleet.disaggregated.peer(Address(0, 0)), PROMPT, "lost", 60.0, "lost"
        )
        gone = where | {name: nowhere[name] for name in where.keys() & nowhere}
        with pytest.raises(GenerationFailed):
            await fleet.engines[1].generate(
                PROMPT,
                max_tokens=4,
                temperature=1.0,
                cache_salt="lost",
                request_id="lost",
                kv_transfer=gone,
                timeout_s=60,
            )
        await fleet.engines[1].generate(
            PROMPT,
            max_tokens=1,
            temperature=1.0,
            cache_salt="found",
            request_id="found",
            kv_transfer=where,
        )
        return await ask(fleet, "after", "after"), await whole(fleet, "after-whole", "x2")

    same(*drive(engines, scenario))


def test_engines_listen_on_loopback_only_but_for_mooncakes_own_sockets(engines, run_dir):
    listening = [
        {
            each.laddr.ip
            for member in family(process)
            for each in member.net_connections("inet")
            if each.status == psutil.CONN_LISTEN
        }
        for process in engines[0]
    ]
    assert listening[1] - {"0.0.0.0", "::"} == {"127.0.0.1"}
    assert bool(set.union(*listening) - {"127.0.0.1"}) == by_mooncake(run_dir)
    bootstrap = engines[2].get("kv_bootstrap", "")
    assert bootstrap.startswith("http://127.0.0.1:") == by_mooncake(run_dir)


@pytest.fixture
def again(engines, run_dir):
    """Yield `kill(index)`, which ends an engine, and `listen(index)`.

    `listen` publishes the address of the engine's next incarnation, already started.
    """
    running = engines[0]
    started = [
        start_role("orrery.inference", run_dir, index, stage=MEANWHILE, incarnation=1)
        for index in (0, 1)
    ]

    def kill(index):
        for member in family(running[index]):
            member.kill()
        running[index].wait()
        endpoint(run_dir, index).unlink()

    def listen(index):
        endpoint(run_dir, index, MEANWHILE).replace(endpoint(run_dir, index))

    try:
        for index, process in enumerate(started):
            await_published(run_dir, "inference", index, process, MEANWHILE)
        yield kill, listen
    finally:
        for process in started:
            stop(process)


def endpoint(run_dir, index, stage=STAGE):
    return run_dir / "stages" / stage / "endpoints" / f"inference.{index}.json"


def test_an_engine_that_is_killed_costs_its_own_requests_and_its_next_incarnation_takes_part_again(
    engines, run_dir, publisher, again
):
    kill, listen = again
    module = make_module(load(run_dir / "manifest.json"), seed=202)

    async def until(condition):
        async with asyncio.timeout(30):
            while not await condition():
                await asyncio.sleep(0.02)

    async def scenario(fleet):
        def freeze(index):
            for member in family(engines[0][index]):
                member.suspend()

        def start(name, count, **options):
            return [
                asyncio.create_task(
                    ask(fleet, f"{name}-{i}", f"{name}-{i}", session=str(i), **options)
                )
                for i in range(count)
            ]

        def usage(index):
            async def keeps_nothing():
                return (await fleet.engines[index].metrics()).kv_usage == 0.0

            return keeps_nothing

        async def prefilled():
            return (
                fleet.disaggregated._decode_of.owed_tokens[1] == 3 * len(PROMPT)
                and not fleet.disaggregated._prefilling
            )

        async def serves(*indices):
            return fleet.registry.at(Phase.HEALTHY) == list(indices)

        await fleet.update(publisher.publish(20, named_hf_tensors(module)))

        # Stop the prefill engine while some of its caches are read and others made, then kill it.
        # UCX decides whether a read needs a live engine. A dead engine cannot be read.
        producer, consumer = map(fleet.disaggregated.peer, (Address(0, 0), Address(1, 0)))
        caches = [
            (await fleet.disaggregated._prefill(producer, PROMPT, f"read-{i}", 60.0, f"read-{i}"))[
                1
            ]
            for i in range(3)
        ]
        sampling = start("sampling", 2, max_tokens=290)

        async def samples():
            return (await consumer.client.metrics()).running + sum(
                task.done() for task in sampling
            ) >= 2

        await until(samples)
        freeze(0)
        reading = [
            asyncio.create_task(
                fleet.disaggregated._decode(producer, consumer, where, PROMPT,
                                    request_id=f"read-{i}", max_tokens=4, temperature=1.0,
                                    cache_salt=f"read-{i}", ignore_eos=True)
            )
            for i, where in enumerate(caches[:2])
        ]  # fmt: skip
        prefilling = start("prefilling", 3)
        await asyncio.wait(reading, timeout=1.0)
        kill(0)
        with pytest.raises(GenerationFailed):
            await consumer.client.generate(
                PROMPT,
                request_id="late",
                max_tokens=4,
                temperature=1.0,
                cache_salt="late",
                ignore_eos=True,
                kv_transfer=caches[2],
            )
        assert all(
            isinstance(each, EngineGone)
            for each in await asyncio.gather(*prefilling, return_exceptions=True)
        )
        for each in await asyncio.gather(*reading, return_exceptions=True):
            assert isinstance(each, OrreryError) or (
                not by_mooncake(run_dir) and len(each.token_ids) == 4
            ), each
        assert [len(each.token_ids) for each in await asyncio.gather(*sampling)] == [290, 290]
        await until(usage(1))
        waiting = start("waiting", 1)
        await asyncio.sleep(0.3)
        assert not waiting[0].done() and not fleet.is_serving
        await fleet.update(publisher.publish(21, named_hf_tensors(module)))
        listen(0)
        await until(lambda: serves(0, 1))
        same(
            (await asyncio.gather(*waiting))[0],
            await whole(fleet, "waiting-whole", "waiting-whole"),
        )

        # The decode engine: it stands still before it reads, and is killed.
        freeze(1)
        unread = start("unread", 3)
        await until(prefilled)
        assert not await usage(0)()
        kill(1)
        lost = await asyncio.gather(*unread, return_exceptions=True)
        assert all(isinstance(each, EngineGone) for each in lost), lost
        await until(usage(0))
        assert not fleet.is_serving
        listen(1)
        await until(lambda: serves(0, 1))
        apart = await ask(fleet, "back", "back")
        assert (apart.versions == 21).all()
        same(apart, await whole(fleet, "back-whole", "back-whole"))
        await until(usage(0))
        await until(usage(1))

    ctx = RoleContext("orchestrator", run_dir, STAGE, 0, 1, 0)
    try:
        drive(engines, scenario, restarting=ctx)
    finally:
        ctx.metrics.close()


def test_prefill_and_decode_of_different_shapes_exchange_caches_between_their_ranks(tmp_path):
    """One engine of two ranks prefills. One of two "nodes", with a rank each, decodes.

    Both have a host tier, from which the prefill engine reads prompts again. The decode engine
    computes the few tokens of a next turn itself.
    """
    wide = {"data_parallel": 2, "nodes_per_replica": 2, "expert_parallel": True}
    shape = {"nodes_per_replica": 1, "data_parallel": 2, "tensor_parallel": 1, "environment": {}}
    shape |= EXCHANGE
    shape |= {"expert_parallel": True, "enforce_eager": True, "kv_cache_bytes": 1 << 24}
    shape |= {"max_num_sequences": 8, "max_batched_tokens": 300}
    apart = {"prefill_replicas": 1, "prefill": shape, "kv_transfer": KINDS["nixl"]}
    apart["kv_offload"] = {"kind": "tiers", "host_bytes": 1 << 25, "disk_bytes": 0}
    run_dir = make_run(
        tmp_path / "run", MIXTURE, 2, wide | apart | {"router": {"kind": "none"}}, True
    )
    module = make_module(load(run_dir / "manifest.json"), seed=7)
    parts = [("orrery.inference", 0), ("orrery.inference", 1), ("orrery.inference.headless", 0)]
    processes = [start_role(module, run_dir, index) for module, index in parts]

    prompts = [np.append(PROMPT, 3 + session) for session in range(4)]

    async def turn(fleet, name, prompts, **options):
        asked = [ask(fleet, f"{name}-{i}", "0", each, **options) for i, each in enumerate(prompts)]
        answers = await asyncio.gather(*asked)
        for prompt, found in zip(prompts, answers, strict=True):
            difference = our_logprobs(module, prompt, found, 1.0) - found.logprobs
            assert np.abs(difference).max() <= 1e-4
            told = options.get("routes_from", 0)
            assert len(routes_of(found)) == len(prompt) + len(found.token_ids) - 1 - told
        return answers

    async def scenario(fleet):
        await turn(fleet, "first", prompts)
        async with asyncio.timeout(30):  # blocks reach the tier beside the work
            for attempt in itertools.count():
                await fleet.engines[0]._control("/reset_prefix_cache")
                again = await turn(fleet, f"again-{attempt}", prompts)
                if all(found.cached_tokens >= 192 for found in again):
                    break
        before = (await fleet.metrics())[0]
        assert before.external_hit_tokens_total >= 192
        both = zip(prompts, again, strict=True)
        longer = [np.concatenate([prompt, found.token_ids, [5, 6]]) for prompt, found in both]
        told = len(longer[0]) - 3
        for found in await turn(fleet, "next", longer, routes_from=told):
            assert found.cached_tokens >= 192
        assert (await fleet.metrics())[0].generation_tokens_total == before.generation_tokens_total

    try:
        urls = [
            await_published(run_dir, "inference", index, processes[index]) for index in range(2)
        ]
        local = {"max_local_prefill_tokens": 64}
        with_fleet(scenario, urls, handovers=[{}], num_ranks=[2, 2], **local)
    finally:
        for process in processes:
            stop(process)
