"""Router replay in a step: replayed, missing and refused routes."""

import numpy as np
import pytest
import torch
from trainer_cases import MEMORY, MOE, batch_columns, make_learner, manifest, write_start_weights

from orrery.manifest.errors import RunFailed
from orrery.trainer.learner import count_totals
from orrery.trainer.parallel import activation_offload
from orrery.wire.routed_experts import route_shape, without_routes

MODEL = {"family": "qwen3_moe", "moe": {**MOE, "num_experts": 8, "num_experts_per_token": 3}}
SHAPE = route_shape(manifest(model=MODEL).model)
SELECTIVE = {"kind": "selective", "keep": ["experts", "attention"]}
OPTIONS = {
    "recomputed": {"memory": {**MEMORY, "activation_checkpointing": {"kind": "full"}}},
    "recomputed, products kept": {"memory": {**MEMORY, "activation_checkpointing": SELECTIVE}},
    "away": {"memory": {**MEMORY, "activation_offload": True}},
}
ADAPTERS = {"lora": {"rank": 4, "alpha": 8.0, "targets": ["attention", "experts"], "seed": 1}}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    spec = manifest(model=MODEL)
    return write_start_weights(spec, tmp_path_factory.mktemp("start") / "mixture")


def routed(learner, columns):
    """The batch with the routes that the learner's own routers choose."""
    found = []
    hooks = [
        layer.mlp.gate.register_forward_hook(
            lambda _module, _inputs, output: found.append(output[1].numpy())
        )
        for layer in learner.policy.network.layers
    ]
    learner.compare([columns])
    for hook in hooks:
        hook.remove()
    columns.token["routed_experts"] = np.stack(found, axis=1).astype(SHAPE.dtype)
    return columns


def elsewhere(learner, columns):
    """The batch with other routes, missing for each last token and for one whole sample."""
    routes = routed(learner, columns).token["routed_experts"]
    routes += 1
    routes[routes == SHAPE.num_experts] = 0
    routes[columns.offsets[1:] - 1] = SHAPE.no_route
    routes[columns.offsets[2] : columns.offsets[3]] = SHAPE.no_route
    return columns


def stepped(learner, columns):
    """(metrics, gradients before clipping)."""
    gradients = {}
    learner.optimizer.step = lambda _: gradients.update(
        {name: weight.grad.clone() for name, weight in learner.weights.items()}
    )
    return learner.learn(
        [columns], 1, count_totals([columns], learner.world), 1.0
    ).metrics, gradients


def test_a_step_on_its_own_routes_has_the_bits_of_one_without(start):
    learner = make_learner(manifest(model=MODEL), start)
    metrics, gradients = stepped(learner, batch_columns(1))
    assert metrics["routes_missing"] is metrics["routes_differ"] is None
    learner = make_learner(manifest(model=MODEL), start)
    again, gradients_again = stepped(learner, routed(learner, batch_columns(1)))
    assert (again["routes_missing"], again["routes_differ"]) == (0, 0)
    same = {name: value for name, value in metrics.items() if not name.startswith("routes")}
    assert {name: again[name] for name in same} == same
    for name, gradient in gradients.items():
        assert torch.equal(gradient, gradients_again[name]), name


@pytest.mark.parametrize("fields", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("adapters", [{}, ADAPTERS], ids=["", "adapted"])
def test_memory_options_change_no_bit_of_a_replayed_step(start, fields, adapters, monkeypatch):
    # Bytes, because these blocks are small.
    monkeypatch.setattr(activation_offload.apply, "__defaults__", (64,))
    plain = make_learner(manifest(model=MODEL, trainer=adapters), start)
    columns = elsewhere(plain, batch_columns(1))
    expected = stepped(plain, columns)
    metrics, gradients = stepped(
        make_learner(manifest(model=MODEL, trainer={**adapters, **fields}), start), columns
    )
    assert metrics == expected[0] and metrics["routes_differ"] > 0.1
    for name, gradient in expected[1].items():
        assert torch.equal(gradient, gradients[name]), name


def test_tokens_without_routes_are_counted_but_for_each_samples_last(start):
    learner = make_learner(manifest(model=MODEL), start)
    columns = elsewhere(learner, batch_columns(1))
    assert stepped(learner, columns)[0]["routes_missing"] == columns.lengths[2] - 1
    nothing = batch_columns(1)
    nothing.token["routed_experts"] = without_routes(nothing.num_tokens, SHAPE)
    metrics, _ = stepped(make_learner(manifest(model=MODEL), start), nothing)
    assert (
        metrics["routes_missing"] == nothing.num_tokens - nothing.num_samples
        and metrics["routes_differ"] is None
    )


def test_log_probs_are_compared_on_the_engines_routes(start):
    """Only its routes explain the log-probs of an engine that routes differently."""
    engine, columns = make_learner(manifest(model=MODEL), start), batch_columns(1)
    columns.sample["dispatch_version"][:] = 0
    columns.sample["temperature"][:] = 1.0
    columns = elsewhere(engine, columns)
    ids = torch.from_numpy(columns.token["token_id"].astype(np.int64))
    position = torch.from_numpy(
        np.arange(len(ids)) - np.repeat(columns.offsets[:-1], columns.lengths)
    )
    given = (
        ids,
        position,
        torch.from_numpy(columns.offsets.astype(np.int32)),
        torch.from_numpy(columns.token["routed_experts"]),
    )
    network = engine.policy.network
    logprob = (
        network.log_probs(network(*given), ids.roll(-1), torch.ones(len(ids)), 16)[0]
        .detach()
        .numpy()
    )
    columns.token["logprob"][1:] = np.where(columns.token["trained"][1:], logprob[:-1], 0)
    peak, num_tokens = engine.compare([columns])
    assert peak < 1e-5 and num_tokens == columns.token["trained"].sum()
    del columns.token["routed_experts"]
    assert engine.compare([columns])[0] > 1e-3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda routes: routes[:, :1],
            r"batch 1, groups 4, 9: routed_experts is uint8 \[tokens, 1, 3\]; .* needs uint8 "
            r"\[tokens, 2, 3\]",
        ),
        (
            lambda routes: np.where(np.arange(len(routes))[:, None, None] == 5, 8, routes).astype(
                np.uint8
            ),
            r"batch 1, groups 4, 9: .* token 5",
        ),
    ],
)
def test_routes_of_another_model_end_the_run_by_the_batch_and_its_groups(start, change, says):
    learner = make_learner(manifest(model=MODEL), start)
    columns = routed(learner, batch_columns(1, num_samples=2))
    columns.sample["group_id"] = np.array([9, 4])
    columns.token["routed_experts"] = change(columns.token["routed_experts"])
    with pytest.raises(RunFailed, match=says):
        stepped(learner, columns)


def test_routes_for_a_network_without_experts_end_the_run(tmp_path):
    learner = make_learner(manifest(), write_start_weights(manifest(), tmp_path / "dense"))
    columns = batch_columns(1)
    columns.token["routed_experts"] = without_routes(columns.num_tokens, SHAPE)
    with pytest.raises(
        RunFailed, match="batch 1: it carries routed_experts, but this network has no experts"
    ):
        stepped(learner, columns)
