"""Two real engines with a tiny mixture of experts behind vllm-router.

Without a patch vLLM's reload of such a model fails on CPU.
"""

import asyncio

import numpy as np
import psutil
import pytest
import torch
from inference_servers import (
    MIXTURE,
    await_published,
    family,
    in_flight,
    make_module,
    make_run,
    start_role,
    stop,
    with_fleet,
)

from orrery.manifest.errors import RunFailed
from orrery.manifest.identity import load
from orrery.models.weights import named_hf_tensors
from orrery.orchestrator.engines.messages import START_VERSION, GenerationFailed

pytestmark = [pytest.mark.timeout(200), pytest.mark.engine, pytest.mark.slow]
torch.set_num_threads(1)

TOKEN = "of-this-run"
PROMPT = [9, 8, 7, 6, 5]
# as for the dense model; routing is decided in fp32 on both sides, ties have probability 0
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("router") / "run", MIXTURE, num_replicas=2)


@pytest.fixture(scope="module")
def stage(run_dir):
    """Processes by role and index, and their addresses."""
    roles = {
        ("inference", 0): "orrery.inference",
        ("inference", 1): "orrery.inference",
        ("router", 0): "orrery.inference.router",
    }
    processes = {key: start_role(module, run_dir, key[1], TOKEN) for key, module in roles.items()}
    try:
        yield (
            processes,
            {key: await_published(run_dir, *key, process) for key, process in processes.items()},
        )
    finally:
        for process in processes.values():
            if process.poll() is None:
                stop(process)


def drive(stage, scenario, token=TOKEN):
    urls = stage[1]
    return with_fleet(
        scenario, [urls["inference", 0], urls["inference", 1]], urls["router", 0], token
    )


def our_logprobs(module, generation):
    ids = torch.tensor([*PROMPT, *generation.token_ids.tolist()])
    hidden = module(ids, torch.arange(len(ids)), torch.tensor([0, len(ids)], dtype=torch.int32))
    rows = torch.log_softmax((hidden @ module.lm_head_weight.T).float(), -1)[len(PROMPT) - 1 : -1]
    return rows.gather(1, ids[len(PROMPT) :, None]).squeeze(1).detach().numpy()


def test_the_router_spreads_requests_and_an_update_reaches_both_engines(stage, run_dir, publisher):
    manifest = load(run_dir / "manifest.json")

    async def burst(fleet, salt):
        return await asyncio.gather(
            *(
                fleet.generate(
                    PROMPT,
                    max_tokens=30,
                    temperature=1.0,
                    cache_salt=salt,
                    request_id=f"{salt}-{i}",
                    ignore_eos=True,
                )
                for i in range(24)
            )
        )

    async def scenario(fleet):
        assert await fleet.health() == [True, True]
        bursts = [(START_VERSION, make_module(manifest, seed=7), await burst(fleet, "start"))]
        for version in (1, 2):  # twice, since the second reload finds what the first has left
            module = make_module(manifest, seed=100 + version)
            report = await fleet.update(publisher.publish(version, named_hf_tensors(module)))
            assert sum(report.attested.values()) == len(list(named_hf_tensors(module)))
            bursts.append((version, module, await burst(fleet, str(version))))
        return bursts, await fleet.metrics()

    bursts, metrics = drive(stage, scenario)
    for version, module, generations in bursts:
        for generation in generations:
            assert (generation.versions == version).all()
            assert np.abs(our_logprobs(module, generation) - generation.logprobs).max() <= TOLERANCE
    assert all(each.generation_tokens_total > 0 for each in metrics.values())
    assert sum(each.generation_tokens_total for each in metrics.values()) == 3 * 24 * 30


def test_the_router_passes_on_the_samples_of_a_shared_request(stage):
    async def scenario(fleet):
        return await asyncio.gather(
            *(
                fleet.generate(
                    PROMPT, max_tokens=8, temperature=1.0, cache_salt="s", share=f"group-{i % 2}",
                    request_id=f"shared-{i}", ignore_eos=True,
                )
                for i in range(6)
            )
        )  # fmt: skip

    urls = stage[1]
    engines = [urls["inference", 0], urls["inference", 1]]
    found = with_fleet(scenario, engines, urls["router", 0], TOKEN, max_samples=8)
    assert [each.sample for each in found] == [0, 0, 1, 1, 2, 2]
    assert all(len(each.token_ids) == 8 and each.engine in (0, 1) for each in found)
    assert len({each.engine for each in found[::2]}) == 1


@pytest.mark.parametrize("token", [None, "of another run"])
def test_engines_serve_nobody_without_the_runs_token_by_the_router_or_directly(stage, token):
    async def scenario(fleet):
        assert await fleet.health() == [True, True] and len(await fleet.metrics()) == 2
        with pytest.raises(RunFailed, match="missing or belongs to another run"):
            await asyncio.gather(*(engine.pause() for engine in fleet.engines))
        for client in (fleet.router, fleet.engines[0]):
            with pytest.raises(GenerationFailed, match="missing or belongs to another run"):
                await client.generate(
                    PROMPT, max_tokens=2, temperature=1.0, cache_salt="a", request_id="stranger"
                )

    drive(stage, scenario, token)


def test_requests_through_the_router_can_be_aborted(stage):
    async def scenario(fleet):
        names = []

        def request(part):
            names.append(f"routed-{part}")
            return fleet.generate(
                PROMPT,
                max_tokens=480,
                temperature=1.0,
                cache_salt="a",
                request_id=names[-1],
                ignore_eos=True,
            )

        [running] = await in_flight(fleet, request)
        await fleet.abort(names[-1:])
        return await running

    assert drive(stage, scenario).finish_reason == "abort"


def test_the_router_listens_on_loopback_only_and_ends_with_its_role(stage):
    process = stage[0]["router", 0]
    members = family(process)
    listening = [
        connection.laddr.ip
        for member in members
        for connection in member.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening and set(listening) == {"127.0.0.1"}
    assert stop(process) < 3
    assert not [
        member
        for member in members
        if member.is_running() and member.status() != psutil.STATUS_ZOMBIE
    ]
