"""Compute causal grouped-query attention over packed documents."""

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
