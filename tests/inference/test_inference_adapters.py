"""One real vLLM on CPU that serves an adapter, behind a router: exchanged under requests in flight,
attested, equal to the merged model.
"""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from inference_servers import (
    MIXTURE,
    await_published,
    engine,
    make_module,
    make_run,
    start_role,
    stop,
    with_fleet,
)

from orrery.manifest.identity import load
from orrery.models import lora
from orrery.models.weights import named_peft_tensors
from orrery.orchestrator.engines.messages import START_VERSION, UpdateFailed, WeightsDiffer
from orrery.wire.weight_wire import ADAPTER

pytestmark = [pytest.mark.timeout(300), pytest.mark.engine]
torch.set_num_threads(1)

PROMPT = [3, 4, 5, 6, 7, 8]
# float32 in both. The engine adds the factors' product to the output, the merged model to the
# weight.
TOLERANCE = 1e-4
RANK = 4


# All kinds of projections: attention with a bias, a dense layer, and shared experts beside experts
# without adapters.
GLM = MIXTURE | {
    "family": "glm4_moe",
    "num_layers": 3,
    "rotary_fraction": 0.5,
    "attention_bias": True,
    "moe": MIXTURE["moe"]
    | {"num_dense_layers": 1, "num_shared_experts": 1, "score": "sigmoid", "routed_scale": 1.5},
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    run_dir = make_run(tmp_path_factory.mktemp("adapters") / "run", GLM)
    content = json.loads((run_dir / "manifest.json").read_text())
    content["trainer"]["lora"] = {
        "rank": RANK,
        "alpha": 6.0,
        "targets": ["attention", "feed_forward"],
        "seed": 1,
    }
    content["transport"]["weights"] = "adapters"
    (run_dir / "manifest.json").write_text(json.dumps(content))
    return run_dir


@pytest.fixture(scope="module")
def served(run_dir):
    """Return the arguments of an `EnginePool` of one engine behind a router."""
    with engine(run_dir) as (_, url):
        router = start_role("orrery.inference.router", run_dir, 0)
        try:
            yield [url], await_published(run_dir, "router", 0, router)
        finally:
            stop(router)


def adapted(run_dir, version):
    """The network that the engine started from, with the adapter of `version`."""
    manifest = load(run_dir / "manifest.json")
    module = make_module(manifest, seed=7)
    lora.adapt(module, manifest.trainer.lora, torch.float32)
    lora.initialize(module, seed=version)
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for _, adapter in lora.adapters(module):
            adapter.b.normal_(std=0.3, generator=generator)
    return module


def named(module):
    return named_peft_tensors(module, torch.float32)


@torch.no_grad()
def difference(module, generation, prompt=PROMPT):
    """Between the engine's log-probs and the module's, the largest."""
    ids = torch.tensor([*prompt, *generation.token_ids.tolist()])
    hidden = module(ids, torch.arange(len(ids)), torch.tensor([0, len(ids)], dtype=torch.int32))
    rows = torch.log_softmax((hidden @ module.lm_head_weight.T).float(), -1)[len(prompt) - 1 : -1]
    return np.abs(
        rows.gather(1, ids[len(prompt) :, None]).squeeze(1).numpy() - generation.logprobs
    ).max()


@torch.no_grad()
def merged(module):
    """The same network with the adapters in its weights."""
    for name, adapter in lora.adapters(module):
        weight = module.get_parameter(name)
        weight.copy_(lora.merged(weight, adapter))
        adapter.b.zero_()
    return module


async def sample(fleet, name, max_tokens=24, salt="x", prompt=PROMPT):
    return await fleet.generate(
        prompt, max_tokens=max_tokens, temperature=1.0, cache_salt=salt, request_id=name
    )


def test_before_any_update_the_adapter_changes_nothing(served, run_dir):
    generation = with_fleet(lambda fleet: sample(fleet, "first"), *served, model=ADAPTER)
    assert (generation.versions == START_VERSION).all()
    assert difference(make_module(load(run_dir / "manifest.json"), seed=7), generation) <= TOLERANCE


def test_a_version_is_the_merged_model_and_every_factor_is_attested_from_the_buffers(
    served, run_dir, publisher
):
    module = adapted(run_dir, 1)
    published = publisher.publish(1, named(module))

    async def scenario(fleet):
        report = await fleet.update(published)
        return report, await fleet.fingerprints(), await sample(fleet, "one")

    report, held, generation = with_fleet(scenario, *served, model=ADAPTER)
    assert report.attested == {"resident": 42}, "A and B of seven projections in three layers"
    assert {name: each.fingerprint for name, each in held[0].items()} == published.fingerprints
    assert (generation.versions == 1).all()
    assert difference(make_module(load(run_dir / "manifest.json"), seed=7), generation) > 0.1, (
        "the adapter matters"
    )
    assert difference(module, generation) <= TOLERANCE
    assert difference(merged(module), generation) <= TOLERANCE
    weights = with_fleet(lambda fleet: sample(fleet, "weights"), served[0])
    assert difference(make_module(load(run_dir / "manifest.json"), seed=7), weights) <= TOLERANCE, (
        "the weights stay beside it"
    )


def test_requests_in_flight_go_on_with_the_new_factors_and_their_tokens_say_so(
    served, run_dir, publisher
):
    before, after = publisher.publish(2, named(adapted(run_dir, 2))), adapted(run_dir, 3)
    published = publisher.publish(3, named(after))

    async def scenario(fleet):
        await fleet.update(before)
        start = (await fleet.metrics())[0].generation_tokens_total
        flying = [
            asyncio.create_task(sample(fleet, f"flying-{i}", max_tokens=400, salt="2"))
            for i in range(4)
        ]
        while (
            at := (await fleet.metrics())[0]
        ).generation_tokens_total < start + 40 or at.running < 4:
            assert not any(task.done() for task in flying)
            await asyncio.sleep(0.01)
        await fleet.update(published)
        # With new requests beside old requests, no step may restore factors of an older version.
        new = await asyncio.gather(*(sample(fleet, f"new-{i}", salt="3") for i in range(4)))
        assert not any(task.done() for task in flying)
        return await asyncio.gather(*flying), new

    flying, new = with_fleet(scenario, *served, model=ADAPTER)
    for generation in flying:
        assert len(generation.token_ids) == 400 and set(generation.versions.tolist()) == {2, 3}
        assert (np.diff(generation.versions) >= 0).all()
    for generation in new:
        assert (generation.versions == 3).all()
        assert difference(after, generation) <= TOLERANCE


def test_a_cached_prefix_of_another_version_is_not_used(served, run_dir, publisher):
    prompt = [3 + i % 7 for i in range(96)]
    modules = {version: adapted(run_dir, version) for version in (4, 5)}

    async def scenario(fleet):
        answers = []
        for version, module in modules.items():
            await fleet.update(publisher.publish(version, named(module)))
            answers += [
                await sample(fleet, f"cached-{version}-{again}", 4, str(version), prompt)
                for again in range(2)
            ]
        return answers

    answers = with_fleet(scenario, *served, model=ADAPTER)
    assert [answer.cached_tokens > 0 for answer in answers] == [False, True, False, True]
    for answer, version in zip(answers, (4, 4, 5, 5), strict=True):
        assert difference(modules[version], answer, prompt) <= TOLERANCE


def test_what_is_wrong_with_a_version_is_said_by_the_tensors_name_and_the_next_one_goes_through(
    served, run_dir, publisher
):
    module = adapted(run_dir, 6)
    factors = dict(named(module))
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    strange = publisher.publish(
        6, iter([*factors.items(), (name.replace("layers.0", "layers.9"), factors[name])])
    )

    async def fails(fleet, published, error, match):
        with pytest.raises(error, match=match):
            await fleet.update(published)
        return (await fleet.fingerprints())[0]

    async def scenario(fleet):
        assert (
            await fails(
                fleet, strange, UpdateFailed, r"layers\.9\.mlp\.up_proj\.lora_B.* has no place"
            )
            == {}
        )
        incomplete = publisher.publish(
            7, ((each, factor) for each, factor in factors.items() if each != name)
        )
        assert (
            await fails(
                fleet, incomplete, UpdateFailed, r"layers\.0\.mlp\.up_proj\.lora_B.* is missing"
            )
            == {}
        )
        corrupted = publisher.publish(8, iter(factors.items()))
        flip_one_bit(Path(corrupted.path), name)
        held = await fails(
            fleet,
            corrupted,
            WeightsDiffer,
            r"layers\.0\.mlp\.up_proj\.lora_B.*resident.* differs from published version 8",
        )
        assert {
            each for each in held if held[each].fingerprint != corrupted.fingerprints[each]
        } == {name}
        await fleet.update(publisher.publish(9, iter(factors.items())))
        return await sample(fleet, "right")

    generation = with_fleet(scenario, *served, model=ADAPTER)
    assert (generation.versions == 9).all() and difference(module, generation) <= TOLERANCE


def flip_one_bit(folder, name):
    [file] = folder.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    size = int.from_bytes(content[:8], "little")
    begin, _ = json.loads(content[8 : 8 + size])[name]["data_offsets"]
    content[8 + size + begin + 2] ^= 1
    file.write_bytes(content)
