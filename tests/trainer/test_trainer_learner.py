"""One optimizer step: on one rank, in micro-batches, on several ranks, and with bad numbers."""

import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from optim_cases import MUON
from safetensors.torch import load_file
from trainer_cases import (
    GLM5,
    HOSTED,
    MEMORY,
    MOE,
    OFFLOADED,
    batch_columns,
    make_learner,
    manifest,
    run_ranks,
    share,
    whole_weights,
    write_start_weights,
)
from trainer_rank import train

from orrery.manifest.errors import RunFailed
from orrery.models import build, weights
from orrery.trainer.learner import count_totals
from orrery.trainer.loss import COMPONENTS
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import count_members, micro_batch
from orrery.wire.columns import Columns

CPU = torch.device("cpu")

# Ranks and micro-batches change the order of float32 sums. AdamW magnifies that.
SUMMATION = {"rtol": 0, "atol": 2e-5}


@pytest.fixture
def start(tmp_path):
    return write_start_weights(manifest(), tmp_path / "start")


def test_the_step_equals_plain_autograd_on_the_whole_batch_sample_by_sample(start):
    spec = manifest()
    learner = make_learner(spec, start)
    columns = batch_columns(1)
    network = build(spec.model)
    weights.load(network, start)
    total, count = torch.zeros(()), int(columns.token["trained"].sum())
    for i in range(columns.num_samples):
        one = columns.select([i])
        ids = torch.from_numpy(one.token["token_id"].astype(np.int64))
        hidden = network(
            ids, torch.arange(len(ids)), torch.tensor([0, len(ids)], dtype=torch.int32)
        )
        logits = hidden @ network.lm_head_weight.T / float(one.sample["temperature"][0])
        for t in range(1, len(ids)):
            if one.token["trained"][t]:
                p, q = torch.log_softmax(logits[t - 1], -1)[ids[t]], float(one.token["logprob"][t])
                advantage, ratio = float(one.token["advantage"][t]), (p - q).exp()
                shift = p.exp().item() - np.exp(q)
                kept = not (shift > 0.2 if advantage > 0 else shift < -0.2)
                total = total + (-kept * advantage * ratio + 1e-3 * (p - q) ** 2) / count
    total.backward()
    expected = {name: weight.grad.clone() for name, weight in network.named_parameters()}
    gradients = {}
    learner.optimizer.step = lambda divisor: gradients.update(
        {name: weight.grad.clone() for name, weight in learner.weights.items()}
    )
    learner.max_grad_norm = 1e9
    outcome = learner.learn([columns], 1, count_members(columns), 1.0)
    assert outcome.metrics["loss"] == pytest.approx(total.item(), abs=1e-6)
    norm = torch.stack([gradient.square().sum() for gradient in expected.values()]).sum().sqrt()
    assert outcome.metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[f"network.{name}"], gradient, rtol=1e-4, atol=1e-6)


def test_a_batch_without_any_advantage_trains_and_its_tokens_stay_in_the_denominator(start):
    """Only the penalty over all trained tokens remains."""
    learner, columns = make_learner(manifest(), start), batch_columns(1)
    columns.token["advantage"][:] = 0
    num_trained = int(columns.token["trained"].sum())
    found = learner.learn([columns], 1, count_members(columns), 1.0).metrics
    plain = make_learner(manifest(), start)
    scored = micro_batch(columns, 1, CPU, plain.shard, plain.route_shape)
    with torch.no_grad():
        logprob, _ = plain.policy(scored)
    penalty = (
        1e-3
        * (logprob - scored.loss.engine_logprob)[scored.loss.rl_weight != 0].square().sum().item()
        / num_trained
    )
    assert found["num_trained_tokens"] == num_trained and found["loss_rl"] == pytest.approx(
        penalty, rel=1e-4
    )
    # The engine's log-probs equal ours: the gradient is 0, and no step may divide by it.
    still = make_learner(manifest(), start)
    with torch.no_grad():
        columns.token["logprob"][columns.token["trained"]] = still.policy(scored)[0][
            scored.loss.rl_weight != 0
        ].numpy()
    found = still.learn([columns], 1, count_members(columns), 1.0).metrics
    assert found["grad_norm"] < 1e-8 and found["loss"] < 1e-12
    assert all(torch.isfinite(weight).all() for weight in whole_weights(still).values())


def test_one_micro_batch_and_many_make_the_same_step(start):
    spec = manifest()
    whole, parts = make_learner(spec, start), make_learner(spec, start)
    rows = train(whole, [1, 2, 3], max_tokens=1000), train(parts, [1, 2, 3], max_tokens=20)
    for one, many in zip(*rows, strict=True):
        assert one["loss"] == pytest.approx(many["loss"], abs=1e-4)
        assert one["num_tokens"] == many["num_tokens"]
    moved = [
        (a - b).abs().max()
        for a, b in zip(
            whole_weights(whole).values(), make_learner(spec, start).weights.values(), strict=True
        )
    ]
    assert max(moved) > 1e-2
    for name, weight in whole_weights(whole).items():
        torch.testing.assert_close(whole_weights(parts)[name], weight, **SUMMATION)


def test_clipping_bounds_the_gradient_that_the_optimizer_sees(start):
    learner, seen = make_learner(manifest(trainer={"max_grad_norm": 1e-3}), start), []

    def step(divisor: torch.Tensor) -> None:
        seen.append(
            (
                torch.stack([w.grad.square().sum() for w in learner.weights.values()]).sum().sqrt()
                / divisor
            ).item()
        )

    learner.optimizer.step = step
    outcome = learner.learn([batch_columns(1)], 1, count_members(batch_columns(1)), 1.0)
    assert outcome.metrics["grad_norm"] > 1e-2
    assert seen == [pytest.approx(1e-3, rel=1e-3)]


def test_norms_do_not_decay_and_matrices_do(start):
    learner = make_learner(manifest(), start)
    decay = {
        id(weight): group.weight_decay
        for group in learner.optimizer.groups
        for weight in group.weights
    }
    found = {name: decay[id(weight)] for name, weight in learner.weights.items()}
    assert {value for name, value in found.items() if "norm" in name} == {0.0}
    assert {value for name, value in found.items() if "norm" not in name} == {0.01}


def test_the_same_seed_twice_gives_the_same_bits(start):
    first, second = make_learner(manifest(), start), make_learner(manifest(), start)
    train(first, [1, 2, 3])
    train(second, [1, 2, 3])
    for name, weight in whole_weights(first).items():
        assert torch.equal(weight, whole_weights(second)[name]), name


SHARDS, REPLICAS, UNTIED = {"dp_shard": 2}, {"dp_replicate": 2}, {"tie_embeddings": False}
# Three samples on two ranks, at most one a micro-batch: one rank gets an empty micro-batch.
FEW = {"num_samples": 3, "max_tokens": 20}
ADAPTERS = {"rank": 4, "alpha": 8.0, "targets": ["attention"], "seed": 1}
RECOMPUTE = {**MEMORY, "activation_checkpointing": {"kind": "full"}}
ON_TWO_RANKS = {
    "shards": {"manifest": {"mesh": SHARDS}, "steps": [1, 2, 3], "batch": FEW},
    "shards_untied": {
        "manifest": {"mesh": SHARDS, "model": UNTIED},
        "steps": [1, 2, 3],
        "batch": FEW,
    },
    "replicas": {"manifest": {"mesh": REPLICAS}, "steps": [1, 2, 3], "batch": FEW},
    "replicas_untied": {
        "manifest": {"mesh": REPLICAS, "model": UNTIED},
        "steps": [1, 2, 3],
        "batch": FEW,
    },
    "mixture": {
        "manifest": {"mesh": SHARDS, "model": {"family": "qwen3_moe", "moe": MOE}},
        "steps": [1, 2, 3],
        "batch": {},
    },
    "sparse_attention": {
        "manifest": {"mesh": {**SHARDS, "ep": 2}, "model": GLM5, "trainer": {"memory": RECOMPUTE}},
        "steps": [1, 2],
        "batch": {},
    },
    "recomputed": {
        "manifest": {"mesh": SHARDS, "trainer": {"memory": RECOMPUTE}},
        "steps": [1, 2],
        "batch": {},
    },
}
BAD_ON_TWO_RANKS = {
    "poisoned": {"manifest": {"mesh": SHARDS}, "steps": [1], "batch": {"poison": 1}},
    "broken_shards": {"manifest": {"mesh": SHARDS}, "steps": [1], "broken_on": 1},
    "broken_replicas": {"manifest": {"mesh": REPLICAS}, "steps": [1], "broken_on": 1},
    "broken_adapters": {
        "manifest": {"mesh": SHARDS, "trainer": {"lora": ADAPTERS}},
        "steps": [1],
        "broken_on": 1,
    },
    "broken_ring": {
        "manifest": {"mesh": {"cp": 2, "cp_style": "ring"}},
        "steps": [1],
        "broken_on": 1,
    },
    "broken_ulysses": {
        "manifest": {"mesh": {"cp": 2, "cp_style": "ulysses"}, "trainer": {"memory": RECOMPUTE}},
        "steps": [1],
        "broken_on": 0,
    },
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """(folder, each rank's answers) of all jobs above."""
    folder = tmp_path_factory.mktemp("two_ranks")
    jobs = ON_TWO_RANKS | BAD_ON_TWO_RANKS
    return folder, run_ranks(
        2,
        folder,
        [
            {"name": name, "export": folder / f"exported_{name}", **job}
            for name, job in jobs.items()
        ],
    )


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_two_ranks_make_the_step_of_one(two_ranks, name):
    folder, answers = two_ranks
    job = ON_TWO_RANKS[name]
    alone = make_learner(manifest(model=job["manifest"].get("model")), folder / f"start_{name}")
    expected = train(alone, job["steps"], **job["batch"])
    assert answers[0][name] == answers[1][name]
    for row, reference in zip(answers[0][name]["rows"], expected, strict=True):
        for metric, value in reference.items():
            assert row[metric] == (
                value if value is None else pytest.approx(value, rel=1e-4, abs=1e-5)
            ), metric
    found = load_file(folder / f"{name}.safetensors")
    for weight_name, weight in whole_weights(alone).items():
        torch.testing.assert_close(found[weight_name], weight, **SUMMATION)
    exported = load_file(folder / f"exported_{name}" / "model.safetensors")
    assert torch.equal(exported["model.embed_tokens.weight"], found["network.embed_tokens.weight"])


MIXTURE = {"family": "qwen3_moe", "moe": MOE}
EXPERTS, REPLICAS_OF_EXPERTS = {"dp_shard": 4, "ep": 2}, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}
MUON_TRAINER = {"optimizer": MUON}
# Gradient norms are 2 to 7, so clipping matters. SGD does not magnify roundings.
CLIPPED = {
    "optimizer": {"kind": "sgd", "lr": 2.0, "momentum": 0.0, "weight_decay": 0.0},
    "max_grad_norm": 0.1,
}
CLIPPED_SUMMATION = {"rtol": 0, "atol": 1e-6}
ON_FOUR_RANKS = {
    "muon": (REPLICAS_OF_EXPERTS, MUON_TRAINER, {}),
    "muon_offloaded": (REPLICAS_OF_EXPERTS, MUON_TRAINER, OFFLOADED),
    "clipped_context": ({"dp_shard": 2, "cp": 2, "cp_style": "ring"}, CLIPPED, {}),
    "clipped_experts": (EXPERTS, CLIPPED, {}),
    "clipped_replicas_of_experts": (REPLICAS_OF_EXPERTS, CLIPPED, {}),
    "clipped_hosted": (EXPERTS, CLIPPED, HOSTED),
}
POISONED = {
    "poisoned_experts": (EXPERTS, 3),
    "poisoned_replicas": ({"dp_replicate": 2, "dp_shard": 2}, 2),
}


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    """(folder, each rank's answers) of all jobs above, of a mixture."""
    folder, jobs = tmp_path_factory.mktemp("four_ranks"), []
    for name, (mesh, trainer, place) in ON_FOUR_RANKS.items():
        fields = {"model": MIXTURE, "mesh": mesh, "trainer": {**trainer, **place}}
        jobs.append({"name": name, "manifest": fields, "steps": [1, 2, 3]})
    for name, (mesh, rank) in POISONED.items():
        jobs.append(
            {
                "name": name,
                "manifest": {"model": MIXTURE, "mesh": mesh},
                "steps": [1, 2],
                "batch": {"poison": rank},
            }
        )
    return folder, run_ranks(4, folder, jobs)


@pytest.mark.parametrize("name", ON_FOUR_RANKS)
def test_four_ranks_make_the_step_of_one(four_ranks, name):
    folder, answers = four_ranks
    trainer = ON_FOUR_RANKS[name][1]
    alone = make_learner(manifest(model=MIXTURE, trainer=trainer), folder / f"start_{name}")
    expected = train(alone, [1, 2, 3])
    assert all(answer[name] == answers[0][name] for answer in answers)
    for row, reference in zip(answers[0][name]["rows"], expected, strict=True):
        assert trainer is not CLIPPED or row["grad_norm"] > 10 * trainer["max_grad_norm"]
        for metric, value in reference.items():
            assert row[metric] == (
                value if value is None else pytest.approx(value, rel=1e-4, abs=1e-5)
            ), metric
    found = load_file(folder / f"{name}.safetensors")
    for weight_name, weight in whole_weights(alone).items():
        torch.testing.assert_close(
            found[weight_name], weight, **(CLIPPED_SUMMATION if trainer is CLIPPED else SUMMATION)
        )


def test_activation_checkpointing_leaves_the_step_what_it_was(start):
    plain, again = (
        make_learner(manifest(), start),
        make_learner(manifest(trainer={"memory": RECOMPUTE}), start),
    )
    train(plain, [1, 2])
    train(again, [1, 2])
    for name, weight in whole_weights(plain).items():
        assert torch.equal(weight, whole_weights(again)[name]), name


@pytest.mark.slow
def test_compiled_blocks_make_the_step_of_plain_ones(start):
    plain, compiled = (
        make_learner(manifest(), start),
        make_learner(manifest(trainer={"compile": True}), start),
    )
    rows = train(plain, [1, 2]), train(compiled, [1, 2])
    for one, other in zip(*rows, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    # Fused kernels round differently, and AdamW's first steps magnify that near zero gradients.
    for name, weight in whole_weights(plain).items():
        torch.testing.assert_close(whole_weights(compiled)[name], weight, rtol=0, atol=3e-4)


@pytest.mark.slow
def test_micro_batches_of_every_kind_are_compiled_and_none_too_many_for_torch(
    tmp_path, monkeypatch
):
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()  # blocks that other tests compiled are not this one's to count
    counter, compile = CompileCounter(), torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, fullgraph: compile(function, fullgraph=fullgraph, backend=counter),
    )
    moe = {
        "num_experts": 4,
        "num_experts_per_token": 2,
        "expert_intermediate_size": 24,
        "normalize_top_k": True,
        "num_dense_layers": 1,
    }
    moe |= {"num_shared_experts": 1, "score": "sigmoid", "routed_scale": 1.0}
    spec = manifest(
        model={"family": "glm4_moe", "moe": moe}, trainer={"compile": True, "memory": RECOMPUTE}
    )
    learner = make_learner(spec, write_start_weights(spec, tmp_path / "glm"))

    def routed(num_samples: int) -> Columns:
        columns = batch_columns(1, num_samples)
        columns.token["routed_experts"] = np.zeros(
            (columns.num_tokens, 1, 2), dtype=np.uint8
        ) + np.array([0, 1], dtype=np.uint8)
        return columns

    nothing = batch_columns(1).select([])
    learner.compare([batch_columns(1)])
    for columns in (routed(3), routed(4), nothing, batch_columns(1, 2)):
        learner.learn([columns], 1, count_totals([columns], learner.world), 1.0)
    # Otherwise the test proves little: torch's default limit is eight graphs.
    assert counter.frame_count > 8


def test_low_precision_compute_keeps_weights_and_gradients_in_float32(start, tmp_path):
    job = {
        "name": "low",
        "manifest": {"trainer": {"compute_dtype": "bfloat16"}},
        "steps": [1],
        "compare": True,
        "export": tmp_path / "hf",
    }
    answer = run_ranks(1, tmp_path, [job])[0]["low"]["rows"][0]
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    # Also after a pass without gradients.
    assert {tensor.dtype for tensor in load_file(file).values()} == {torch.float32}
    reference = train(make_learner(manifest(), start), [1])[0]
    assert load_file(tmp_path / "low.safetensors")["network.norm.weight"].dtype == torch.float32
    # bfloat16 keeps 8 bits: log-probs are off by percents, the loss of a batch by less.
    assert answer["loss"] == pytest.approx(reference["loss"], abs=0.05)
    assert answer["loss"] != reference["loss"]


def test_an_empty_micro_batch_adds_nothing(start):
    with_empty, without = make_learner(manifest(), start), make_learner(manifest(), start)
    columns = batch_columns(1)
    outcome = with_empty.learn([columns, columns.select([])], 2, count_members(columns), 1.0)
    assert outcome.metrics == without.learn([columns], 1, count_members(columns), 1.0).metrics
    for name, weight in whole_weights(without).items():
        assert torch.equal(whole_weights(with_empty)[name], weight)


def test_a_batch_without_a_single_trained_token_is_a_step_with_zero_gradients(start):
    learner = make_learner(manifest(), start)
    columns = batch_columns(1)
    columns.token["trained"][:] = False
    metrics = learner.learn([columns], 1, count_members(columns), 1.0).metrics
    assert (
        metrics["loss"],
        metrics["grad_norm"],
        metrics["num_trained_tokens"],
        metrics["entropy"],
    ) == (0, 0.0, 0, None)


def test_not_finite_data_ends_the_run_by_step_component_and_rank_and_leaves_the_weights(two_ranks):
    folder, answers = two_ranks
    assert (
        answers[0]["poisoned"]
        == answers[1]["poisoned"]
        == {"error": "step 1: loss_rl is nan on rank 1; all weights are finite"}
    )
    before = whole_weights(make_learner(manifest(), folder / "start_poisoned"))
    for name, weight in load_file(folder / "poisoned.safetensors").items():
        assert torch.equal(weight, before[name])


@pytest.mark.parametrize(
    "name", [name for name, job in BAD_ON_TWO_RANKS.items() if "broken_on" in job]
)
def test_a_backward_pass_that_breaks_is_found_on_its_rank_though_gradients_are_sums_over_ranks(
    two_ranks, name
):
    """Also with a frozen embedding, and with context parallelism, as it passes bad values on."""
    folder, answers = two_ranks
    job = BAD_ON_TWO_RANKS[name]
    assert answers[0][name] == answers[1][name]
    # The last weight before the break: a norm or projection of attention.
    weight, rank = r"network.layers.0.self_attn.\w+.(weight|lora.b)", job["broken_on"]
    where = f"is not finite on rank {rank}; weights stay as before the step"
    said = rf"step 1: the gradient of {weight} {where}"
    assert re.fullmatch(said, answers[0][name]["error"])
    before = whole_weights(
        make_learner(manifest(trainer=job["manifest"].get("trainer")), folder / f"start_{name}")
    )
    assert all(
        torch.equal(weight, before[other])
        for other, weight in load_file(folder / f"{name}.safetensors").items()
    )


def test_where_nobody_could_watch_the_shards_rank_is_told(start):
    """The other rank holds what is not finite, and no backward pass is known to have broken."""
    learner = make_learner(manifest(), start)
    position = list(learner.weights).index("network.layers.0.self_attn.q_proj.weight")
    answers = iter([[-1, position], [-1, -1], [0, 1]])
    learner.world = SimpleNamespace(size=2, data_rank=0, all_gather=lambda value: next(answers))
    with pytest.raises(
        RunFailed, match=r"q_proj.weight is not finite in the shard of rank 1; weights stay"
    ):
        learner._name_gradient(1)


def test_weights_that_the_last_update_broke_are_told_where_nothing_is_trained_after_it(start):
    learner = make_learner(manifest(), start)
    learner.check_weights()
    with torch.no_grad():
        learner.weights["network.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    with pytest.raises(
        RunFailed,
        match=r"version 0: \w+ is nan on rank 0 \(weight network.layers.1.mlp.up_proj.weight "
        r"is not finite\)",
    ):
        learner.compare([batch_columns(1)])
    with pytest.raises(
        RunFailed,
        match=r"step 0: after its update the weight network.layers.1.mlp.up_proj.weight is not "
        r"finite",
    ):
        learner.check_weights()


@pytest.mark.parametrize("name", POISONED)
def test_not_finite_data_of_one_of_four_ranks_ends_the_run_by_step_and_rank_and_leaves_the_weights(
    four_ranks, name
):
    folder, answers = four_ranks
    error = f"step 2: loss_rl is nan on rank {POISONED[name][1]}; all weights are finite"
    assert [answer[name] for answer in answers] == [{"error": error}] * 4
    alone = make_learner(manifest(model=MIXTURE), folder / f"start_{name}")
    train(alone, [1])
    found = load_file(folder / f"{name}.safetensors")
    for weight_name, weight in whole_weights(alone).items():
        torch.testing.assert_close(found[weight_name], weight, **SUMMATION)


def test_a_weight_that_is_not_finite_is_named(start):
    learner = make_learner(manifest(), start)
    with torch.no_grad():
        learner.weights["network.layers.1.mlp.up_proj.weight"][3, 4] = float("inf")
    with pytest.raises(
        RunFailed,
        match=r"step 1: loss_rl is nan on rank 0 \(weight network.layers.1.mlp.up_proj.weight "
        r"is not finite\)",
    ):
        train(learner, [1])


def test_a_gradient_that_is_not_finite_is_named_and_no_weight_moves(start):
    learner = make_learner(manifest(), start)
    before = whole_weights(learner)
    learner.weights["network.layers.0.self_attn.q_proj.weight"].register_hook(
        lambda gradient: gradient * float("nan")
    )
    with pytest.raises(
        RunFailed,
        match=r"step 1: the gradient of network.layers.0.self_attn.q_proj.weight is not finite "
        r"on rank 0",
    ):
        train(learner, [1])
    assert learner.step == 0
    assert all(torch.equal(weight, before[name]) for name, weight in whole_weights(learner).items())


def test_counts_that_were_announced_wrongly_end_the_run_before_the_step(start):
    learner, columns = make_learner(manifest(), start), batch_columns(1)
    before = whole_weights(learner)
    totals = {**count_members(columns), "rl": 5}
    with pytest.raises(RunFailed, match=r"step 1: the batch announces 5 rl tokens, but has \d+,"):
        learner.learn([columns], 1, totals, 1.0)
    with pytest.raises(RunFailed, match="rank 0 received 1 micro-batches, but 2 were announced"):
        learner.learn([columns], 2, count_members(columns), 1.0)
    assert all(torch.equal(weight, before[name]) for name, weight in whole_weights(learner).items())


def test_a_trained_first_token_is_refused():
    columns = batch_columns(1)
    columns.token["trained"][columns.offsets[2]] = True
    with pytest.raises(RunFailed, match="batch 1: the first token of a sample is marked trained"):
        micro_batch(columns, 1, CPU)


def test_only_scored_tokens_reach_the_lm_head_each_from_the_row_before_it():
    columns = batch_columns(4)
    batch = micro_batch(columns, 4, CPU)
    scored = np.flatnonzero(columns.token["trained"])
    assert batch.row.tolist() == (scored - 1).tolist()
    assert batch.target.tolist() == columns.token["token_id"][scored].tolist()
    assert batch.max_seqlen == columns.lengths.max()
    sample_of = np.repeat(np.arange(columns.num_samples), columns.lengths)
    np.testing.assert_array_equal(
        batch.temperature, columns.sample["temperature"][sample_of[scored]]
    )


def test_same_weights_means_dispatched_and_sampled_at_the_version_being_trained():
    columns = batch_columns(4)
    columns.sample["dispatch_version"][[0, 2, 3]] = 3
    columns.token["version"][columns.offsets[3] - 1] = (
        2  # the last token of sample 2 is of an older version
    )
    same = micro_batch(columns, 4, CPU).loss.same_weights
    sample_of = np.repeat(np.arange(columns.num_samples), columns.lengths)[columns.token["trained"]]
    assert sorted(set(sample_of[same.numpy()].tolist())) == [0, 3]
    assert same.sum() == np.isin(sample_of, [0, 3]).sum()


def test_the_members_of_every_component_are_counted_over_micro_batches():
    columns = batch_columns(1)
    rows = columns.num_tokens
    token = {
        **columns.token,
        "rl_weight": np.zeros(rows, np.float32),
        "cross_entropy_weight": np.ones(rows, np.float32),
    }
    supervised = Columns(columns.offsets, token, columns.sample)
    trained = int(columns.token["trained"].sum())
    none = dict.fromkeys((*COMPONENTS, "num_tokens"), 0)
    assert count_members(columns) == {**none, "rl": trained, "num_tokens": rows}
    assert count_members(supervised) == {**none, "cross_entropy": trained, "num_tokens": rows}
    assert count_members(columns.select([])) == none
    assert count_totals(share(columns, 1, 0, 20), World(0, 1, CPU, None)) == count_members(columns)


def test_packed_samples_do_not_see_one_another(start):
    learner, columns = make_learner(manifest(), start), batch_columns(1)
    with torch.no_grad():
        whole, _ = learner.policy(micro_batch(columns, 1, CPU))
        single = [
            learner.policy(micro_batch(columns.select([i]), 1, CPU))[0]
            for i in range(columns.num_samples)
        ]
    torch.testing.assert_close(whole, torch.cat(list(itertools.chain(single))), rtol=0, atol=2e-6)


def test_log_probs_of_a_prompt_leave_weights_gradients_and_compiled_graphs_alone(
    tmp_path, monkeypatch
):
    from torch._dynamo.testing import CompileCounter

    compiled, counter = torch.compile, CompileCounter()
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, fullgraph: compiled(function, fullgraph=fullgraph, backend=counter),
    )
    spec = manifest(trainer={"compile": True})
    learner = make_learner(spec, write_start_weights(spec, tmp_path / "start"))
    before, tokens = whole_weights(learner), [9, 11, 8, 14, 10]
    found = learner.logprobs(tokens)
    assert counter.frame_count == 0
    ids = torch.tensor(tokens)
    network = learner.policy.network
    hidden = network(ids, torch.arange(len(ids)), torch.tensor([0, len(ids)], dtype=torch.int32))
    expected = (
        torch.log_softmax((hidden @ network.lm_head_weight.T).float(), -1)[:-1]
        .gather(1, ids[1:, None])
        .squeeze(1)
    )
    assert found == pytest.approx(expected.tolist(), abs=1e-5)
    assert all(torch.equal(weight, before[name]) for name, weight in whole_weights(learner).items())
    assert all(weight.grad is None for weight in learner.weights.values())
