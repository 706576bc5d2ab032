"""A real vLLM on CPU returns the complete routes of a rollout, and they match our own network's."""

import asyncio

import numpy as np
import pytest
import torch
from inference_servers import (
    MIXTURE,
    await_published,
    make_module,
    make_run,
    start_role,
    stop,
    with_fleet,
)

from orrery.manifest.identity import load
from orrery.models.layers import Router
from orrery.models.weights import named_hf_tensors
from orrery.orchestrator.engines.messages import START_VERSION
from orrery.wire.routed_experts import column, route_shape

pytestmark = [pytest.mark.timeout(200), pytest.mark.engine, pytest.mark.slow]
torch.set_num_threads(1)

PROMPT = [(5 * i) % 48 for i in range(100)]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    run_dir = make_run(tmp_path_factory.mktemp("routes") / "run", MIXTURE, routed_experts=True)
    return load(run_dir / "manifest.json"), run_dir


@pytest.fixture(scope="module")
def url(manifest):
    process = start_role("orrery.inference", manifest[1], 0)
    try:
        yield await_published(manifest[1], "inference", 0, process)
    finally:
        stop(process)


def drive(url, scenario):
    return with_fleet(scenario, [url])


async def sample(fleet, name, prompt=PROMPT, max_tokens=20, routes_from=0, salt="a", **options):
    return await fleet.generate(
        prompt,
        max_tokens=max_tokens,
        temperature=1.0,
        cache_salt=salt,
        request_id=name,
        ignore_eos=True,
        routes_from=routes_from,
        **options,
    )


def choices(module, ids):
    """Return our own network's choices, sorted, [tokens, layers, experts a token]."""
    found = []
    hooks = [
        each.register_forward_hook(lambda _m, _i, out: found.append(out[1]))
        for each in module.modules()
        if isinstance(each, Router)
    ]
    with torch.no_grad():
        module(
            torch.tensor(ids),
            torch.arange(len(ids)),
            torch.tensor([0, len(ids)], dtype=torch.int32),
        )
    for hook in hooks:
        hook.remove()
    return np.sort(torch.stack(found, 1).numpy(), axis=-1)


def routes_of(manifest, ids, *parts):
    return np.sort(column(len(ids), parts, route_shape(manifest.model)), axis=-1)


def test_routes_are_those_of_our_own_network_with_and_without_the_prefix_cache(url, manifest):
    async def scenario(fleet):
        return [await sample(fleet, f"cache-{i}") for i in range(2)]

    cold, warm = drive(url, scenario)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 96)
    module = make_module(manifest[0], seed=7)
    for generation in (cold, warm):
        ids = [*PROMPT, *generation.token_ids.tolist()]
        routes = routes_of(manifest[0], ids, *generation.routes)
        np.testing.assert_array_equal(routes[:-1], choices(module, ids)[:-1])
        assert (routes[-1] == 255).all() and routes.dtype == np.uint8


def test_each_sample_of_a_shared_request_has_its_own_routes(url, manifest):
    async def scenario(fleet):
        shared = {"share": "group", "salt": "shared"}
        return await asyncio.gather(*(sample(fleet, f"shared-{i}", **shared) for i in range(3)))

    module = make_module(manifest[0], seed=7)
    for generation in with_fleet(scenario, [url], max_samples=3):
        ids = [*PROMPT, *generation.token_ids.tolist()]
        routes = routes_of(manifest[0], ids, *generation.routes)
        np.testing.assert_array_equal(routes[:-1], choices(module, ids)[:-1])


def test_turns_bring_the_rows_that_are_new_and_together_all_of_them(url, manifest):
    async def scenario(fleet):
        ids, parts = list(PROMPT), []
        for turn in range(3):
            start = max((part.start + part.num_rows for part in parts), default=0)
            generation = await sample(fleet, f"turn-{turn}", ids, routes_from=start, salt="turns")
            ids += generation.token_ids.tolist()
            parts += generation.routes
            if turn < 2:
                ids += [3, 4, 5 + turn]
        return ids, parts

    ids, parts = drive(url, scenario)
    assert [part.num_rows for part in parts] == [119, 23, 23]
    np.testing.assert_array_equal(
        routes_of(manifest[0], ids, *parts)[:-1],
        choices(make_module(manifest[0], seed=7), ids)[:-1],
    )


def test_an_update_in_flight_parts_tokens_and_routes_at_the_same_place(url, manifest, publisher):
    old, new = make_module(manifest[0], seed=7), make_module(manifest[0], seed=101)
    published = publisher.publish(1, named_hf_tensors(new))

    async def scenario(fleet):
        before = (await fleet.metrics())[0].generation_tokens_total
        running = [
            asyncio.create_task(sample(fleet, f"flight-{i}", [*PROMPT, i], 300, salt="flight"))
            for i in range(4)
        ]
        while (await fleet.metrics())[0].generation_tokens_total < before + 120:  # of 1,200
            await asyncio.sleep(0.005)
        await fleet.update(published)
        return await asyncio.gather(*running), await sample(fleet, "after", salt="after")

    in_flight, after = drive(url, scenario)
    for i, generation in enumerate(in_flight):
        assert (
            set(generation.versions.tolist()) == {START_VERSION, 1}
            and (np.diff(generation.versions) >= 0).all()
        )
        ids = [*PROMPT, i, *generation.token_ids.tolist()]
        # The last token of the old weights was the new weights' first input.
        inputs_of_old = len(PROMPT) + 1 + int((generation.versions == START_VERSION).sum()) - 1
        routes, own = routes_of(manifest[0], ids, *generation.routes), choices(old, ids)
        np.testing.assert_array_equal(routes[:inputs_of_old], own[:inputs_of_old])
        assert (
            routes[inputs_of_old:-1] != own[inputs_of_old:-1]
        ).any()  # the new weights' routes, over the old cache
        assert (routes[:-1] < 4).all() and (routes[-1] == 255).all()
    ids = [*PROMPT, *after.token_ids.tolist()]
    assert (after.versions == 1).all()
    np.testing.assert_array_equal(
        routes_of(manifest[0], ids, *after.routes)[:-1], choices(new, ids)[:-1]
    )
