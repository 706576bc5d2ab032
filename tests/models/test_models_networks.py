"""The networks against transformers, and against themselves document by document."""

import logging

import pytest
import torch

from orrery.kernels.token_logprob import reference_token_logprob
from orrery.manifest.errors import OrreryError
from orrery.models import build, hf_config, weights
from orrery.models.hf_folder import check_config

UNNORMALIZED = {
    "num_experts": 5,
    "num_experts_per_token": 3,
    "expert_intermediate_size": 12,
    "normalize_top_k": False,
    "num_dense_layers": 0,
    "num_shared_experts": 0,
    "score": "softmax",
    "routed_scale": 1.0,
}
LLAMA3 = {
    "kind": "llama3",
    "factor": 8.0,
    "low_frequency_factor": 1.0,
    "high_frequency_factor": 4.0,
    "original_max_positions": 16,
}
YARN = {
    "kind": "yarn",
    "factor": 8.0,
    "fast_turns": 4.0,
    "slow_turns": 1.0,
    "angle_scale": 1.0,
    "score_scale": 0.7,
    "original_max_positions": 16,
}
VARIANTS = {
    "dense, tied": ("qwen3", {}),
    "dense, untied, every head its own key": (
        "qwen3",
        {"tie_embeddings": False, "num_kv_heads": 4},
    ),
    "dense, one key head, heads wider than hidden": ("qwen3", {"num_kv_heads": 1, "head_dim": 24}),
    "mixture, untied": ("qwen3_moe", {"tie_embeddings": False}),
    "mixture, tied, scores as they are": ("qwen3_moe", {"moe": UNNORMALIZED}),
    "llama, tied": ("llama", {"rope_theta": 10000.0}),
    "llama, untied, slowed rotation, one key head": (
        "llama",
        {"tie_embeddings": False, "num_kv_heads": 1, "rope_scaling": LLAMA3},
    ),
    "glm": ("glm4_moe", {"tie_embeddings": False}),
    "glm, norms, no biases, scores as they are, two shared experts": (
        "glm4_moe",
        {
            "tie_embeddings": False,
            "attention_bias": False,
            "num_kv_heads": 4,
            "moe": {
                **UNNORMALIZED,
                "num_shared_experts": 2,
                "score": "sigmoid",
                "routed_scale": 2.5,
            },
        },
    ),
    "glm, tied, no norms, all of a head turns": (
        "glm4_moe",
        {"qk_norm": False, "num_kv_heads": 1, "rotary_fraction": 1.0},
    ),
    "glm 5, sparse": ("glm5", {}),
    "glm 5, sparse, two layers share a choice": (
        "glm5",
        {"num_layers": 4, "indexer": {"types": ["full", "shared", "shared", "full"]}},
    ),
    "deepseek v3, slowed rotation": ("deepseek_v3", {"num_experts": 16, "rope_scaling": YARN}),
    "deepseek v3.2, slowed rotation": ("deepseek_v32", {"num_experts": 16, "rope_scaling": YARN}),
    "deepseek v3.2": ("deepseek_v32", {"num_experts": 24}),
    "glm 5, documents of at most top_k": ("glm5", {"indexer": {"top_k": 64}}),
}
variants = pytest.mark.parametrize(("family", "fields"), VARIANTS.values(), ids=VARIANTS)


def initialized(model, dtype=torch.float32):
    module = build(model, dtype)
    weights.initialize(module, model)
    with torch.no_grad():  # norms of one and biases of zero would hide a misplaced tensor
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name)))
            if name.endswith("norm.weight"):
                tensor.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                tensor.copy_(0.3 * noise)
    return module


@pytest.fixture
def transformers():
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return transformers


@variants
def test_transformers_reads_our_directory_and_computes_our_logits(
    family, fields, make_model, make_pack, tmp_path, transformers
):
    model = make_model(family, **fields)
    module = initialized(model)
    weights.save(module, model, tmp_path / "hf")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    token_ids, positions, cu_seqlens = make_pack([50])
    with torch.no_grad():
        expected = theirs(token_ids[None]).logits[0]
    assert expected.std() > 0.1
    assert (module.logits(token_ids, positions, cu_seqlens) - expected).abs().max() <= 1e-4


@variants
def test_we_read_a_directory_that_transformers_wrote(
    family, fields, make_model, make_pack, tmp_path, transformers
):
    model = make_model(family, **fields)
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**hf_config(model)), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
        for name, buffer in theirs.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
    theirs.save_pretrained(tmp_path / "hf")
    check_config(model, tmp_path / "hf")
    module = build(model)
    weights.load(module, tmp_path / "hf")
    token_ids, positions, cu_seqlens = make_pack([50])
    with torch.no_grad():
        expected = theirs(token_ids[None]).logits[0]
    error = (module.logits(token_ids, positions, cu_seqlens) - expected).abs().max()
    assert error <= 1e-4 * max(1.0, expected.abs().max())


@variants
def test_a_training_gradient_equals_the_one_of_transformers(
    family, fields, make_model, make_pack, tmp_path, transformers
):
    model = make_model(family, **fields)
    module = initialized(model)
    weights.save(module, model, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    token_ids, positions, cu_seqlens = make_pack([30])
    logprob, _ = module.log_probs(
        module(token_ids, positions, cu_seqlens), token_ids.roll(-1), torch.ones(30), chunk_tokens=7
    )
    logprob[:-1].mean().backward()
    torch.log_softmax(theirs(token_ids[None]).logits[0, :-1], -1).gather(
        1, token_ids[1:, None]
    ).mean().backward()
    expected = dict(theirs.named_parameters())
    compared = 0
    for hf in weights.hf_tensors(module):
        if hf.expert is None and hf.name in expected:  # a buffer has no gradient
            ours = module.get_parameter(hf.parameter_name).grad
            if ".indexer." in hf.name:
                assert ours is None and expected[hf.name].grad is None, "indexers are frozen"
                continue
            assert (ours - expected[hf.name].grad).abs().max() <= 1e-4 * expected[
                hf.name
            ].grad.abs().max() + 1e-7, hf.name
            compared += 1
    for layer in range(
        model.moe.num_dense_layers if model.moe else model.num_layers, model.num_layers
    ):
        experts = module.layers[layer].mlp.experts
        reference = expected[f"model.layers.{layer}.mlp.experts.gate_up_proj"].grad
        assert (experts.gate_up_proj.grad - reference).abs().max() <= 1e-4 * reference.abs().max()
    assert compared >= 8 * model.num_layers + 2


@variants
def test_a_pack_gives_what_its_documents_give_alone(family, fields, make_model, make_pack):
    module = initialized(make_model(family, **fields), torch.float64)
    lengths = [9, 1, 14, 13, 3]
    token_ids, positions, cu_seqlens = make_pack(lengths)
    packed = module(token_ids, positions, cu_seqlens)
    for start, length in zip(cu_seqlens.tolist(), lengths, strict=False):
        own = slice(start, start + length)
        alone = module(token_ids[own], positions[own], torch.tensor([0, length], dtype=torch.int32))
        torch.testing.assert_close(packed[own], alone, rtol=1e-10, atol=1e-10)


@variants
def test_log_probs_are_the_log_softmax_of_the_logits_at_each_temperature(
    family, fields, make_model, make_pack
):
    module = initialized(make_model(family, **fields))
    pack = make_pack([9, 12])
    target, temperature = pack[0].roll(-1), torch.linspace(0.5, 1.5, 21)
    logprob, entropy = module.log_probs(module(*pack), target, temperature, chunk_tokens=4)
    expected = reference_token_logprob(module(*pack), module.lm_head_weight, target, temperature)
    torch.testing.assert_close((logprob, entropy), expected, rtol=1e-5, atol=1e-5)
    assert logprob.dtype == entropy.dtype == torch.float32


def test_the_router_is_computed_in_float32_under_bfloat16_weights(make_model, make_pack):
    module = initialized(make_model("qwen3_moe"), torch.bfloat16)
    scores = []
    module.layers[0].mlp.gate.register_forward_hook(
        lambda _module, inputs, output: scores.append((inputs[0], output[0]))
    )
    hidden = module(*make_pack([20]))
    x, score = scores[0]
    expected = (
        torch.softmax(x.float() @ module.layers[0].mlp.gate.weight.float().T, dim=-1).topk(2).values
    )
    assert hidden.dtype == torch.bfloat16 and score.dtype == torch.float32
    torch.testing.assert_close(score, expected / expected.sum(-1, keepdim=True))


@variants
def test_a_pack_of_no_tokens_gives_zero_gradients(family, fields, make_model):
    module = initialized(make_model(family, **fields))
    nothing = torch.zeros(0, dtype=torch.int64)
    hidden = module(nothing, nothing, torch.zeros(1, dtype=torch.int32))
    logprob, entropy = module.log_probs(hidden, nothing, torch.zeros(0), chunk_tokens=8)
    (logprob.sum() + entropy.sum()).backward()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.abs().max() == 0, name


@pytest.mark.parametrize("family", ["llama", "glm4_moe"])
def test_blocks_compile_as_one_graph_each_and_compute_the_same(family, make_model, make_pack):
    torch._dynamo.reset()  # blocks that other tests compiled count towards the limit
    model = make_model(family)
    module, compiled, pack = initialized(model), initialized(model), make_pack([9, 12])
    for block in compiled.layers:
        block.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    expected, hidden = module(*pack), compiled(*pack)
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)
    expected.square().mean().backward()
    hidden.square().mean().backward()
    for (name, one), (_, other) in zip(
        module.named_parameters(), compiled.named_parameters(), strict=True
    ):
        torch.testing.assert_close(
            other.grad,
            one.grad,
            rtol=1e-4,
            atol=1e-6,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def test_a_glm_that_engines_would_read_differently_is_refused(make_model):
    moe = make_model("glm4_moe").moe.model_dump()
    with pytest.raises(
        OrreryError, match=r"model\.moe\.score 'softmax': family 'glm4_moe' supports only"
    ):
        build(make_model("glm4_moe", moe={**moe, "score": "softmax"}))
    with pytest.raises(OrreryError, match=r"model\.moe\.num_shared_experts 0"):
        build(make_model("glm4_moe", moe={**moe, "num_shared_experts": 0}))
