"""Qwen3-MoE at Hugging Face: its parameter names, and the `config.json` that transformers and vLLM read."""

from typing import Any

from orrery.manifest.schema import Model
from orrery.models.names import DECODER_NAMES, EXPERT_NAMES, QK_NORM_NAMES
from orrery.models.qwen3.weights import hf_config as dense_hf_config

NAMES = {**DECODER_NAMES, **QK_NORM_NAMES, **EXPERT_NAMES}


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
