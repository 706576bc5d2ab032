"""Data-parallel ranks on CPU that exchange tokens for experts, as vLLM's own code does on GPUs."""

import asyncio
import multiprocessing
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from direct_trainer import direct_trainer, our_logprobs
from inference_servers import (
    MIXTURE,
    await_published,
    in_flight,
    listening,
    make_module,
    make_run,
    start_role,
    stop,
    with_fleet,
)

from orrery.inference.patches.vllm import _all_gatherv, _reduce_scatterv, compute_own_experts
from orrery.manifest.identity import load
from orrery.runtime.network import LOOPBACK, free_ports

pytestmark = [pytest.mark.timeout(150), pytest.mark.engine]
torch.set_num_threads(1)

PROMPT = [3, 4, 5, 6, 7, 8]
SIZES = [3, 1, 4]
TOLERANCE = 1e-4  # as for an engine of one rank
WIDE = {
    "data_parallel": 4,
    "nodes_per_replica": 2,
    "expert_parallel": True,
    "max_model_len_tokens": 1024,
}


def rows(rank: int) -> torch.Tensor:
    return torch.arange(SIZES[rank] * 2.0).view(-1, 2) + 100 * rank


def parts(rank: int) -> torch.Tensor:
    """A rank's share of the sum, with a row for each token of every rank."""
    return torch.arange(sum(SIZES) * 2.0).view(-1, 2) * (rank + 1)


def exchange(rank: int, port: int, results) -> None:
    group = torch.distributed
    group.init_process_group("gloo", f"tcp://{LOOPBACK}:{port}", world_size=len(SIZES), rank=rank)
    mine = SimpleNamespace(
        world_size=len(SIZES), rank_in_group=rank, device_group=group.group.WORLD
    )
    found = [
        *_all_gatherv(mine, [rows(rank), rows(rank).long()], 0, SIZES),
        _reduce_scatterv(mine, parts(rank), 0, SIZES),
        _all_gatherv(mine, rows(rank)[:1]),
        _reduce_scatterv(mine, parts(rank)[:6], 0),
    ]
    results.put((rank, [each.tolist() for each in found]))


def test_ranks_of_unequal_size_gather_all_rows_and_sum_their_own():
    context = multiprocessing.get_context("fork")
    results, [port] = context.Queue(), free_ports(1)
    ranks = [context.Process(target=exchange, args=(i, port, results)) for i in range(len(SIZES))]
    for rank in ranks:
        rank.start()
    found = dict(results.get(timeout=60) for _ in ranks)
    for rank in ranks:
        rank.join(10)
    everything = torch.cat([rows(rank) for rank in range(len(SIZES))])
    total = sum(parts(rank) for rank in range(len(SIZES)))
    for rank in range(len(SIZES)):
        floats, integers, summed, firsts, evenly = found[rank]
        assert floats == everything.tolist() and integers == everything.long().tolist()
        assert summed == total.split(SIZES)[rank].tolist()
        assert firsts == torch.cat([rows(each)[:1] for each in range(len(SIZES))]).tolist()
        assert evenly == total[:6].split(2)[rank].tolist()


def test_an_expert_of_another_rank_adds_nothing(monkeypatch):
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    def note(self, **given) -> None:
        seen.update(given)

    seen: dict = {}
    monkeypatch.setattr(CPUUnquantizedExperts, "apply", note)
    compute_own_experts()
    given = {"topk_ids": torch.tensor([[2, 0], [1, 3]]), "topk_weights": torch.full((2, 2), 0.5)}
    second = torch.tensor([-1, -1, 0, 1])  # the second of two ranks has experts 2 and 3
    CPUUnquantizedExperts.apply(None, expert_map=second, **given)
    assert seen["topk_ids"].tolist() == [[0, 0], [0, 1]]
    assert seen["topk_weights"].tolist() == [[0.5, 0.0], [0.0, 0.5]]
    CPUUnquantizedExperts.apply(None, expert_map=None, **given)
    assert seen["topk_ids"] is given["topk_ids"]


@contextmanager
def wide_engine(run_dir, incarnation=0):
    """An engine of two "nodes": a server with two ranks, and a process with two more."""
    modules = ("orrery.inference", "orrery.inference.headless")
    parts = [start_role(module, run_dir, 0, incarnation=incarnation) for module in modules]
    try:
        yield *parts, await_published(run_dir, "inference", 0, parts[0])
    finally:
        for part in parts:
            stop(part)


def test_an_engine_over_two_nodes_serves_updates_in_flight_and_comes_back_whole(tmp_path):
    run_dir = make_run(tmp_path / "run", MIXTURE, inference=WIDE)
    first, second = (make_module(load(run_dir / "manifest.json"), seed) for seed in (7, 8))

    async def sample(fleet, name, prompt=PROMPT, **options):
        options = {"max_tokens": 16, "temperature": 0.7, "cache_salt": name} | options
        return await fleet.generate(prompt, request_id=name, **options)

    async def agree(fleet, module, version):
        each = (sample(fleet, f"{version}-{i}", session=f"{i}") for i in range(4))
        for sampled in await asyncio.gather(*each):
            assert (sampled.versions == version).all()
            difference = our_logprobs(module, PROMPT, sampled, 0.7) - sampled.logprobs
            assert np.abs(difference).max() <= TOLERANCE

    async def update_in_flight(fleet):
        await agree(fleet, first, -1)
        long = {"max_tokens": 160, "ignore_eos": True}
        flights = await in_flight(fleet, *[lambda part: sample(fleet, part, **long)] * 4)
        report = await fleet.update(await asyncio.to_thread(publish, 1, second))
        assert report.version == 1 and len(await fleet.engines[0]._ask_workers("attested")) == 4
        for flight in await asyncio.gather(*flights):
            assert len(flight.token_ids) == 160 and set(flight.versions.tolist()) == {-1, 1}
        await agree(fleet, second, 1)
        for turn in range(2):  # each rank caches the sessions that it has served
            for session in range(6):
                name, prompt = f"{session}-{turn}", [session + 2] * 80
                turns = {"session": f"s{session}", "cache_salt": "1", "max_tokens": 1}
                again = await sample(fleet, name, prompt, **turns)
                assert (again.cached_tokens >= 64) == bool(turn)

    async def take_again(fleet):
        await fleet.update(await asyncio.to_thread(publish, 2, second))
        await agree(fleet, second, 2)

    with direct_trainer(tmp_path / "wire") as publish:
        with wide_engine(run_dir) as (head, further, url):
            assert listening(head) == listening(further) == {LOOPBACK}
            with_fleet(update_in_flight, [url], leases=publish.leases, num_ranks=[4])
            psutil.Process(further.pid).children()[0].kill()
            assert further.wait(20) == 1
        log = (run_dir / "logs/orrery.inference.headless.0.log").read_text()
        assert "error: headless 0: the engine core died" in log
        (run_dir / "stages/rl/endpoints/inference.0.json").unlink()
        with wide_engine(run_dir, incarnation=1) as (*_, url):
            with_fleet(take_again, [url], leases=publish.leases, num_ranks=[4])
