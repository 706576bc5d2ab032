"""Causal attention over packed documents with grouped query heads.

- `reference.py`: document by document, plain autograd.
- `dispatch.py`: the public functions and their custom operators.
- `backends.py`: the order in which backends are tried. One file a backend:
  `flash4`, `cudnn_dense`, `cudnn_packed`, `flash`, `padded`, `batched`, `plain`.
- `layout.py`: how packed tensors divide into documents.
"""

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
