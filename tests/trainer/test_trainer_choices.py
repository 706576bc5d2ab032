"""Keys that an engine chose: compared, replayed, missing, refused."""

import numpy as np
import pytest
import torch
from test_trainer_routes import stepped
from trainer_cases import GLM5, batch_columns, make_learner, manifest, with_choices, with_samples
from trainer_cases import write_start_weights as write

from orrery.inference.patches.vllm_routes import sample_positions
from orrery.kernels.key_bits import engine_keys
from orrery.manifest.errors import RunFailed
from orrery.models import latent_attention
from orrery.wire.routed_experts import row_shape

TOP_K = GLM5["mla"]["indexer"]["top_k"]
LENGTH = 64  # max_model_len_tokens


def spec_of(choice):
    transport = {"rollouts": "zmq", "weights": "files", "routed_experts": choice != "own"}
    return manifest(model=GLM5, trainer={"indexer_choice": choice}, transport=transport)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return write(spec_of("own"), tmp_path_factory.mktemp("start") / "latent")


def answered(start, columns, choice, swaps=False):
    """Return the columns with rows of an engine: this network's routes, and its keys for `choice`.

    With `swaps` the engine chose another key than the own choice's first one.
    """
    learner, routes, chosen = make_learner(spec_of("own"), start), [], []
    for layer in learner.policy.network.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda *call: routes.append(call[2][1].numpy()))
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.register_forward_hook(
                lambda *call: chosen.append(call[2].chosen_TK.numpy())
            )
    learner.compare([columns])
    begin = np.repeat(columns.offsets[:-1], columns.lengths)
    position = np.arange(columns.num_tokens) - begin
    keys = np.full((columns.num_tokens, len(chosen), TOP_K), -1, np.int32)
    for index, each in enumerate(chosen):
        for token in np.flatnonzero(position >= TOP_K):
            own = each[token][each[token] >= 0] - begin[token]
            if swaps:
                own[0] = np.setdiff1d(np.arange(position[token] + 1), own)[0]
            keys[token, index] = own
    routes = np.stack(routes, axis=1).astype(np.uint8)
    num_dense = GLM5["moe"]["num_dense_layers"]
    if choice == "replay":
        is_chosen = (keys[..., None] == np.arange(LENGTH)).any(axis=2)
        rows = with_choices(routes, is_chosen, num_dense)
    else:
        sample = sample_positions(torch.from_numpy(keys).flatten(0, 1)).view(torch.int32)
        rows = with_samples(routes, sample.view(len(keys), len(chosen), -1).numpy(), num_dense)
    shape = row_shape(spec_of(choice))
    assert rows.shape[1:] == (shape.num_layers, shape.top_k) and rows.dtype == shape.dtype
    rows[columns.offsets[1:] - 1] = shape.no_route  # a last token is never an input
    columns.token["routed_experts"] = rows
    return columns


def batch():
    return batch_columns(1, num_samples=5)


def test_a_step_on_its_own_keys_is_one_without_an_engine(start):
    metrics, gradients = stepped(make_learner(spec_of("own"), start), batch())
    for choice, relative in (("compare", 0.0), ("replay", 1e-5)):  # replayed keys are sorted
        columns = answered(start, batch(), choice)
        again, gradients_again = stepped(make_learner(spec_of(choice), start), columns)
        assert (again["choices_missing"], again["choices_differ"]) == (0, 0)
        assert again["loss"] == pytest.approx(metrics["loss"], rel=relative)
        for name, each in gradients.items():
            assert (gradients_again[name] - each).norm() <= relative * each.norm(), name


def test_other_keys_are_counted_and_only_a_replay_attends_to_them(start, monkeypatch):
    sampled = answered(start, batch(), "compare", swaps=True)
    compared, own = stepped(make_learner(spec_of("compare"), start), sampled)
    columns = answered(start, batch(), "replay", swaps=True)
    replayed, gradients = stepped(make_learner(spec_of("replay"), start), columns)
    assert compared["choices_differ"] == pytest.approx(1 / TOP_K, rel=0.2)  # of SAMPLED_KEYS
    bits = columns.token["routed_experts"][:, 0, -2 * LENGTH // 8 :].reshape(-1, 2, LENGTH // 8)
    calls, select = iter(range(2)), latent_attention.select_keys

    def of_engine(*given):
        keys = torch.from_numpy(bits[:, next(calls)].copy())
        return engine_keys(keys, select(*given), *given[3:5])[0]

    monkeypatch.setattr(latent_attention, "select_keys", of_engine)
    _, expected = stepped(make_learner(spec_of("compare"), start), sampled)
    assert all(torch.equal(each, gradients[name]) for name, each in expected.items())
    assert not all(torch.equal(each, own[name]) for name, each in expected.items())
    assert replayed["choices_missing"] == compared["choices_missing"] == 0


@pytest.mark.parametrize(("choice", "width"), [("replay", LENGTH // 8), ("compare", 16)])
def test_tokens_without_keys_are_counted_and_keep_the_own_choice(start, choice, width):
    columns = answered(start, batch(), choice, swaps=True)
    longest = int(columns.lengths.argmax())
    tokens = slice(columns.offsets[longest], columns.offsets[longest + 1])
    columns.token["routed_experts"][tokens, :, -2 * width :] = 0xFF
    metrics, _ = stepped(make_learner(spec_of(choice), start), columns)
    assert metrics["choices_missing"] == 2 * (columns.lengths[longest] - 1 - TOP_K) > 0


def test_indexers_learn_as_much_from_a_batch_with_few_trained_tokens(start):
    whole, few = batch(), batch()
    few.token["trained"] &= np.arange(few.num_tokens) % 7 == 0
    spec = manifest(model=GLM5, trainer={"indexer": "train"})
    (metrics, gradients), (of_few, again) = (
        stepped(make_learner(spec, start), columns) for columns in (whole, few)
    )
    assert of_few["num_trained_tokens"] < metrics["num_trained_tokens"] / 4
    assert of_few["indexer_kl"] == metrics["indexer_kl"] > 0
    learned = [name for name in gradients if ".indexer." in name]
    assert len(learned) == 10
    assert all(torch.equal(gradients[name], again[name]) for name in learned)


def test_rows_of_another_size_end_the_run(start):
    columns = answered(start, batch(), "replay")
    columns.token["routed_experts"] = columns.token["routed_experts"][..., :-1]
    with pytest.raises(RunFailed, match=r"batch 1: routed_experts is uint8 \[tokens, 1, \d+\];"):
        stepped(make_learner(spec_of("replay"), start), columns)
