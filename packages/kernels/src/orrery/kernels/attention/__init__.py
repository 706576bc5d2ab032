"""Causal attention over packed documents: tokens of one tensor, documents told apart by cumulative lengths, grouped query heads.

- `reference.py` goes document by document: the referee.
- `padded.py` gathers documents of like lengths into one padded batch: many short documents on a CPU, and float32 on a GPU.
- `varlen.py` hands the packed tensors to torch's FlashAttention: half precision on a GPU.
- `documents.py` is what they need to know of the packing; a model builds it once and hands it to every layer.
"""

from orrery.kernels.attention.dispatch import varlen_attention
from orrery.kernels.attention.documents import Documents
from orrery.kernels.attention.reference import varlen_attention as reference_varlen_attention

__all__ = ["Documents", "reference_varlen_attention", "varlen_attention"]
