"""What the families' checkpoints have in common: parameter names, and fields of `config.json`.

A family's `NAMES` maps our parameters to HF's: `{layer}` runs over layers; where `{expert}` stands on the right, dimension 0 of our
tensor is taken apart; several names on the right share the next dimension evenly, in that order.
"""

from typing import Any

from orrery.manifest.schema import Model

Names = dict[str, str | tuple[str, ...]]


def same(*names: str) -> Names:
    """Names that differ from HF's by the prefix `model.` only."""
    return {name: f"model.{name}" for name in names}


DECODER_NAMES: Names = {
    **same(
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
QK_NORM_NAMES = same(
    "layers.{layer}.self_attn.q_norm.weight", "layers.{layer}.self_attn.k_norm.weight"
)
ATTENTION_BIAS_NAMES = same(
    "layers.{layer}.self_attn.q_proj.bias",
    "layers.{layer}.self_attn.k_proj.bias",
    "layers.{layer}.self_attn.v_proj.bias",
)
FEED_FORWARD_NAMES = same(
    "layers.{layer}.mlp.gate_proj.weight",
    "layers.{layer}.mlp.up_proj.weight",
    "layers.{layer}.mlp.down_proj.weight",
)
# Our experts are stacked, gate and up in one; HF's files hold one tensor an expert and projection: vLLM and transformers read those.
EXPERT_NAMES: Names = {
    "layers.{layer}.mlp.gate.weight": "model.layers.{layer}.mlp.gate.weight",
    "layers.{layer}.mlp.experts.gate_up_proj": (
        "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
        "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
    ),
    "layers.{layer}.mlp.experts.down_proj": "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
}


def decoder_config(config: Model) -> dict[str, Any]:
    """The fields that every family's `config.json` has."""
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
