"""The load of experts as a metric, and biases of routers that move against it."""

import math

import numpy as np
import pytest
import torch
from site_threads import ELASTIC
from trainer_cases import (
    GLM5,
    MEMORY,
    batch_columns,
    make_learner,
    manifest,
    save_checkpoint,
    write_start_weights,
)

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Manifest
from orrery.models.weights import named_hf_tensors
from orrery.trainer import checkpoint
from orrery.trainer.learner import count_totals

RATE = 0.125  # a power of two, so that its multiples are exact
FULL = {"memory": {**MEMORY, "activation_checkpointing": {"kind": "full"}}}
NUM_EXPERTS = GLM5["moe"]["num_experts"]


def spec_of(rate, **trainer):
    return manifest(model=GLM5, trainer={"expert_bias_rate": rate, **trainer})


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return write_start_weights(spec_of(None), tmp_path_factory.mktemp("start") / "mixture")


def mixtures(learner):
    return [one.mlp for one in learner.policy.network.layers if hasattr(one.mlp, "gate")]


def trained(learner, *batches):
    totals = count_totals(batches, learner.world)
    return learner.learn(batches, len(batches), totals, 1.0).metrics


def loads(learner, columns):
    """Return the tokens of each expert, [layers, experts]."""
    found = []
    hooks = [
        one.gate.register_forward_hook(
            lambda *call: found.append(np.bincount(call[2][1].flatten(), minlength=NUM_EXPERTS))
        )
        for one in mixtures(learner)
    ]
    learner.compare([columns])
    for hook in hooks:
        hook.remove()
    return np.stack(found)


@pytest.mark.parametrize("trainer", [{}, FULL], ids=["plain", "recomputed"])
def test_a_step_reports_the_load_of_its_tokens_and_not_of_an_idle_micro_batch(start, trainer):
    columns = batch_columns(1)
    learner = make_learner(spec_of(None, **trainer), start)
    load = loads(learner, columns)
    share = load / load.sum(1, keepdims=True)
    assert load.sum() == 2 * 2 * columns.num_tokens  # 2 layers with experts, 2 experts a token
    metrics = trained(learner, columns, columns.select([]))
    assert metrics["expert_load_max"] == pytest.approx(share.max(1))
    assert metrics["expert_load_min"] == pytest.approx(share.min(1))
    entropy = [-sum(p * math.log(p) for p in row if p) for row in share]
    assert metrics["expert_load_entropy"] == pytest.approx(entropy)
    assert not any(one.gate.expert_bias.any() for one in mixtures(learner)), "biases are frozen"


def test_biases_move_by_the_rate_and_engines_and_checkpoints_get_them(start, tmp_path):
    columns = batch_columns(1)
    frozen, learner = make_learner(spec_of(None), start), make_learner(spec_of(RATE), start)
    load = loads(learner, columns)
    assert trained(frozen, columns) == trained(learner, columns)
    expected = RATE * np.sign(load.mean(1, keepdims=True) - load)
    assert np.abs(expected).sum() > 0
    published = dict(named_hf_tensors(learner.policy.network))
    for layer, wanted in enumerate(expected, GLM5["moe"]["num_dense_layers"]):
        found = published[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
        assert found.dtype == torch.float32
        np.testing.assert_array_equal(found, wanted)
    save_checkpoint(learner, tmp_path / "step")
    again = make_learner(spec_of(RATE), start)
    checkpoint.load(again, tmp_path / "step")
    for name, bias in learner.expert_load.biases.items():
        assert torch.equal(again.expert_load.biases[name], bias)


def test_moving_biases_balance_the_experts(start):
    learner = make_learner(
        spec_of(0.01, optimizer={**manifest().trainer.optimizer.model_dump(), "lr": 1e-9}), start
    )
    columns = batch_columns(1)
    shares = [max(trained(learner, columns)["expert_load_max"]) for _ in range(40)]
    assert shares[0] > 0.3 > shares[-1] and shares[-1] >= 1 / NUM_EXPERTS


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model": {}}, "family 'qwen3' here has no routers with a bias"),
        (
            {"trainer": {"lora": {"rank": 2, "alpha": 2.0, "targets": ["experts"], "seed": 1}}},
            "with trainer.lora: engines would get no biases, only adapters",
        ),
        (
            {
                "trainer": {"elastic": ELASTIC, "checkpoint": {"interval_steps": 2, "keep": 2}},
                "stages": {"sft": None, "rl": {"num_steps": 2}},
            },
            "with trainer.elastic: sites do not exchange biases",
        ),
    ],
)
def test_a_rate_without_biases_to_move_is_refused(fields, says):
    spec = manifest(**{"model": GLM5, **fields}).model_dump()
    spec["trainer"]["expert_bias_rate"] = 1e-3
    with pytest.raises(
        (OrreryError, ValueError), match=f"trainer.expert_bias_rate 0.001:? ?{says}"
    ):
        Manifest.model_validate(spec)
