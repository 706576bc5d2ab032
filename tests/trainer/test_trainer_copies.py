"""One rank that computes in another dtype: copies of the weights make FSDP's step, bit for bit."""

import pytest
import torch
import torch.distributed as dist
from trainer_cases import (
    MEMORY,
    MOE,
    batch_columns,
    make_learner,
    manifest,
    share,
    whole_weights,
    write_start_weights,
)

from orrery.trainer.learner import count_totals
from orrery.trainer.parallel.world import destroy_world, init_world

CASES = {
    "tied": {},
    "untied, recomputed": {
        "model": {"tie_embeddings": False},
        "trainer": {"memory": {**MEMORY, "activation_checkpointing": {"kind": "full"}}},
    },
    "mixture": {"model": {"family": "qwen3_moe", "moe": MOE}},
    "adapters": {
        "trainer": {"lora": {"rank": 4, "alpha": 8.0, "targets": ["attention"], "seed": 1}}
    },
    "compiled": {"trainer": {"compile": True}},
}


def spec(case, reshard):
    trainer = {
        "fsdp": {
            "reshard_after_forward": reshard,
            "reduce_gradients": "micro_batch",
            "cpu_offload": False,
        },
        "compute_dtype": "bfloat16",
    }
    return manifest(model=case.get("model"), trainer={**trainer, **case.get("trainer", {})})


def three_steps(learner):
    """Metrics of steps of several micro-batches, and the weights after them."""
    rows = []
    for step in (1, 2, 3):
        batches = share(batch_columns(step), 1, 0, max_tokens=30)
        assert len(batches) > 1
        rows.append(
            learner.learn(batches, len(batches), count_totals(batches, learner.world), 1.0).metrics
        )
    return rows, whole_weights(learner)


@pytest.mark.parametrize("name", CASES)
def test_copies_make_the_step_of_fsdp_on_one_rank(name, tmp_path, monkeypatch):
    compile = torch.compile  # traced and guarded as ever, and then not handed to a compiler of C++
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, fullgraph: compile(function, fullgraph=fullgraph, backend="aot_eager"),
    )
    whole, by_unit = spec(CASES[name], reshard=False), spec(CASES[name], reshard=True)
    assert not whole.trainer.needs_fsdp and by_unit.trainer.needs_fsdp
    start = write_start_weights(whole, tmp_path / "start")
    world = init_world(by_unit.trainer.mesh, 0, torch.device("cpu"), dist.HashStore())
    try:
        expected, expected_weights = three_steps(make_learner(by_unit, start, world))
    finally:
        destroy_world(world)
    learner = make_learner(whole, start)
    names = dict(learner.policy.named_parameters())
    found, found_weights = three_steps(learner)
    timed = {key for key in expected[0] if key.endswith("_s")}
    assert [{key: value for key, value in row.items() if key not in timed} for row in found] == [
        {key: value for key, value in row.items() if key not in timed} for row in expected
    ]
    assert found_weights.keys() == expected_weights.keys()
    for key, weight in expected_weights.items():
        assert weight.dtype == torch.float32 and torch.equal(found_weights[key], weight), key
    after = dict(learner.policy.named_parameters())
    assert after.keys() == names.keys() and all(
        after[key] is weight for key, weight in names.items()
    ), "copies were left in the modules"


def test_a_score_leaves_the_trained_weights_in_place(tmp_path):
    one = spec({}, reshard=False)
    learner = make_learner(one, write_start_weights(one, tmp_path / "start"))
    before = whole_weights(learner)
    learner.compare([batch_columns(1)])
    for key, weight in learner.policy.named_parameters():
        assert (
            weight.dtype == torch.float32
            and torch.equal(weight, before[key])
            and weight.grad is None
        )
