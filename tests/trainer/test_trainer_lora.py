"""Low-rank adapters: frozen weights stay, exports are merged, for any number of ranks."""

import pytest
import torch
from safetensors.torch import load_file
from trainer_cases import (
    MOE,
    batch_columns,
    make_learner,
    manifest,
    run_ranks,
    share,
    write_start_weights,
)

from orrery.models import build, lora, weights
from orrery.models.lora import adapters
from orrery.models.weights import hf_tensors, named_hf_tensors, named_peft_tensors
from orrery.trainer.export import export_policy
from orrery.trainer.learner import count_totals
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy, micro_batch

LORA = {"rank": 4, "alpha": 8.0, "seed": 11}
MODELS = {"dense": {}, "moe": {"family": "qwen3_moe", "moe": MOE}}
LORAS = {
    "dense": {**LORA, "targets": ["attention", "feed_forward"]},
    "moe": {**LORA, "targets": ["attention", "experts"]},
}


def learner_of(tmp_path, model, lora, **trainer):
    spec = manifest(model=MODELS[model], trainer={"lora": lora, **trainer})
    start = write_start_weights(spec, tmp_path / "start")
    return spec, make_learner(spec, start)


def train(learner, steps=(1, 2, 3)):
    for step in steps:
        mine = share(batch_columns(step), 1, 0, 64)
        learner.learn(mine, len(mine), count_totals(mine, learner.world), 1.0)


def scores(policy):
    with torch.no_grad():
        return policy(micro_batch(share(batch_columns(9), 1, 0, 200)[0], 9, torch.device("cpu")))[0]


@pytest.mark.parametrize("model", MODELS)
def test_adapters_begin_as_nothing(tmp_path, model):
    plain, adapted = (learner_of(tmp_path, model, lora)[1] for lora in (None, LORAS[model]))
    assert torch.equal(scores(plain.policy), scores(adapted.policy))


@pytest.mark.parametrize("model", MODELS)
def test_training_moves_adapters_and_nothing_else(tmp_path, model):
    _, learner = learner_of(tmp_path, model, LORAS[model])
    before = {name: weight.detach().clone() for name, weight in learner.policy.named_parameters()}
    train(learner)
    moved = {
        name
        for name, weight in learner.policy.named_parameters()
        if not torch.equal(weight, before[name])
    }
    assert moved == set(learner.weights)
    assert all("lora" in name for name in moved)


@pytest.mark.parametrize("model", MODELS)
def test_what_leaves_the_trainer_is_merged(tmp_path, model):
    spec, learner = learner_of(tmp_path, model, LORAS[model])
    train(learner)
    whole = dict(named_hf_tensors(learner.policy.network))
    weights.save(learner.policy.network, spec.model, tmp_path / "merged")
    merged = build(spec.model)
    weights.load(merged, tmp_path / "merged")
    assert {name for name, _ in named_hf_tensors(merged)} == set(whole)
    # Both are float32. Merging changes the order of one sum a product.
    torch.testing.assert_close(
        scores(Policy(merged, 16)), scores(learner.policy), rtol=0, atol=5e-6
    )
    start = learner_of(tmp_path, model, None)[1]
    assert (scores(Policy(merged, 16)) - scores(start.policy)).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_exported_is_the_exact_sum_rounded_once(tmp_path, model, dtype):
    """In float32 there are up to five roundings of 2⁻²⁴. In bfloat16 only near ties may differ."""
    spec = manifest(model=MODELS[model], trainer={"lora": LORAS[model]})
    start = write_start_weights(spec, tmp_path / "start")
    network = build(spec.model, dtype)
    lora.adapt(network, spec.trainer.lora, torch.float32)
    weights.load(network, start)
    lora.initialize(network, LORA["seed"])
    parameters, adapter_of = dict(network.named_parameters()), dict(adapters(network))
    for index, adapter in enumerate(adapter_of.values()):
        torch.nn.init.normal_(adapter.b, std=0.05, generator=torch.Generator().manual_seed(index))
    export_policy(
        Policy(network, 16),
        World(0, 1, torch.device("cpu"), None),
        spec.model,
        start,
        tmp_path / "exported",
    )
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    adapted = [hf for hf in hf_tensors(network) if hf.parameter_name in adapter_of]
    assert len(adapted) == spec.model.num_layers * (
        7 if model == "dense" else 4 + 3 * MOE["num_experts"]
    )
    for hf in adapted:
        frozen, adapter = (
            hf.view_of(parameters[hf.parameter_name].detach().double()),
            adapter_of[hf.parameter_name],
        )
        a, b = adapter.a.detach().double(), adapter.b.detach().double()
        exact, found = frozen + adapter.scale * hf.view_of(b @ a), exported[hf.name]
        limit = 4 * 2**-24 * (frozen.abs() + adapter.scale * hf.view_of(b.abs() @ a.abs()))
        assert found.dtype == dtype and (exact - frozen).abs().max() > 1e-2
        if dtype == torch.float32:
            assert ((found.double() - exact).abs() <= limit).all(), hf.name
        else:
            rounded = exact.to(dtype)
            middle = (found.double() + rounded.double()) / 2
            assert ((found == rounded) | ((exact - middle).abs() <= limit)).all(), hf.name
            assert (found != rounded).sum() <= 1, hf.name


def test_what_leaves_alone_makes_the_merged_weights_of_the_frozen_ones(tmp_path):
    """Factors of float32, one sum a product: the difference is a rounding."""
    spec, learner = learner_of(tmp_path, "dense", LORAS["dense"])
    frozen = dict(named_hf_tensors(learner_of(tmp_path, "dense", None)[1].policy.network))
    train(learner)
    factors = dict(named_peft_tensors(learner.policy.network, torch.float32))
    adapted = {
        name.removesuffix(".weight"): weight
        for name, weight in named_hf_tensors(learner.policy.network)
    }
    pairs = {
        name.removesuffix(".lora_A.weight").removeprefix("base_model.model.")
        for name in factors
        if ".lora_A." in name
    }
    assert len(factors) == 2 * len(pairs) == 2 * 7 * spec.model.num_layers
    for name in pairs:
        a, b = (
            factors[f"base_model.model.{name}.{factor}.weight"] for factor in ("lora_A", "lora_B")
        )
        assert b.abs().max() > 0
        torch.testing.assert_close(
            frozen[f"{name}.weight"] + b @ a, adapted[name], rtol=0, atol=1e-6
        )


def test_targets_choose_what_is_adapted(tmp_path):
    counts = {
        "dense": {"attention": 4, "feed_forward": 3, "experts": None},
        "moe": {"attention": 4, "feed_forward": None, "experts": 2},
    }
    for model, count_of in counts.items():
        for target, count in count_of.items():
            fields = {**LORA, "targets": [target]}
            if count is None:
                with pytest.raises(
                    ValueError,
                    match=rf"trainer\.lora\.targets \['{target}'\]: family .* has no such part; "
                    rf"choose from",
                ):
                    manifest(model=MODELS[model], trainer={"lora": fields})
                continue
            _, learner = learner_of(tmp_path, model, fields)
            assert len(list(adapters(learner.policy.network))) == 2 * count


def test_two_ranks_train_adapters_as_one_does(tmp_path):
    _, learner = learner_of(tmp_path, "moe", LORAS["moe"])
    train(learner, [1])
    meshes = {"shards": {"dp_shard": 2}, "experts": {"dp_shard": 2, "ep": 2}}
    fields = {"model": MODELS["moe"], "trainer": {"lora": LORAS["moe"]}}
    run_ranks(
        2,
        tmp_path,
        [
            {"name": name, "manifest": {"mesh": mesh, **fields}, "steps": [1]}
            for name, mesh in meshes.items()
        ],
    )
    for layout in meshes:
        found = load_file(tmp_path / f"{layout}.safetensors")
        assert found.keys() == learner.weights.keys()
        for name, weight in learner.weights.items():
            # Gradients are float32 sums in another order; the first step moves by 5e-3.
            torch.testing.assert_close(found[name], weight.detach(), rtol=0, atol=2e-6)


def test_on_a_direct_wire_every_rank_sends_its_shards_merged(tmp_path):
    """Each replica holds every element once, equal to the whole merged tensors up to a rounding.

    Rank 32 is the number of query rows, so sharding along the rank could be confused with rows.
    """
    wide = LORAS["dense"] | {"rank": 32}
    cases = {
        "one": ("moe", {}, LORAS["moe"]),
        "shards_dense": ("dense", {"dp_shard": 2}, LORAS["dense"]),
        "shards_moe": ("moe", {"dp_shard": 2}, LORAS["moe"]),
        "experts": ("moe", {"dp_shard": 2, "ep": 2}, LORAS["moe"]),
        "replicas": ("moe", {"dp_replicate": 2}, LORAS["moe"]),
        "as_many_rows": ("dense", {"dp_shard": 2}, wide),
    }
    for num_ranks in (1, 2):
        jobs = [
            {
                "name": name,
                "manifest": {"model": MODELS[model], "trainer": {"lora": lora}, "mesh": mesh},
                "steps": [1],
                "held": True,
            }
            for name, (model, mesh, lora) in cases.items()
            if (name == "one") == (num_ranks == 1)
        ]
        answers = run_ranks(num_ranks, tmp_path, jobs)
        for job in jobs:
            held = [answer[job["name"]]["held"] for answer in answers]
            replicas = job["manifest"]["mesh"].get("dp_replicate", 1)
            assert sum(one["num_elements"] for one in held) == replicas * held[0]["num_whole"], job[
                "name"
            ]
            assert max(one["difference"] for one in held) <= 1e-6, job["name"]
            assert len({one["bits"] for one in held}) == num_ranks // replicas, (
                f"{job['name']}: replicas hold the same bits"
            )
