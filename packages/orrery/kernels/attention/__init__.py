"""Causal attention over packed documents with grouped query heads."""

from orrery.kernels.attention.dispatch import (
    attention_backward,
    attention_forward,
    varlen_attention,
    varlen_attention_with_lse,
)
from orrery.kernels.attention.layout import Documents
from orrery.kernels.attention.reference import varlen_attention as reference_varlen_attention

__all__ = [
    "Documents",
    "attention_backward",
    "attention_forward",
    "reference_varlen_attention",
    "varlen_attention",
    "varlen_attention_with_lse",
]
