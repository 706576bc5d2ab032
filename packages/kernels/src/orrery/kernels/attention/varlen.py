"""Torch's variable-length FlashAttention on the packed tensors (`torch.nn.attention.varlen`), where this torch has it."""

import inspect

import torch
from torch import Tensor

from orrery.kernels.attention.documents import Documents

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

# The causal mask was a flag before it became a window that looks back without end and never ahead.
_PARAMETERS = frozenset(inspect.signature(varlen_attn).parameters) if varlen_attn is not None else frozenset()
_CAUSAL = {"window_size": (-1, 0)} if "window_size" in _PARAMETERS else {"is_causal": True}


def supports(q: Tensor) -> bool:
    return varlen_attn is not None and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[0] > 0


def flash_attention(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, documents: Documents) -> Tensor:
    options = dict(_CAUSAL)
    if q_THD.shape[1] != k_TGD.shape[1]:
        if "enable_gqa" in _PARAMETERS:
            options["enable_gqa"] = True
        else:
            heads_per_group = q_THD.shape[1] // k_TGD.shape[1]
            k_TGD, v_TGD = (x.repeat_interleave(heads_per_group, dim=1) for x in (k_TGD, v_TGD))
    ends, longest = documents.cu_seqlens, documents.max_seqlen
    return varlen_attn(q_THD, k_TGD, v_TGD, ends, ends, longest, longest, **options)
