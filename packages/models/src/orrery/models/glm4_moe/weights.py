"""GLM-4.5 at Hugging Face: its parameter names, and the `config.json` that transformers and vLLM read.

`IGNORED` are patterns of tensors that a checkpoint may have beside them: the layers behind the last one predict several tokens ahead
(MTP), and serve an engine's speculation only.
"""

from typing import Any

from orrery.manifest.schema import Model
from orrery.models.names import (
    ATTENTION_BIAS_NAMES,
    DECODER_NAMES,
    EXPERT_NAMES,
    FEED_FORWARD_NAMES,
    QK_NORM_NAMES,
    decoder_config,
    same,
)

NAMES = {
    **DECODER_NAMES,
    **QK_NORM_NAMES,
    **ATTENTION_BIAS_NAMES,
    **FEED_FORWARD_NAMES,
    **EXPERT_NAMES,
    **same(
        "layers.{layer}.mlp.shared_experts.gate_proj.weight",
        "layers.{layer}.mlp.shared_experts.up_proj.weight",
        "layers.{layer}.mlp.shared_experts.down_proj.weight",
    ),
    "layers.{layer}.mlp.gate.expert_bias": "model.layers.{layer}.mlp.gate.e_score_correction_bias",
}
IGNORED = (r"model\.layers\.{num_layers}\..*",)


def hf_config(config: Model) -> dict[str, Any]:
    """The content of `config.json`, without the dtype, which is the weights' own."""
    moe = config.moe
    assert moe is not None  # the schema's law for this family
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **decoder_config(config),
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
