"""A real vLLM on CPU with two data-parallel engine cores of two tensor-parallel workers each.

Transfers of weights fail in some workers.
"""

import asyncio
import time

import numpy as np
import psutil
import pytest
import torch
from direct_trainer import direct_trainer, end_half_way, our_logprobs
from inference_servers import (
    DENSE,
    await_published,
    family,
    in_flight,
    in_shared_memory,
    listening,
    make_module,
    make_run,
    start_role,
    stop,
    with_fleet,
)

from orrery.manifest.identity import load
from orrery.orchestrator.engines.client import update_engine
from orrery.orchestrator.engines.messages import EngineGone, UpdateFailed, UpdateInterrupted
from orrery.runtime import run_directory
from orrery.wire.weight_wire.coordinator import ARRIVAL_S

pytestmark = [pytest.mark.timeout(150), pytest.mark.engine]
torch.set_num_threads(1)

PROMPT = [3, 4, 5, 6, 7, 8]
NUM_WORKERS = 4
FLIGHT_TOKENS = 200
TOLERANCE = 1e-4  # as for an engine of one worker


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return make_run(
        tmp_path_factory.mktemp("wide") / "run",
        DENSE,
        inference={"tensor_parallel": 2, "data_parallel": 2, "max_model_len_tokens": 1024},
    )


@pytest.fixture(scope="module")
def server(run_dir):
    of_a_start_that_was_killed = (
        run_directory.SHARED_MEMORY
        / f"vllm_offload_{run_directory.role_memory_prefix(run_dir, 'inference.0')}4.mmap"
    )
    of_another_engine = (
        run_directory.SHARED_MEMORY
        / f"vllm_offload_{run_directory.role_memory_prefix(run_dir, 'inference.00')}4.mmap"
    )
    for path in (of_a_start_that_was_killed, of_another_engine):
        path.write_bytes(bytes(1))
    try:
        process = start_role("wide_engine", run_dir, 0)
        yield process, await_published(run_dir, "inference", 0, process)
        stop(process)
        assert of_another_engine.stat().st_size == 1
    finally:
        stop(process)
        assert run_directory.remove_memory(run_directory.memory_prefix(run_dir)) == [
            of_another_engine
        ]


@pytest.fixture
def module(run_dir, request):
    """Return the weights of a version, different in every test."""
    return make_module(load(run_dir / "manifest.json"), seed=sum(request.node.name.encode()))


async def sample(fleet, request_id, **options):
    options = {"max_tokens": 24, "temperature": 0.7, "cache_salt": request_id} | options
    return await fleet.generate(PROMPT, request_id=request_id, **options)


async def holds_nothing(engine):
    """Return whether no worker attests a version."""
    held = await engine._ask_workers("fingerprints")
    assert len(held) == NUM_WORKERS
    return not any(held) and not (await engine.attested()).how


async def takes_it_again(fleet, claimed, module):
    """The engine alone takes the version again, and serves it from every rank."""
    [engine] = fleet.engines
    again = await fleet._leases.start_transfer(claimed, [engine.name])
    report = await update_engine(engine, again)
    fleet._leases.release()
    assert report.version == claimed.version and report.digest == claimed.digest
    assert {
        name: each.fingerprint for name, each in (await engine.fingerprints()).items()
    } == claimed.fingerprints
    for after in await asyncio.gather(
        *(sample(fleet, f"after-{claimed.version}-{i}") for i in range(2))
    ):
        assert (after.versions == claimed.version).all()
        assert np.abs(our_logprobs(module, PROMPT, after, 0.7) - after.logprobs).max() <= TOLERANCE


def test_all_its_processes_listen_on_loopback_only(server):
    assert len(family(server[0])) > NUM_WORKERS
    assert listening(server[0]) == {"127.0.0.1"}


def test_workers_sleep_after_a_request(server):
    def seconds():
        times = [process.cpu_times() for process in family(server[0])]
        return sum(time.user + time.system for time in times)

    async def scenario(fleet):
        await sample(fleet, "before")
        begin_s = seconds()
        time.sleep(0.6)
        assert seconds() - begin_s < 0.3

    with_fleet(scenario, [server[1]])


def test_a_transfer_that_another_engine_ends_fails_in_all_workers_and_is_repeated(
    server, module, tmp_path
):
    async def scenario(fleet):
        [engine] = fleet.engines
        published = await asyncio.to_thread(publish, 1, module)
        claimed = await publish.leases.start_transfer(published, ["engine 0", "engine 1"])
        flights = await in_flight(
            fleet,
            *[
                lambda part: sample(
                    fleet, f"flight-{part}", max_tokens=FLIGHT_TOKENS, ignore_eos=True
                )
            ]
            * 2,
        )
        await engine.pause()
        ending = asyncio.to_thread(end_half_way, claimed, "engine 1")
        taken, _ = await asyncio.gather(
            engine.update_weights(claimed), ending, return_exceptions=True
        )
        assert isinstance(taken, UpdateInterrupted), taken
        assert await holds_nothing(engine)
        await takes_it_again(fleet, claimed, module)
        for flight in await asyncio.gather(*flights):
            assert flight.finish_reason == "length" and len(flight.token_ids) == FLIGHT_TOKENS
            assert (
                set(flight.versions.tolist()) == {-1, 1} and (np.diff(flight.versions) >= 0).all()
            )

    with direct_trainer(tmp_path / "wire") as publish:
        with_fleet(scenario, [server[1]], leases=publish.leases)


@pytest.mark.parametrize(
    ("whose", "error", "says"),
    [
        ("another's", UpdateInterrupted, "failed elsewhere"),
        (
            "tensor 'q' does not fit",
            UpdateFailed,
            "engine 0 did not take version 2: tensor 'q' does not fit$",
        ),
    ],
    ids=["by another's doing", "by its own"],
)
def test_what_one_worker_did_not_receive_no_worker_holds(
    server, run_dir, module, tmp_path, whose, error, says
):
    """The last one fails when it has everything, as all others have."""

    async def scenario(fleet):
        [engine] = fleet.engines
        published = await asyncio.to_thread(publish, 2, module)
        claimed = await publish.leases.start_transfer(published, ["engine 0"])
        await engine.pause()
        (run_dir / f"fault.{NUM_WORKERS - 1}").write_text(whose)
        with pytest.raises(UpdateFailed, match=says) as failed:
            await engine.update_weights(claimed)
        assert type(failed.value) is error
        assert await holds_nothing(engine)
        await takes_it_again(fleet, claimed, module)

    with direct_trainer(tmp_path / "wire") as publish:
        with_fleet(scenario, [server[1]], leases=publish.leases)


def test_a_worker_that_does_not_come_to_a_take_keeps_nobody_waiting(
    server, run_dir, module, tmp_path
):
    async def scenario(fleet):
        [engine] = fleet.engines
        published = await asyncio.to_thread(publish, 3, module)
        claimed = await publish.leases.start_transfer(published, ["engine 0"])
        await engine.pause()
        (run_dir / "absent.2").write_text("tensor 'q' has no place")
        begin = time.monotonic()
        with pytest.raises(
            UpdateFailed, match=r"engine 0 did not take version 3: tensor 'q' has no place$"
        ):
            await engine.update_weights(claimed)
        assert time.monotonic() - begin < ARRIVAL_S / 4, (
            "the others, and the trainer, waited for it"
        )
        assert await holds_nothing(engine)
        await takes_it_again(fleet, claimed, module)

    with direct_trainer(tmp_path / "wire") as publish:
        with_fleet(scenario, [server[1]], leases=publish.leases)


def test_an_engine_that_loses_a_worker_in_a_take_is_gone_with_all_its_processes(
    server, run_dir, module, tmp_path
):
    """The shared server ends by it."""
    process, url = server
    members = family(process)
    assert len([each for each in members if each.name().startswith("VLLM::Worker")]) == NUM_WORKERS
    mapped = in_shared_memory(members)
    assert len(mapped) >= 4
    assert not [
        path.name
        for path in mapped
        if run_directory.role_memory_prefix(run_dir, "inference.0") not in path.name
    ]
    (run_dir / "fault.0").write_text("dies")

    async def scenario(fleet):
        with pytest.raises(EngineGone, match="engine 0"):
            await fleet.update(await asyncio.to_thread(publish, 4, module))

    with direct_trainer(tmp_path / "wire") as publish:
        with_fleet(scenario, [url], leases=publish.leases)
    assert process.wait(10) == 1
    assert (
        "error: inference 0: the engine core died"
        in (run_dir / "logs/wide_engine.0.log").read_text()
    )
    assert not psutil.wait_procs(members, 5)[1]
    assert not [path for path in mapped if path.exists()]
