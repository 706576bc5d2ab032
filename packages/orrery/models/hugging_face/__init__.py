"""Any causal language model of transformers."""

from orrery.models.hugging_face.model import HuggingFaceLm

__all__ = ["HuggingFaceLm"]
