"""Every layout of ranks makes the step of one device: the same loss, counts and gradients."""

import json

import numpy as np
import pytest
import torch
import trainer_cases
from parallel_rank import CANARY, LENGTHS, copies_of, one_step, spec_of
from safetensors.torch import load_file
from test_trainer_stages import run_rl, start_run
from torch.utils.checkpoint import checkpoint
from trainer_cases import (
    MEMORY,
    MODULES,
    make_learner,
    manifest,
    run_script,
    write_start_weights,
)

from orrery.manifest.errors import OrreryError
from orrery.runtime.metrics import read
from orrery.trainer.parallel import blocks
from orrery.trainer.parallel.expert_parallel import make_exchange
from orrery.wire.columns import Columns
from orrery.wire.routed_experts import route_shape
from orrery.wire.weight_wire import remove_weight_dir

pytestmark = pytest.mark.timeout(240)  # the first test waits until all layouts have run

# ‖a − b‖ / ‖b‖ of each gradient in float32: the order of sums makes 1e-6, a lost token 1e-2.
RELATIVE = 1e-5

MOE = {**trainer_cases.MOE, "num_experts": 8, "num_experts_per_token": 3}
HEADS = {"num_heads": 4, "num_kv_heads": 2}
DENSE = {**HEADS, "tie_embeddings": False}
MIXTURE = {**HEADS, "family": "qwen3_moe", "moe": MOE}
GLM = {
    **HEADS,
    "family": "glm4_moe",
    "num_layers": 3,
    "rotary_fraction": 0.5,
    "attention_bias": True,
    "tie_embeddings": False,
}
GLM["moe"] = {
    **MOE,
    "num_dense_layers": 1,
    "num_shared_experts": 1,
    "score": "sigmoid",
    "routed_scale": 2.5,
}
LATENT = trainer_cases.GLM5  # sparse if a document is longer than top_k
INDEXER = {**LATENT["mla"]["indexer"], "top_k": 64}
SHORT_LATENT = {**LATENT, "mla": {**LATENT["mla"], "indexer": INDEXER}}  # no document > top_k
DENSE_LATENT = {
    **LATENT,
    "family": "deepseek_v3",
    "num_layers": 2,
    "mla": {**LATENT["mla"], "indexer": None},
    "moe": {**LATENT["moe"], "num_experts": 16},
}
GEMMA = {**HEADS, "family": "hugging_face", "hf_config": trainer_cases.GEMMA2}
EXPERTS = {
    **{
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": True,
    },
    **{"rope_theta": 1e4, "rms_norm_eps": 1e-6},
}
MIXTRAL = {**HEADS, "family": "hugging_face", "hf_config": {**trainer_cases.GEMMA2, **EXPERTS}}
WIDE = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64}
EIGHT = {**MIXTURE, **WIDE, "moe": {**MOE, "expert_intermediate_size": 128}}
FP8 = ["attention", "experts"]
NETWORKS = {
    "eight": EIGHT,
    "gemma": GEMMA,
    "mixtral": MIXTRAL,
    "dense": DENSE,
    "mixture": MIXTURE,
    "replayed": MIXTURE,
    "glm": GLM,
    "replayed-glm": GLM,
    "adapted": MIXTURE,
    "latent": LATENT,
    "latent-short": SHORT_LATENT,
    "latent-dense": DENSE_LATENT,
    "indexing": LATENT,
    "replayed-latent": LATENT,
}
ADAPTERS = {"lora": {"rank": 4, "alpha": 8.0, "targets": ["attention", "experts"], "seed": 1}}
BALANCED = {"expert_bias_rate": 1e-3}
REPLAYING = {"indexer_choice": "replay"}
ROUTED = {"rollouts": "zmq", "weights": "files", "routed_experts": True}
TRAINERS = {
    "adapted": ADAPTERS,
    "glm": BALANCED,
    "indexing": {"indexer": "train"},
    "replayed-latent": REPLAYING,
}
KEEPING = {"kind": "selective", "keep": ["attention", "projections", "experts"]}
AWAY = {"memory": {**MEMORY, "activation_checkpointing": KEEPING, "activation_offload": True}}
FSDP = {"reshard_after_forward": True, "reduce_gradients": "micro_batch", "cpu_offload": False}

MESHES = {
    "fsdp2": {"dp_shard": 2},
    "fsdp4": {"dp_shard": 4},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "ep2": {"dp_shard": 2, "ep": 2},
    "ep4": {"dp_shard": 4, "ep": 4},
    "fsdp2_ep2": {"dp_shard": 4, "ep": 2},
    "hsdp_ep2": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    "ulysses2": {"cp": 2, "cp_style": "ulysses"},
    "ulysses4": {
        "cp": 4,
        "cp_style": "ulysses",
    },  # as many ranks as query heads, more than key heads
    "ring2": {"cp": 2, "cp_style": "ring"},
    "ring4": {"cp": 4, "cp_style": "ring"},
    "fsdp2_ring2": {"dp_shard": 2, "cp": 2, "cp_style": "ring"},
    "ep2_ulysses2": {"dp_shard": 2, "cp": 2, "ep": 2, "cp_style": "ulysses"},
    "ep2_ring2": {"dp_shard": 2, "cp": 2, "ep": 2, "cp_style": "ring"},
    "ep4_ring2": {"dp_shard": 2, "cp": 2, "ep": 4, "cp_style": "ring"},
    "hsdp_ep2_ulysses2": {"dp_replicate": 2, "cp": 2, "ep": 2, "cp_style": "ulysses"},
}
LATENT_MESHES = {
    "dsa2": {"cp": 2, "cp_style": "dsa"},
    "dsa4": {"cp": 4, "cp_style": "dsa"},
    "fsdp2_dsa2": {"dp_shard": 2, "cp": 2, "cp_style": "dsa"},
    "ep4_dsa2": {"dp_shard": 2, "cp": 2, "ep": 4, "cp_style": "dsa"},
}
CASES = {
    **{
        f"dense_{name}": {"mesh": mesh, "model": DENSE}
        for name, mesh in MESHES.items()
        if "ep" not in mesh
    },
    **{f"mixture_{name}": {"mesh": mesh, "model": MIXTURE} for name, mesh in MESHES.items()},
    **{
        f"replayed_{name}": {"mesh": MESHES[name], "model": MIXTURE}
        for name in ("ep2", "ulysses2", "ring2", "ep2_ulysses2", "ep2_ring2")
    },
    **{f"gemma_{name}": {"mesh": MESHES[name], "model": GEMMA} for name in ("fsdp2", "hsdp")},
    **{f"latent_{name}": {"mesh": mesh, "model": LATENT} for name, mesh in LATENT_MESHES.items()},
    **{
        f"latent-dense_{name}": {"mesh": LATENT_MESHES[name], "model": DENSE_LATENT}
        for name in ("dsa4", "ep4_dsa2")
    },
    "latent-short_dsa2": {"mesh": LATENT_MESHES["dsa2"], "model": SHORT_LATENT},
    **{
        f"indexing_{name}": {
            "mesh": {**MESHES, **LATENT_MESHES}[name],
            "model": LATENT,
            "trainer": TRAINERS["indexing"],
        }
        for name in ("fsdp2", "hsdp", "ep2", "dsa2", "ep4_dsa2")
    },
    **{
        f"replayed-latent_{name}": {
            "mesh": LATENT_MESHES[name],
            "model": LATENT,
            "trainer": REPLAYING,
            "transport": ROUTED,
        }
        for name in ("dsa2", "ep4_dsa2")
    },
    "mixtral_fsdp2": {"mesh": MESHES["fsdp2"], "model": MIXTRAL},
    **{
        f"eight_{name}": {"mesh": MESHES[name], "model": EIGHT, "fp8": FP8}
        for name in ("ep2", "fsdp2_ep2")
    },
    "replayed-glm_ep2_ring2": {"mesh": MESHES["ep2_ring2"], "model": GLM},
    "glm_ep2_ulysses2": {"mesh": MESHES["ep2_ulysses2"], "model": GLM, "trainer": BALANCED},
    "adapted_fsdp2_ep2": {"mesh": MESHES["fsdp2_ep2"], "model": MIXTURE, "trainer": ADAPTERS},
    "mixture_fsdp2_ep2_chunks": {"mesh": {**MESHES["fsdp2_ep2"], "ep_chunks": 2}, "model": MIXTURE},
    # Memory options on layouts, some beside adapters.
    "mixture_hsdp_ep2_reducing": {
        "mesh": MESHES["hsdp_ep2"],
        "model": MIXTURE,
        "trainer": {"fsdp": FSDP},
    },
    "mixture_ep2_ulysses2_away": {
        "mesh": MESHES["ep2_ulysses2"],
        "model": MIXTURE,
        "trainer": AWAY,
    },
    "mixture_fsdp2_ep2_hosted": {
        "mesh": MESHES["fsdp2_ep2"],
        "model": MIXTURE,
        "trainer": {"fsdp": {**FSDP, "cpu_offload": True}},
    },
    "adapted_ep4_ring2_away": {
        "mesh": MESHES["ep4_ring2"],
        "model": MIXTURE,
        "trainer": {**ADAPTERS, **AWAY, "fsdp": FSDP},
    },
}
AGAIN = {
    **{
        f"{name}_again": {
            **CASES[name],
            "trainer": {
                **CASES[name].get("trainer", {}),
                "memory": {**MEMORY, "activation_checkpointing": {"kind": "full"}},
            },
        }
        for name in (
            "mixture_ep2",
            "mixture_fsdp2_ep2",
            "dense_ulysses2",
            "dense_ring4",
            "mixture_ep2_ring2",
            "latent_dsa4",
            "latent_ep4_dsa2",
            "latent-dense_dsa4",
            "indexing_ep2",
            "indexing_dsa2",
            "replayed-latent_dsa2",
        )
    },
    **{
        f"{name}_again": {
            **CASES[name],
            "trainer": {
                **CASES[name].get("trainer", {}),
                "memory": {**MEMORY, "activation_checkpointing": KEEPING},
            },
        }
        for name in (
            "mixture_ep4",
            "mixture_ring2",
            "mixture_ep4_ring2",
            "mixture_ep2_ulysses2",
            "replayed_ep2_ring2",
            "latent_dsa2",
            "latent_fsdp2_dsa2",
            "latent-short_dsa2",
            "indexing_fsdp2",
        )
    },
    **{
        f"{name}_again": {
            **CASES[name],
            "trainer": {
                **CASES[name].get("trainer", {}),
                "memory": {
                    **MEMORY,
                    "activation_checkpointing": {"kind": "modules", "modules": modules},
                },
            },
        }
        for name, modules in {
            "dense_fsdp2_ring2": MODULES[:2],
            "mixture_hsdp_ep2_ulysses2": MODULES,
            "adapted_fsdp2_ep2": MODULES,
            "eight_fsdp2_ep2": MODULES[:3],
            "latent-dense_ep4_dsa2": MODULES,
            "indexing_ep4_dsa2": MODULES,
        }.items()
    },
}


def documents(spec, copies, is_replayed=False):
    """Rollouts with random tokens. Those after the first third are trained, never the first."""
    rng, lengths = np.random.default_rng(7), np.tile(LENGTHS, copies)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(offsets[-1])
    position = np.arange(total) - np.repeat(offsets[:-1], lengths)
    trained = position >= np.maximum(1, np.repeat(lengths, lengths) // 3)
    token = {
        "token_id": rng.integers(8, spec.model.vocab_size, total).astype(np.int32),
        "trained": trained,
        "logprob": np.where(
            trained, np.log(1 / spec.model.vocab_size) + rng.normal(0, 0.3, total), 0
        ).astype(np.float32),
        "version": np.where(trained, 0, -1).astype(np.int32),
        "advantage": np.repeat(rng.normal(0, 1, len(lengths)), lengths).astype(np.float32),
    }
    sample = {
        "temperature": rng.uniform(0.7, 1.3, len(lengths)).astype(np.float32),
        "dispatch_version": np.zeros(len(lengths), dtype=np.int32),
    }
    # Among the first half of the experts, so ranks of the other half get few rows or none.
    if is_replayed:
        shape = route_shape(spec.model)
        routes = (
            rng.random((total, shape.num_layers, shape.num_experts // 2))
            .argsort(-1)[..., : shape.top_k]
            .astype(shape.dtype)
        )
        routes[offsets[1:] - 1] = shape.no_route
        # A document of 8 tokens. Its last token lacks routes already.
        routes[offsets[5] : offsets[6], 0] = shape.no_route
        if spec.trainer.indexer_choice == "replay":
            sizes = total, spec.model.num_indexers, 8 * -(-spec.inference.max_model_len_tokens // 8)
            score = np.where(np.arange(sizes[2]) <= position[:, None, None], rng.random(sizes), -1)
            chosen = score.argsort(-1).argsort(-1) >= sizes[2] - spec.model.latent.indexer.top_k
            routes = trainer_cases.with_choices(routes, chosen, shape.num_dense_layers)
            routes[offsets[1:] - 1] = 0xFF
        token["routed_experts"] = routes
    return Columns(offsets, token, sample)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(folder with gradients, {case: its ranks' metrics})."""
    folder = tmp_path_factory.mktemp("layouts")
    for network, model in NETWORKS.items():
        write_start_weights(manifest(model=model), folder / network)
    (folder / "cases.json").write_text(json.dumps({**CASES, **AGAIN}))
    answers = run_script("parallel_rank", folder, 4, deadline_s=200)
    return folder, {
        name: [answer[name] for answer in answers if name in answer]
        for name in (*CASES, *AGAIN, "exchanges", "exchanges in FP8")
    }


@pytest.fixture(scope="module")
def alone(ran):
    """{(network, copies of the documents): (metrics, gradients)} of one device."""
    folder, found = ran[0], {}
    for network, copies in {reference_of(name) for name in CASES}:
        model = NETWORKS[network]
        fp8 = FP8 if model is EIGHT else None
        fields = {"model": model, "trainer": TRAINERS.get(network), "fp8": fp8}
        if network == "replayed-latent":
            fields["transport"] = ROUTED
        spec = spec_of(fields)
        learner = make_learner(spec, folder / network)
        canary = learner.logprobs(CANARY)
        batch = documents(spec, copies, network.startswith("replayed"))
        metrics, gradients = one_step(learner, batch)
        found[network, copies] = metrics | {"canary": canary}, gradients
    return found


def reference_of(name):
    mesh = CASES[name]["mesh"]
    num_data_ranks = mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)
    return name.partition("_")[0], copies_of(num_data_ranks)


@pytest.mark.parametrize("name", CASES)
def test_a_layout_makes_the_step_of_one_device(ran, alone, name):
    folder, metrics = ran
    expected_metrics, expected = alone[reference_of(name)]
    assert all(each == metrics[name][0] for each in metrics[name]), "ranks disagree"
    # FP8: sums in another order round differently, and each layout quantizes other blocks of rows.
    of_metrics, of_gradients = (3e-3, 6e-2) if name.startswith("eight") else (RELATIVE, RELATIVE)
    for metric, value in expected_metrics.items():
        assert metrics[name][0][metric] == (
            value if value is None else pytest.approx(value, rel=of_metrics, abs=1e-6)
        ), metric
    found = load_file(folder / f"{name}.safetensors")
    assert found.keys() == expected.keys()
    errors = {
        each: (
            torch.linalg.vector_norm(found[each] - expected[each])
            / torch.linalg.vector_norm(expected[each])
        ).item()
        for each in found
    }
    worst = max(errors, key=lambda each: errors[each])
    assert errors[worst] <= of_gradients, worst
    assert not any(torch.isnan(gradient).any() for gradient in found.values())
    if name.startswith("replayed"):
        assert metrics[name][0]["routes_missing"] == 7
        assert 0.3 < metrics[name][0]["routes_differ"] < 0.95  # made-up routes, of 3 in 8
    else:
        assert metrics[name][0]["routes_missing"] is metrics[name][0]["routes_differ"] is None
    if name.startswith("replayed-latent"):
        assert 0.1 < metrics[name][0]["choices_differ"] < 0.9  # made-up keys
        assert metrics[name][0]["choices_missing"] == 0
    assert any(metrics[name][0]["biases"]) == name.startswith("glm")
    learns = name.startswith("indexing")
    assert (metrics[name][0]["indexer_kl"] is not None) == learns
    assert any(".indexer." in each for each in found) == learns


@pytest.mark.parametrize("name", AGAIN)
def test_a_recomputed_layout_has_the_same_bits(ran, name):
    folder, metrics = ran
    plain = name.removesuffix("_again")
    assert metrics[name] == metrics[plain]
    expected = load_file(folder / f"{plain}.safetensors")
    for each, gradient in load_file(folder / f"{name}.safetensors").items():
        assert torch.equal(gradient, expected[each]), each


@pytest.mark.parametrize("name", ["exchanges", "exchanges in FP8"])
def test_every_kind_of_exchange_makes_the_same_of_the_same_tokens(ran, name):
    for of_rank in ran[1][name]:
        for kind, tensors in of_rank.items():
            for found, expected in zip(tensors, of_rank["alone"], strict=True):
                found, expected = torch.tensor(found), torch.tensor(expected)
                assert found.shape == expected.shape
                # A sum has at most three float32 rows. Only their order differs between kinds.
                assert (found - expected).norm() <= 1e-6 * expected.norm(), kind
    assert len(ran[1][name]) == 4


def test_an_exchange_whose_library_is_absent_says_what_to_do():
    with pytest.raises(
        OrreryError,
        match=r"the package deep_ep is not installed here; "
        "install it or set trainer.mesh.ep_backend to 'torch'",
    ):
        make_exchange("deepep", None, 8)


def test_a_recomputation_recalls_what_the_forward_pass_kept():
    asked = []

    def answer(number):
        if (known := blocks.recall()) is not None:
            return known
        asked.append(number)
        return blocks.keep(number)

    def block(x):
        return (x * answer(2.0)).sin() * answer(3.0)

    x, again = (torch.tensor([0.5, 0.7], requires_grad=True) for _ in range(2))
    block(x).sum().backward()
    assert asked == [2.0, 3.0] and blocks.recall() is None
    first, second = (
        checkpoint(block, again, use_reentrant=False, context_fn=blocks.recomputation_contexts)
        for _ in range(2)
    )
    (first.sum() + second.sum()).backward()
    assert asked == [2.0, 3.0] * 3
    assert torch.equal(again.grad, 2 * x.grad)


def test_of_a_result_that_compiled_code_writes_over_a_copy_is_kept():
    """Overwrite x as a compiled kernel does, without a version or a graph."""
    product, weight = frozenset([torch.ops.aten.mm.default]), torch.randn(2, 2)

    def gradient(compiled, writes_over):
        runs = []

        def block(x):
            product = x @ weight
            out = product.sin()
            if writes_over and not runs:
                product.data.zero_()
            runs.append(None)
            return out

        x = torch.tensor([[0.5, 0.7]], requires_grad=True)
        contexts = lambda: blocks.recomputation_contexts(product, compiled)  # noqa: E731
        checkpoint(block, x, use_reentrant=False, context_fn=contexts).sum().backward()
        return x.grad

    expected = gradient(frozenset(), writes_over=False)
    assert torch.equal(gradient(product, writes_over=True), expected)
    assert not torch.equal(gradient(frozenset(), writes_over=True), expected), (
        "or nothing was written over"
    )


def test_a_stage_on_ranks_that_share_documents_and_experts_trains_what_one_rank_trains(tmp_path):
    def trained(name, mesh):
        fields = {
            "model": MIXTURE,
            "stages": {"sft": None, "rl": {"num_steps": 2}},
            "transport": {"rollouts": "zmq", "weights": "files", "routed_experts": False},
        }
        spec = manifest(mesh=mesh, **fields)
        run_dir = start_run(tmp_path / name, spec)
        try:
            ends = run_rl(run_dir, spec, range(1, 3))
        finally:
            remove_weight_dir(run_dir, 1)
        assert [code for code, _ in ends] == [0] * spec.trainer.mesh.world_size, ends[0][1]
        rows = [
            row for row in read(run_dir / "metrics" / "trainer.0.jsonl") if row["stage"] == "rl"
        ]
        return rows, load_file(run_dir / "weights" / "rl" / "model.safetensors")

    expected_rows, expected = trained("alone", {})
    rows, weights = trained("shared", {"cp": 2, "ep": 2, "cp_style": "ring"})
    for row, other in zip(rows, expected_rows, strict=True):
        assert row["num_trained_tokens"] == other["num_trained_tokens"] and row.get(
            "num_tokens"
        ) == other.get("num_tokens")
    for name, weight in weights.items():
        # Summation order; test_trainer_learner.py says more.
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=5e-5)
