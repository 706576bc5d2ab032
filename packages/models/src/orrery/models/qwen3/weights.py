"""Qwen3 at Hugging Face: its parameter names, and the `config.json` that transformers and vLLM read."""

from typing import Any

from orrery.manifest.schema import Model
from orrery.models.names import DECODER_NAMES, FEED_FORWARD_NAMES, QK_NORM_NAMES, decoder_config

NAMES = {**DECODER_NAMES, **QK_NORM_NAMES, **FEED_FORWARD_NAMES}


def hf_config(config: Model) -> dict[str, Any]:
    """The content of `config.json`, without the dtype, which is the weights' own."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **decoder_config(config),
        "use_sliding_window": False,
    }
