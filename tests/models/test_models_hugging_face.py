"""Networks of transformers behind our interface, against transformers itself."""

import copy
import json
import math

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from orrery.manifest.errors import OrreryError
from orrery.models import axis, build, fsdp_units, weights
from orrery.models import hugging_face as model_module
from orrery.models.hf_folder import check_config, parse_config

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    **dict.fromkeys(["rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"], 1e-6),
}
# The manifest's values.
SAME = {
    "intermediate_size": 40,
    "head_dim": 8,
    "max_positions": 64,
    "rope_theta": 10000.0,
}
LAYERS = ["sliding_attention", "full_attention"]
TIED, UNTIED = {**SIZES, "tie_word_embeddings": True}, {**SIZES, "tie_word_embeddings": False}
ARCHITECTURES = {
    "gemma2: soft caps, a window": {
        "model_type": "gemma2",
        **TIED,
        "sliding_window": 6,
        "layer_types": LAYERS,
    },
    "gemma3: two rotations, scaled embeddings": {
        "model_type": "gemma3_text",
        **TIED,
        "sliding_window": 6,
        "layer_types": LAYERS,
    },
    "gpt_neox: biases, half of a head turns": {
        "model_type": "gpt_neox",
        **UNTIED,
        "rotary_pct": 0.5,
    },
    "olmo2: norms behind": {"model_type": "olmo2", **UNTIED},
    "phi3: fused projections": {"model_type": "phi3", **UNTIED},
    "gpt2: learned positions, dropout": {"model_type": "gpt2", **TIED, "n_positions": 64},
    "phi: a head with a bias": {"model_type": "phi", **UNTIED},
    "opt: a part of the body is asked": {
        "model_type": "opt",
        **UNTIED,
        "ffn_dim": 40,
        "word_embed_proj_dim": 32,
        "pad_token_id": 1,
    },
    "mamba: the dtype of the head is asked": {"model_type": "mamba", **UNTIED, "state_size": 4},
    "falcon_h1: the body scales logits": {
        "model_type": "falcon_h1",
        **UNTIED,
        "lm_head_multiplier": 0.5,
        "time_step_limit": [0.0, 100.0],
        **{"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
        **{"mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8},
    },
    "llama4_text: the body has another name than its prefix": {
        "model_type": "llama4_text",
        **UNTIED,
        "intermediate_size_mlp": 40,
        "num_local_experts": 2,
        "moe_layers": [],
        "attention_chunk_size": 64,
        "rope_theta": 10000.0,
    },
    "mixtral: experts one by one in files": {
        "model_type": "mixtral",
        **UNTIED,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "rope_theta": 1e4,
    },
    "qwen2_moe: an expert for all": {
        **{
            "model_type": "qwen2_moe",
            **UNTIED,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
        **{"shared_expert_intermediate_size": 16, "mlp_only_layers": [0]},
    },
}
architectures = pytest.mark.parametrize("content", ARCHITECTURES.values(), ids=ARCHITECTURES)


@pytest.fixture
def make_network(make_model):
    def make(content, dtype=torch.float32, device="cpu", **fields):
        model = make_model(
            "hugging_face",
            hf_config=content,
            tie_embeddings=content["tie_word_embeddings"],
            **SAME | fields,
        )
        return model, build(model, dtype, device)

    return make


def filled(model, module):
    weights.initialize(module, model)
    with torch.no_grad():  # norms of one and biases of zero would hide a missing tensor
        for index, parameter in enumerate(module.parameters()):
            if parameter.ndim == 1:
                parameter.add_(
                    0.2
                    * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
                )
    return module


@architectures
def test_log_probs_gradients_and_files_are_those_of_transformers(
    content, make_network, make_pack, tmp_path
):
    model, module = make_network(content, device="meta")
    filled(model, module)
    weights.save(module, model, tmp_path)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    lengths, temperature = [17, 1, 9], torch.linspace(0.5, 1.5, 27)
    token_ids, positions, cu_seqlens = make_pack(lengths)
    target = token_ids.roll(-1)
    logprob, entropy = module.log_probs(
        module(token_ids, positions, cu_seqlens), target, temperature, chunk_tokens=10
    )
    logits = (
        torch.cat([theirs(document[None]).logits[0] for document in token_ids.split(lengths)])
        / temperature[:, None]
    )
    expected = logits.log_softmax(-1)
    assert logits.std() > 0.05
    torch.testing.assert_close(
        module.logits(token_ids, positions, cu_seqlens),
        logits * temperature[:, None],
        rtol=0,
        atol=1e-4,
    )
    torch.testing.assert_close(
        logprob, expected.gather(1, target[:, None])[:, 0], rtol=0, atol=1e-4
    )
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1), rtol=0, atol=1e-4)
    logprob.mean().backward()
    expected.gather(1, target[:, None]).mean().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in module.named_parameters():
        body_name = model_module.find_body(theirs)
        reference = gradients[name.replace("body.", f"{body_name}.")]
        assert (parameter.grad - reference).abs().max() <= 1e-4 * reference.abs().max() + 1e-7, name


@pytest.mark.parametrize("name", ["gemma2: soft caps, a window", "phi: a head with a bias"])
@pytest.mark.parametrize("keep_logits", [False, True])
def test_a_head_of_bfloat16_has_float32_logits(name, keep_logits, make_network):
    model, module = make_network(ARCHITECTURES[name], torch.bfloat16)
    head = filled(model, module).lm_head
    assert not head.is_plain
    generator = torch.Generator().manual_seed(3)
    hidden = (20 * torch.randn(24, 32, generator=generator)).bfloat16().requires_grad_()
    target, temperature = torch.arange(24), torch.linspace(0.5, 1.5, 24)
    wide = [one.detach().float().requires_grad_() for one in (hidden, head.head_weight())]
    expected = wide[0] @ wide[1].T
    expected = 30 * torch.tanh(expected / 30) if head.bias is None else expected + head.bias.float()
    assert (expected - expected.bfloat16()).abs().max() > 1e-2, "a rounding would show"
    torch.testing.assert_close(head.logits(hidden), expected, rtol=0, atol=1e-4)
    logprob, _ = head(hidden, target, temperature, 10, keep_logits)
    reference = (expected / temperature[:, None]).log_softmax(-1).gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(logprob, reference, rtol=0, atol=1e-4)
    logprob.sum().backward()
    reference.sum().backward()
    for found, of in zip((hidden.grad, head.head_weight().grad), wide, strict=True):
        # bfloat16 rounds the logits' gradient, the result, and the weight's sum over three chunks.
        assert torch.linalg.vector_norm(found.float() - of.grad) < 2**-7 * torch.linalg.vector_norm(
            of.grad
        )


def test_the_length_of_a_chunk_changes_no_log_prob_of_a_capped_head(make_network, make_pack):
    model, module = make_network(ARCHITECTURES["gemma2: soft caps, a window"])
    filled(model, module)
    pack, temperature = make_pack([7, 9]), torch.ones(16)
    scores = [
        module.log_probs(module(*pack), pack[0].roll(-1), temperature, chunk_tokens)
        for chunk_tokens in (3, 16, "auto")
    ]
    for other in scores[1:]:
        torch.testing.assert_close(other, scores[0], rtol=0, atol=1e-5)


@architectures
def test_a_network_of_transformers_is_read_from_its_folder(
    content, make_network, make_pack, tmp_path
):
    model, module = make_network(content)
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**content), dtype=torch.float32
    ).eval()
    theirs.save_pretrained(tmp_path)
    check_config(model, tmp_path)
    weights.load(module, tmp_path)
    token_ids, positions, cu_seqlens = make_pack([30])
    with torch.no_grad():
        expected = theirs(token_ids[None]).logits[0]
    torch.testing.assert_close(
        module.logits(token_ids, positions, cu_seqlens), expected, rtol=0, atol=1e-4
    )


@architectures
def test_a_pack_of_no_tokens_gives_zero_gradients(content, make_network):
    model, module = make_network(content)
    filled(model, module)
    nothing = torch.zeros(0, dtype=torch.int64)
    hidden = module(nothing, nothing, torch.zeros(1, dtype=torch.int32))
    logprob, entropy = module.log_probs(hidden, nothing, torch.zeros(0), chunk_tokens=8)
    (logprob.sum() + entropy.sum()).backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() == 0, name


def test_initial_weights_follow_the_manifests_std_and_seed_and_transformers_rules(make_network):
    model, module = make_network(ARCHITECTURES["gemma3: two rotations, scaled embeddings"])
    weights.initialize(module, model)
    layer = module.layers[0]
    assert abs(layer.mlp.up_proj.weight.std() / model.init.std - 1) < 0.1
    assert (layer.input_layernorm.weight == 0).all()  # which Gemma adds to one
    _, again = make_network(ARCHITECTURES["gemma3: two rotations, scaled embeddings"])
    weights.initialize(again, model)
    assert all(
        torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True)
    )
    assert len(fsdp_units(module)) == 2


def test_what_the_manifest_and_the_config_say_differently_is_refused(make_network):
    content = {**ARCHITECTURES["olmo2: norms behind"], "rope_theta": 10000.0}
    differ = {
        "vocab_size": ("vocab_size", 64, "vocab_size 61: "),
        "num_heads": ("num_attention_heads", 8, "num_heads 4: "),
        "num_kv_heads": ("num_key_value_heads", 4, "num_kv_heads 2: "),
        "intermediate_size": ("intermediate_size", 48, "intermediate_size 40: "),
        "rope_theta": ("rope_theta", 500000.0, "rope_theta 10000.0: "),
        "rms_norm_eps": ("rms_norm_eps", 1e-5, "rms_norm_eps 1e-06: "),
    }
    for ours, (theirs, value, told) in differ.items():
        with pytest.raises(
            OrreryError,
            match=rf"model\.{told}model\.hf_config\.{theirs} is {value}\. Make them equal",
        ) as caught:
            make_network({**content, theirs: value})
        assert f"model.{ours} " in str(caught.value)
    with pytest.raises(
        OrreryError,
        match=r"model\.head_dim 8: model\.hf_config has head sizes 16\. "
        r"Set model\.head_dim to one of these",
    ):
        make_network(
            {**content, "model_type": "gemma2", "tie_word_embeddings": True, "head_dim": 16}
        )
    # The architecture ignores it.
    make_network(
        {**ARCHITECTURES["gpt_neox: biases, half of a head turns"], "num_key_value_heads": 1}
    )


REFUSED = {
    "falcon": r"model\.hf_config: transformers refuses this config \(property 'head_dim'",
    "t5": r"model\.hf_config\.model_type 't5': transformers has no causal language model of "
    r"this type",
    "vit": r"model\.hf_config\.model_type 'vit': transformers has no causal language model of "
    r"this type",
    "gemma3": r"model\.hf_config\.model_type 'gemma3': this model has several parts\. "
    r".* of its text model, of type 'gemma3_text'",
    "xlnet": r"'xlnet': its tokens attend to later tokens\. Choose a causal language model",
    "electra": r"with is_decoder false, tokens of 'electra' attend to later tokens\. "
    r"Set model\.hf_config\.is_decoder to true",
}


@pytest.mark.parametrize(
    "parts",
    [
        lambda stack: {f"{e}.up": one.T for e, one in enumerate(stack)},
        lambda stack: {
            f"{e}.{half}": one[half::2] for e, one in enumerate(stack) for half in (0, 1)
        },
        lambda stack: {"even": stack[::2], "odd": stack[1::2]},
    ],
    ids=["turned", "interleaved", "two groups of experts"],
)
def test_files_that_hold_experts_in_any_other_way_are_refused_in_a_sentence(
    parts, make_network, monkeypatch
):
    def revert(network, state):
        return {
            there: part
            for name, stack in state.items()
            for there, part in (parts(stack) if stack.ndim == 3 else {name: stack}).items()
        }

    monkeypatch.setattr(model_module, "revert_weight_conversion", revert)
    told = (
        r"'mixtral': its files do not store model\.layers\.0\.mlp\.experts\.gate_up_proj "
        r"as equal parts of each expert"
    )
    with pytest.raises(OrreryError, match=told):
        make_network(ARCHITECTURES["mixtral: experts one by one in files"])


def test_an_experts_initial_weights_are_those_of_its_stack_however_it_is_wrapped(make_network):
    model, module = make_network(ARCHITECTURES["mixtral: experts one by one in files"])
    weights.initialize(module, model)
    held = {name: tensor.clone() for name, tensor in weights.named_hf_tensors(module)}
    experts = [
        tensor
        for name, tensor in held.items()
        if ".experts." in name and name.endswith("w1.weight")
    ]
    assert len(experts) == 6 and all(
        abs(one.std() - model.init.std) < 0.2 * model.init.std for one in experts
    )
    assert not torch.equal(experts[0], experts[1])
    for index, layer in enumerate(module.layers):
        module.layers[index] = checkpoint_wrapper(layer)
    weights.initialize(module, model)
    assert all(torch.equal(held[name], tensor) for name, tensor in weights.named_hf_tensors(module))


@pytest.mark.parametrize("kind", REFUSED)
def test_a_type_that_cannot_be_built_is_refused_in_a_sentence(kind, make_network):
    content = {**ARCHITECTURES["olmo2: norms behind"], "model_type": kind, "rope_theta": 10000.0}
    if kind == "xlnet":
        content = {
            name: value for name, value in content.items() if name != "max_position_embeddings"
        } | {"d_head": 8, "d_inner": 40}
    with pytest.raises(OrreryError, match=REFUSED[kind]) as caught:
        make_network(content)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["gpt2: learned positions, dropout", "opt: a part of the body is asked"]
)
def test_more_positions_than_a_network_without_rotation_has_are_refused(name, make_network):
    field = "n_positions" if name.startswith("gpt2") else "max_position_embeddings"
    with pytest.raises(
        OrreryError,
        match=rf"model\.max_positions 65: model\.hf_config\.{field} is 64, .*\. "
        r"Set model\.max_positions to 64 or less",
    ):
        make_network(ARCHITECTURES[name], max_positions=65)


@pytest.mark.parametrize("name", ["olmo2: norms behind", "mamba: the dtype of the head is asked"])
def test_a_network_without_a_table_of_positions_may_have_more_than_its_config(name, make_network):
    make_network(ARCHITECTURES[name], max_positions=65)


LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 5.0, 6.0, 8.0],
}
ROTATIONS = {  # as of configs, the field that bounds them, and its value
    "longrope": (
        {
            "model_type": "phi3",
            **UNTIED,
            "original_max_position_embeddings": 16,
            "rope_parameters": LONG,
        },
        ("original_max_position_embeddings", 16),
    ),
    "dynamic": (
        {
            "model_type": "llama",
            **UNTIED,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        },
        ("max_position_embeddings", 64),
    ),
}


@pytest.mark.parametrize("kind", ROTATIONS)
def test_a_rotation_of_the_longest_row_is_refused_beyond_the_length_up_to_which_it_is_one(
    kind, make_network, make_pack
):
    content, (field, most) = ROTATIONS[kind]
    before = copy.deepcopy(content)
    told = (
        rf"model\.max_positions {most + 1}: model\.hf_config\.{field} is {most}, "
        rf"and above it, angles of rope_type '{kind}' depend"
    )
    with pytest.raises(OrreryError, match=told):
        make_network(content, max_positions=most + 1)
    model, module = make_network(content, max_positions=most)
    assert model.hf_config == before, "what transformers writes into it is not the manifest's"
    filled(model, module)
    (token_ids, positions, _), alone = make_pack([9]), torch.tensor([0, 9], dtype=torch.int32)
    expected = module.logits(token_ids, positions, alone)
    beside = torch.arange(most) % 61
    pack = (
        torch.cat([beside, token_ids]),
        torch.cat([torch.arange(most), positions]),
        torch.tensor([0, most, most + 9], dtype=torch.int32),
    )
    torch.testing.assert_close(module.logits(*pack)[most:], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(module.logits(token_ids, positions, alone), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "wrong",
    [{"hidden_size": "wide"}, {"num_key_value_heads": 0}, {"num_attention_heads": 0}],
    ids=str,
)
def test_a_value_that_transformers_does_not_take_is_told_in_a_sentence(wrong, make_network):
    with pytest.raises(OrreryError, match=r"model\.hf_config") as caught:
        make_network({**ARCHITECTURES["olmo2: norms behind"], **wrong})
    assert "\n" not in str(caught.value)


def test_a_head_that_needs_its_body_is_refused_in_a_sentence(make_network, monkeypatch):
    monkeypatch.setattr(model_module, "_BodyOutput", lambda hidden: None)
    told = (
        r"model\.hf_config\.model_type 'olmo2': its logits cannot be computed without its body \("
    )
    with pytest.raises(OrreryError, match=told):
        make_network(ARCHITECTURES["olmo2: norms behind"])


def test_a_network_without_a_body_is_refused_in_a_sentence(make_network, monkeypatch):
    class Flat(transformers.Olmo2ForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.embed_tokens, self.layers = self.model.embed_tokens, self.model.layers
            del self.model

    monkeypatch.setattr(model_module.AutoModelForCausalLM, "from_config", Flat)
    told = r"model\.hf_config\.model_type 'olmo2': no part of its network holds all layers"
    with pytest.raises(OrreryError, match=told):
        make_network(ARCHITECTURES["olmo2: norms behind"])


def test_a_tied_decoder_that_does_not_name_its_embedding_is_refused(make_network):
    content = {**TIED, "is_decoder": True, "decoder_layers": 2, "decoder_attention_heads": 4}
    told = r"model\.hf_config\.model_type 'trocr': transformers does not say which module embeds"
    with pytest.raises(OrreryError, match=told):
        make_network({**content, "model_type": "trocr", "decoder_ffn_dim": 40, "pad_token_id": 1})


def test_a_model_whose_layers_have_different_head_sizes_is_refused(make_network):
    content = {"model_type": "gemma4_text", **TIED, "layer_types": LAYERS, "global_head_dim": 16}
    told = "layers of 'gemma4_text' differ in head_dim, which is not supported. Choose another"
    with pytest.raises(OrreryError, match=rf"^model\.hf_config: {told}"):
        make_network(content)
    with pytest.raises(OrreryError, match=f"^config.json: {told}"):
        parse_config(content, "config.json")
    parse_config({**content, "global_head_dim": 8}, "config.json")  # all layers have the same


@pytest.mark.parametrize("infinity", [math.inf, {"__float__": "Infinity"}], ids=str)
def test_an_infinity_in_a_config_becomes_part_of_the_manifest(infinity, make_model, tmp_path):
    content = {**ARCHITECTURES["falcon_h1: the body scales logits"]}
    content["time_step_limit"] = [0.0, infinity]
    (tmp_path / "config.json").write_text(json.dumps(content))
    like = make_model("qwen3").model_dump()
    model, _ = axis.model_of(tmp_path, like["init"], like["tokenizer"])
    assert model.hf_config["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    check_config(model, tmp_path)
    assert build(model).body.config.time_step_limit[1] == math.inf
