"""Hugging Face names of the families' parameters and `config.json` fields.

A family maps our parameter names to HF's. `{expert}` on the right splits dimension 0 of our tensor.
Several names on the right share the next dimension evenly, in order.
"""

from typing import Any

from orrery.manifest.schema import Model

Names = dict[str, str | tuple[str, ...]]


def _prefixed(*names: str) -> Names:
    return {name: f"model.{name}" for name in names}


_DECODER: Names = {
    **_prefixed(
        "embed_tokens.weight",
        "layers.{layer}.input_layernorm.weight",
        "layers.{layer}.self_attn.q_proj.weight",
        "layers.{layer}.self_attn.k_proj.weight",
        "layers.{layer}.self_attn.v_proj.weight",
        "layers.{layer}.self_attn.o_proj.weight",
        "layers.{layer}.post_attention_layernorm.weight",
        "norm.weight",
    ),
    "lm_head.weight": "lm_head.weight",
}
_QK_NORM = _prefixed(
    "layers.{layer}.self_attn.q_norm.weight", "layers.{layer}.self_attn.k_norm.weight"
)
_ATTENTION_BIAS = _prefixed(
    "layers.{layer}.self_attn.q_proj.bias",
    "layers.{layer}.self_attn.k_proj.bias",
    "layers.{layer}.self_attn.v_proj.bias",
)
_FEED_FORWARD = _prefixed(
    "layers.{layer}.mlp.gate_proj.weight",
    "layers.{layer}.mlp.up_proj.weight",
    "layers.{layer}.mlp.down_proj.weight",
)
_SHARED_EXPERTS = _prefixed(
    "layers.{layer}.mlp.shared_experts.gate_proj.weight",
    "layers.{layer}.mlp.shared_experts.up_proj.weight",
    "layers.{layer}.mlp.shared_experts.down_proj.weight",
)
# Our experts are stacked, with gate and up fused. HF's files hold a tensor per projection.
_EXPERTS: Names = {
    "layers.{layer}.mlp.gate.weight": "model.layers.{layer}.mlp.gate.weight",
    "layers.{layer}.mlp.experts.gate_up_proj": (
        "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
        "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
    ),
    "layers.{layer}.mlp.experts.down_proj": (
        "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"
    ),
}
_EXPERT_BIAS: Names = {
    "layers.{layer}.mlp.gate.expert_bias": "model.layers.{layer}.mlp.gate.e_score_correction_bias"
}

LLAMA = {**_DECODER, **_FEED_FORWARD}
QWEN3 = {**_DECODER, **_QK_NORM, **_FEED_FORWARD}
QWEN3_MOE = {**_DECODER, **_QK_NORM, **_EXPERTS}
GLM4_MOE = {
    **{**_DECODER, **_QK_NORM, **_ATTENTION_BIAS, **_FEED_FORWARD},
    **{**_EXPERTS, **_SHARED_EXPERTS, **_EXPERT_BIAS},
}


def llama_config(config: Model) -> dict[str, Any]:
    scaling = config.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_decoder_config(config),
        "mlp_bias": False,
        "rope_scaling": scaling
        and {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        },
    }


def qwen3_config(config: Model) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **_decoder_config(config),
        "use_sliding_window": False,
    }


def qwen3_moe_config(config: Model) -> dict[str, Any]:
    moe = config.moe
    assert moe is not None  # the schema requires it for this family
    return {
        **qwen3_config(config),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        "moe_intermediate_size": moe.expert_intermediate_size,
        "norm_topk_prob": moe.normalize_top_k,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
    }


def glm4_moe_config(config: Model) -> dict[str, Any]:
    moe = config.moe
    assert moe is not None  # the schema requires it for this family
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **_decoder_config(config),
        "partial_rotary_factor": config.rotary_fraction,
        "use_qk_norm": config.qk_norm,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        "moe_intermediate_size": moe.expert_intermediate_size,
        "n_shared_experts": moe.num_shared_experts,
        "first_k_dense_replace": moe.num_dense_layers,
        "norm_topk_prob": moe.normalize_top_k,
        "routed_scaling_factor": moe.routed_scale,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
    }


def hugging_face_config(config: Model) -> dict[str, Any]:
    assert config.hf_config is not None  # the schema requires it for this family
    dtypes = ("dtype", "torch_dtype")
    return {name: value for name, value in config.hf_config.items() if name not in dtypes}


def _decoder_config(config: Model) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": True,
    }
