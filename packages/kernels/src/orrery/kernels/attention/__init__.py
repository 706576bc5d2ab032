"""Causal attention over packed documents: tokens of one tensor, documents told apart by cumulative lengths, grouped query heads.

- `reference.py` goes document by document: the referee.
- `dispatch.py` is what callers see; `operator.py` the operators that compilers see; `forms.py` chooses what runs:
- `cudnn_dense.py`, `cudnn_packed.py`: cuDNN, for documents of one length and of any lengths, in half precision on Hopper and later.
- `flash.py`: torch's FlashAttention 2, for the rest of half precision on a GPU.
- `padded.py`: documents of like lengths as padded batches, on a CPU.
- `batched.py`: documents of like lengths as padded batches in float32, on a GPU.
- `plain.py`: matrix products in float32, everywhere and for everything.
- `documents.py` is what they need to know of the packing; a model builds it once and hands it to every layer.
"""

from orrery.kernels.attention.dispatch import (
    attention_backward,
    attention_forward,
    varlen_attention,
    varlen_attention_with_lse,
)
from orrery.kernels.attention.documents import Documents
from orrery.kernels.attention.reference import varlen_attention as reference_varlen_attention

__all__ = [
    "Documents",
    "attention_backward",
    "attention_forward",
    "reference_varlen_attention",
    "varlen_attention",
    "varlen_attention_with_lse",
]
