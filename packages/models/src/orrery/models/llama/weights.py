"""Llama at Hugging Face: its parameter names, and the `config.json` that transformers and vLLM read.

`IGNORED` are patterns of tensors that a checkpoint may have beside them: old ones store rotary frequencies, which are computed here.
"""

from typing import Any

from orrery.manifest.schema import Model
from orrery.models.names import DECODER_NAMES, FEED_FORWARD_NAMES, decoder_config

NAMES = {**DECODER_NAMES, **FEED_FORWARD_NAMES}
IGNORED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


def hf_config(config: Model) -> dict[str, Any]:
    """The content of `config.json`, without the dtype, which is the weights' own."""
    scaling = config.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **decoder_config(config),
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
