"""Any causal language model of transformers: `model.py`, its LM `head.py`, `config.py` checks."""

from orrery.models.hugging_face.model import HuggingFaceLm

__all__ = ["HuggingFaceLm"]
