"""Compute causal attention over packed documents with grouped query heads."""

from orrery.kernels.attention.dispatch import (
    attention_backward,
    attention_forward,
    prefer,
    reference_varlen_attention,
    varlen_attention,
)
from orrery.kernels.attention.layout import Documents

__all__ = [
    "Documents",
    "attention_backward",
    "attention_forward",
    "prefer",
    "reference_varlen_attention",
    "varlen_attention",
]
