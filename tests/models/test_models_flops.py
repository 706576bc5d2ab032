"""Operations of training, against the published counts."""

import pytest

from orrery.manifest.budget.parameters import active_parameters, hardware_flops, model_flops
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import find_workspace, load


def _manifest(name):
    return load(find_workspace().manifest_path(name))


def _with(trainer, checkpointing, **fields):
    row = trainer.model_dump() | fields
    return type(trainer).model_validate(
        row | {"memory": row["memory"] | {"activation_checkpointing": checkpointing}}
    )


# GFLOP a token: products with the LM head, attention of one document of 16384 and 65536 tokens
@pytest.mark.parametrize(
    ("name", "length", "whole"),
    [("qwen3_30b_a3b_16k", 16384, 37.6), ("qwen3_30b_a3b_64k", 65536, 18.3 + 77.3)],
)
def test_the_counts_of_a_mixture_are_those_that_peers_are_measured_by(name, length, whole):
    model = _manifest(name).model
    work = model_flops(model, [length])
    # Queries and output, keys and values, router, experts.
    block = 2 * 2048 * 4096 + 2 * 2048 * 512 + 128 * 2048 + 8 * 3 * 2048 * 768
    assert active_parameters(model).total == 48 * block + 151936 * 2048
    # A sum of two numbers with one decimal each.
    assert work.total / length / 1e9 == pytest.approx(whole, abs=0.1)


def test_short_documents_cost_less_attention_and_the_same_products():
    model = _manifest("qwen3_8b_8k").model
    one, two = model_flops(model, [16384]), model_flops(model, [8192, 8192])
    assert (
        two.attention == one.attention / 2
        and two.projections == one.projections
        and two.lm_head == one.lm_head
    )


def test_only_what_is_computed_again_is_executed_more():
    manifest = _manifest("qwen3_30b_a3b_16k")
    model, trainer = manifest.model, manifest.trainer
    true = model_flops(model, [1024])
    kept = hardware_flops(model, trainer, [1024])
    assert (kept.projections, kept.experts) == (true.projections, true.experts)
    full = hardware_flops(model, _with(trainer, {"kind": "full"}), [1024])
    assert full.projections == true.projections * 8 / 6 and full.experts == true.experts * 8 / 6
    assert full.attention == true.attention * 4.5 / 3
    modules = {"kind": "modules", "modules": ["norms", "attention_projections", "router"]}
    named = hardware_flops(model, _with(trainer, modules), [1024])
    products = 48 * 2048 * (4096 + 2 * 512 + 128)
    assert named.projections == true.projections + 2 * 1024 * products
    assert (named.experts, named.attention) == (kept.experts, kept.attention)
    every_second = _with(trainer, modules)
    memory = every_second.memory.model_copy(update={"activation_checkpointing_every": 2})
    half = hardware_flops(model, every_second.model_copy(update={"memory": memory}), [1024])
    assert half.projections == true.projections + 1024 * products


@pytest.mark.parametrize(
    "mesh", [{"ep": 8}, {"cp": 8, "dp_shard": 1}, {"cp": 8, "dp_shard": 1, "ep": 8}, {}]
)
def test_kept_results_are_computed_once_beside_exchanges_too(mesh):
    manifest = _manifest("qwen3_30b_a3b_16k")
    every = {"kind": "selective", "keep": ["attention", "projections", "experts"]}
    assert manifest.trainer.compile
    trainer = _with(manifest.trainer, every, mesh=manifest.trainer.mesh.model_dump() | mesh)
    true, found = (
        model_flops(manifest.model, [1024]),
        hardware_flops(manifest.model, trainer, [1024]),
    )
    assert (found.projections, found.experts) == (true.projections, true.experts)
    assert found.attention / true.attention == pytest.approx(3.5 / 3)


def test_operations_of_a_network_of_transformers_are_not_told_from_the_manifest(make_model):
    with pytest.raises(
        OrreryError, match=r"model\.family 'hugging_face': its operations are not counted"
    ):
        model_flops(make_model("hugging_face", hf_config={"model_type": "gpt2"}), [64])


def test_frozen_weights_need_no_gradient():
    model = _manifest("qwen3_0_6b_16k").model
    assert (
        model_flops(model, [64], frozen=True).projections
        == model_flops(model, [64]).projections * 4 / 6
    )


def test_sparse_attention_costs_the_history_in_indexers_and_top_k_keys_in_the_core():
    model = _manifest("glm5_run").model
    length = 131072
    # GFLOP a token: 78 layers of 32 × 128 indexers over half of the length, forward only, and of 64
    # heads × (576 + 512) over 2048 keys, forward and backward.
    indexers = 2 * 78 * 32 * 128 * length / 2
    core = 6 * 78 * 64 * (576 + 512) * (2048 - 2048**2 / 2 / length)
    found = model_flops(model, [length])
    projections = 2 * 78 * (2048 * 32 * 128 + 6144 * (128 + 32))
    assert found.attention / length == pytest.approx(indexers + core + projections, rel=1e-9)
    assert active_parameters(model).total == pytest.approx(40e9, rel=0.01), "as published"
    short = model_flops(model, [2048])
    assert short.attention == 3 * 2 * 78 * 64 * (256 + 256) * 2048**2 / 2, "dense, no indexer"
