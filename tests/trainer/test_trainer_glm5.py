"""A tiny GLM-5 in the trainer: recomputation and the frozen indexer."""

import numpy as np
import pytest
import torch
from trainer_cases import GLM5, MEMORY, batch_columns, make_learner, manifest, write_start_weights
from trainer_rank import train

from orrery.wire.packing import attention_cost, pack_for


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputed_blocks_make_the_step_of_plain_ones_and_indexers_do_not_move(tmp_path, kind):
    options = {"kind": kind} | ({"keep": ["attention"]} if kind == "selective" else {})
    start = write_start_weights(manifest(model=GLM5), tmp_path / "start")
    memory = {**MEMORY, "activation_checkpointing": options}
    plain = make_learner(manifest(model=GLM5), start)
    again = make_learner(manifest(model=GLM5, trainer={"memory": memory}), start)
    before = {name: weight.clone() for name, weight in plain.policy.network.named_parameters()}
    train(plain, [1, 2])
    train(again, [1, 2])
    others = dict(again.policy.network.named_parameters())
    for name, weight in plain.policy.network.named_parameters():
        assert torch.equal(weight, others[name]), name
        assert torch.equal(weight, before[name]) == (".indexer." in name), name


def test_packing_counts_sparse_attention_less_than_a_square():
    spec = manifest(model=GLM5)
    short, long = attention_cost(spec.model, np.array([64, 4096]))
    assert 64 * short < long < 64**2 * short
    lengths = batch_columns(1, 20).lengths
    found = np.concatenate([np.concatenate(bins) for bins in pack_for(spec, lengths)])
    assert sorted(found) == list(range(20))
