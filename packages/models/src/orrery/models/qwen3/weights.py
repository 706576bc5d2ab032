"""Qwen3 at Hugging Face: its parameter names, and the `config.json` that transformers and vLLM read.

`NAMES` maps our parameters to HF's: `{layer}` runs over layers; where `{expert}` stands on the right, dimension 0 of our tensor is
taken apart; several names on the right share the next dimension evenly, in that order.
"""

from typing import Any

from orrery.manifest.schema import Model

Names = dict[str, str | tuple[str, ...]]

ATTENTION_NAMES: Names = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "layers.{layer}.input_layernorm.weight": "model.layers.{layer}.input_layernorm.weight",
    "layers.{layer}.self_attn.q_proj.weight": "model.layers.{layer}.self_attn.q_proj.weight",
    "layers.{layer}.self_attn.k_proj.weight": "model.layers.{layer}.self_attn.k_proj.weight",
    "layers.{layer}.self_attn.v_proj.weight": "model.layers.{layer}.self_attn.v_proj.weight",
    "layers.{layer}.self_attn.o_proj.weight": "model.layers.{layer}.self_attn.o_proj.weight",
    "layers.{layer}.self_attn.q_norm.weight": "model.layers.{layer}.self_attn.q_norm.weight",
    "layers.{layer}.self_attn.k_norm.weight": "model.layers.{layer}.self_attn.k_norm.weight",
    "layers.{layer}.post_attention_layernorm.weight": "model.layers.{layer}.post_attention_layernorm.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
NAMES: Names = {
    **ATTENTION_NAMES,
    "layers.{layer}.mlp.gate_proj.weight": "model.layers.{layer}.mlp.gate_proj.weight",
    "layers.{layer}.mlp.up_proj.weight": "model.layers.{layer}.mlp.up_proj.weight",
    "layers.{layer}.mlp.down_proj.weight": "model.layers.{layer}.mlp.down_proj.weight",
}


def hf_config(config: Model) -> dict[str, Any]:
    """The content of `config.json`, without the dtype, which is the weights' own."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
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
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": True,
    }
