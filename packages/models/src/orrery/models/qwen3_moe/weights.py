"""Qwen3-MoE at Hugging Face: its parameter names, and the `config.json` that transformers and vLLM read.

Our experts are stacked, gate and up in one; HF's files hold one tensor an expert and projection, as vLLM loads and transformers reads them.
"""

from typing import Any

from orrery.manifest.schema import Model
from orrery.models.qwen3.weights import ATTENTION_NAMES, Names
from orrery.models.qwen3.weights import hf_config as dense_hf_config

NAMES: Names = {
    **ATTENTION_NAMES,
    "layers.{layer}.mlp.gate.weight": "model.layers.{layer}.mlp.gate.weight",
    "layers.{layer}.mlp.experts.gate_up_proj": (
        "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
        "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
    ),
    "layers.{layer}.mlp.experts.down_proj": "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
}


def hf_config(config: Model) -> dict[str, Any]:
    """The content of `config.json`, without the dtype, which is the weights' own."""
    moe = config.moe
    assert moe is not None  # the schema's law for this family
    return {
        **dense_hf_config(config),
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
