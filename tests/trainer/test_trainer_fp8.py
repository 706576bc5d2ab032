"""A learner whose layers multiply in FP8: weights are quantized once a step, after its update."""

import pytest
import torch
from trainer_cases import MOE, batch_columns, make_learner, manifest, share, write_start_weights

from orrery.kernels.fp8.products import weight_parts
from orrery.manifest.budget.trainer_memory import num_fp8_weights
from orrery.models import build, fp8
from orrery.trainer.learner import count_totals

WIDTHS = {"hidden_size": 128, "intermediate_size": 128, "num_kv_heads": 2, "head_dim": 64}
FAMILIES = {
    "qwen3": (WIDTHS, ["attention", "feed_forward"]),
    "qwen3_moe": (
        WIDTHS | {"family": "qwen3_moe", "moe": MOE | {"expert_intermediate_size": 128}},
        ["attention", "experts"],
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_quantizes_each_weight_once(tmp_path, monkeypatch, family):
    fields, parts = FAMILIES[family]
    num_products = 2 * 4  # two layers: qkv and o, gate-up and down
    fsdp = {"reshard_after_forward": False, "reduce_gradients": "step", "cpu_offload": False}
    spec = manifest(model=fields, trainer={"compute_dtype": "bfloat16", "fsdp": fsdp})
    model = spec.model.model_copy(update={"fp8": parts})  # a manifest has it on Hopper GPUs alone
    spec = spec.model_copy(update={"model": model})
    learner = make_learner(spec, write_start_weights(spec, tmp_path / "start"))
    quantized = []
    monkeypatch.setattr(fp8, "weight_parts", lambda w: quantized.append(w) or weight_parts(w))
    before = None
    for step in range(1, 4):
        batch = share(batch_columns(1), 1, 0)
        assert len(batch) > 1
        totals = count_totals(batch, learner.world)
        metrics = learner.learn(iter(batch), len(batch), totals, 1.0).metrics
        assert metrics["grad_norm"] > 0
        assert len(quantized) == step * num_products
        now = [parts[0].float() for parts, _ in fp8.products(learner.policy.network)]
        assert before is None or not all(map(torch.equal, before, now))
        before = now
    assert all(weight.dtype == torch.bfloat16 for weight in quantized)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_memory_plan_counts_the_quantized_weights(family):
    fields, parts = FAMILIES[family]
    model = manifest(model=fields).model.model_copy(update={"fp8": parts})
    network = build(model, device="meta")
    counted = sum(w.numel() for _, weights in fp8.products(network) for w in weights)
    assert num_fp8_weights(model) == counted > 0
    assert num_fp8_weights(model.model_copy(update={"fp8": None})) == 0
