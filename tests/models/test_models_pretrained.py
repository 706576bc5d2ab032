"""The manifest's model against the `config.json` of the pretrained folder that it names."""

import copy
import hashlib
import json
import re

import pytest

from orrery.manifest.errors import OrreryError
from orrery.models import build, hf_config, weights
from orrery.models.hf_folder import check_config

pytest.importorskip("transformers")

LLAMA3 = {
    "kind": "llama3",
    "factor": 8.0,
    "low_frequency_factor": 1.0,
    "high_frequency_factor": 4.0,
    "original_max_positions": 16,
}
THEIR_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA = {
    "model_type": "gemma2", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 56,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "sliding_window": 6,
    "query_pre_attn_scalar": 16, "tie_word_embeddings": True,
}  # fmt: skip


def written(directory, model, **changes):
    (directory / "config.json").write_text(json.dumps({**hf_config(model), **changes}))
    return directory


def refusal(model, directory):
    with pytest.raises(OrreryError) as caught:
        check_config(model, directory)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(directory / "config.json"), "config.json")


DIFFERENT = [  # family, key of config.json, value there, the sentence
    ("qwen3", "rope_theta", 1e7,
     "model.rope_theta 50000.0: config.json says rope_theta 10000000.0. "
     "Write model.rope_theta: 10000000.0"),
    ("qwen3", "rope_parameters", {"rope_theta": 1e7, "rope_type": "default"},
     "model.rope_theta 50000.0: config.json says rope_theta 1000"),
    ("qwen3", "rms_norm_eps", 0.001,
     "model.rms_norm_eps 1e-06: config.json says rms_norm_eps 0.001. "
     "Write model.rms_norm_eps: 0.001"),
    ("qwen3", "head_dim", 8, "model.head_dim 16: config.json says head_dim 8. Write"),
    ("qwen3", "tie_word_embeddings", False,
     "model.tie_embeddings true: config.json says tie_word_embeddings false. Write"),
    ("qwen3", "use_sliding_window", True,
     "family \"qwen3\": config.json says use_sliding_window true"),
    ("qwen3", "hidden_act", "gelu",
     'config.json says hidden_act "gelu", but this family supports only "silu". Choose'),
    ("qwen3", "model_type", "qwen2",
     'model.family "qwen3": needs model_type "qwen3", but config.json has "qwen2". Choose'),
    ("qwen3", "max_position_embeddings", 128,
     "model.max_positions 256: config.json says max_position_embeddings 128. Write 128, or"),
    ("qwen3", "rope_scaling", YARN,
     'model.rope_scaling null: config.json says rope_scaling {"rope_type": "yarn", '
     '"factor": 4.0, '),
    ("qwen3", "rope_scaling", {"type": "linear", "factor": 2.0},
     "Family \"qwen3\" does not compute this scaling: choose 'hugging_face'"),
    ("llama", "rope_scaling", THEIR_LLAMA3, f"Write model.rope_scaling: {json.dumps(LLAMA3)}"),
    ("llama", "mlp_bias", True,
     "config.json says mlp_bias true, but this family supports only false"),
    ("qwen3_moe", "norm_topk_prob", False,
     "model.moe.normalize_top_k true: config.json says norm_topk_prob false. Write"),
    ("qwen3_moe", "num_experts_per_tok", 3,
     "model.moe.num_experts_per_token 2: config.json says num_experts_per_tok 3. Write"),
    ("qwen3_moe", "decoder_sparse_step", 2,
     "config.json says decoder_sparse_step 2, but this family supports only 1"),
    ("glm4_moe", "partial_rotary_factor", 1.0,
     "model.rotary_fraction 0.5: config.json says partial_rotary_factor 1.0. Write"),
    ("glm4_moe", "routed_scaling_factor", 1.0,
     "model.moe.routed_scale 1.5: config.json says routed_scaling_factor 1.0. Write"),
    ("glm4_moe", "use_qk_norm", False,
     "model.qk_norm true: config.json says use_qk_norm false. Write"),
    ("glm4_moe", "n_group", 2, "config.json says n_group 2, but this family supports only 1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "key", "value", "sentence"),
    DIFFERENT,
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_a_network_computes_with_is_the_same_in_manifest_and_folder(
    family, key, value, sentence, make_model, tmp_path
):
    model = make_model(family)
    check_config(model, written(tmp_path, model))
    assert sentence in refusal(model, written(tmp_path, model, **{key: value}))


def test_a_folder_that_scales_otherwise_than_the_manifest_is_refused(make_model, tmp_path):
    model, plain = make_model("llama", rope_scaling=LLAMA3), make_model("llama")
    check_config(model, written(tmp_path, model))
    assert refusal(model, written(tmp_path, plain)).endswith(
        "says rope_scaling null. Write model.rope_scaling: null"
    )
    factor = written(tmp_path, model, rope_scaling={**THEIR_LLAMA3, "factor": 32.0})
    assert '"factor": 32.0' in refusal(model, factor).partition(". Write model.rope_scaling: ")[2]


def test_a_model_of_transformers_has_the_folder_s_config(make_model, tmp_path):
    content = copy.deepcopy(GEMMA)
    model = make_model("hugging_face", hf_config=content)
    check_config(
        model, written(tmp_path, model, hidden_dropout=0.1, eos_token_id=7, dtype="bfloat16")
    )
    assert refusal(model, written(tmp_path, model, sliding_window=7)) == (
        "model.hf_config.sliding_window 6: config.json says sliding_window 7. "
        "Write model.hf_config.sliding_window: 7"
    )
    assert "model.hf_config.attn_logit_softcapping 50.0: " in refusal(
        model, written(tmp_path, model, attn_logit_softcapping=30.0)
    )
    assert 'model.hf_config.model_type "gemma2": ' in refusal(
        model, written(tmp_path, model, model_type="gemma")
    )
    assert refusal(model, written(tmp_path, model, rope_theta=500.0)).startswith(
        "model.hf_config.rope_parameters {"
    )
    assert content == GEMMA


def test_what_is_not_computed_with_and_what_one_side_leaves_out_may_differ(make_model, tmp_path):
    model = make_model(head_dim=128, rms_norm_eps=1e-6, tie_embeddings=False)
    config = hf_config(model) | {
        "torch_dtype": "bfloat16", "eos_token_id": [1, 2], "use_cache": False,
        "max_position_embeddings": 512, "initializer_range": 0.1, "attention_dropout": 0.1,
        "_name_or_path": "there", "transformers_version": "4.51.0", "max_window_layers": 1,
        "an_unknown_key": 3,
    }  # fmt: skip
    for default in (
        "head_dim",
        "rms_norm_eps",
        "hidden_act",
        "tie_word_embeddings",
        "attention_bias",
        "use_sliding_window",
        "rope_scaling",
    ):
        del config[default]
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_config(model, tmp_path)
    config["rope_parameters"] = {"rope_theta": config.pop("rope_theta"), "rope_type": "default"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_config(model, tmp_path)
    for family in ("qwen3_moe", "glm4_moe"):  # their classes have no default head_dim
        model = make_model(family, head_dim=8)
        (tmp_path / "config.json").write_text(
            json.dumps({k: v for k, v in hf_config(model).items() if k != "head_dim"})
        )
        check_config(model, tmp_path)
        assert "model.head_dim 16: config.json says head_dim 8." in refusal(
            make_model(family), tmp_path
        )


def test_a_folder_of_other_constants_is_neither_loaded_nor_written_again(make_model, tmp_path):
    model, directory = make_model(), tmp_path / "hf"
    module = build(model)
    weights.initialize(module, model)
    weights.save(module, model, directory)
    digest = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
    written(directory, model, rope_theta=1e7)
    pretrained = make_model(
        init={"kind": "pretrained", "path": str(directory), "revision": "main", "sha256": digest}
    )
    again = build(pretrained)
    with pytest.raises(OrreryError, match=r"model\.rope_theta 50000\.0: "):
        weights.initialize(again, pretrained)
    assert all(parameter.isnan().all() for parameter in again.parameters())
    with pytest.raises(OrreryError, match=r"model\.rope_theta 50000\.0: "):
        weights.write_initial(
            pretrained, tmp_path / "out", build(pretrained).embed_tokens.weight.dtype
        )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, r"model\.init\.path: .* has no config\.json\. Name a Hugging Face directory"),
        ("{", r"config\.json: not JSON \(.*\); copy the directory again"),
        ("[]", r"config\.json: holds a list, and an object is expected; copy the directory again"),
        (
            '{"rope_scaling": {"rope_type": "yarn"}}',
            r"config\.json: transformers refuses the config \(.*factor.*\)\. Correct",
        ),
    ],
)
def test_a_config_that_cannot_be_read_is_a_sentence(text, sentence, make_model, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert re.search(sentence, refusal(make_model(), tmp_path))
