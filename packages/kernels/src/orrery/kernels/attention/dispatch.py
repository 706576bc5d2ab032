"""Attention over packed documents as callers ask for it: checked here, done by the operator."""

import torch
from torch import Tensor

from orrery.kernels.attention import operator  # noqa: F401  (registers torch.ops.orrery.varlen_attention_*)
from orrery.kernels.attention.documents import Documents


def varlen_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    cu_seqlens: Tensor | Documents,
    max_seqlen: int | None = None,
) -> Tensor:
    """Causal attention inside each packed document, scaled by head_dim^-1/2: [T, H, D] in q's dtype. Differentiable.

    q [T, H, D]; k, v [T, G, D] with H a multiple of G (query head h reads group h // (H / G)); cu_seqlens i32 [n + 1] from 0 to T,
    or the `Documents` made of it, which layers share.
    """
    documents = (
        cu_seqlens if isinstance(cu_seqlens, Documents) else Documents(cu_seqlens, max_seqlen)
    )
    offsets, longest = documents.cu_seqlens, documents.max_seqlen
    return varlen_attention_with_lse(q_THD, k_TGD, v_TGD, offsets, offsets, longest, longest, True)[
        0
    ]


def varlen_attention_with_lse(
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """out [T, H, D], differentiable, and the log-sum-exp of each query's scores, float32 [T, H], which is not.

    Queries and keys have offsets of their own, of as many documents. `causal` lines up ends: query a of l sees keys up to a + m − l
    of m. A query that sees no key gets zeros and −∞.
    """
    if q_THD.shape[1] % k_SGD.shape[1]:
        raise ValueError(
            f"{q_THD.shape[1]} query heads are not a multiple of {k_SGD.shape[1]} key heads"
        )
    out_THD, lse_HT = torch.ops.orrery.varlen_attention_forward(
        q_THD,
        k_SGD,
        v_SGD,
        cu_seqlens_q,
        cu_seqlens_k,
        max_q,
        max_k,
        causal,
        q_THD.shape[-1] ** -0.5,
    )
    return out_THD, lse_HT.t()


def attention_forward(
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """`varlen_attention_with_lse` without a graph, for an autograd function that calls `attention_backward` itself."""
    with torch.no_grad():
        return varlen_attention_with_lse(
            q_THD, k_SGD, v_SGD, cu_seqlens_q, cu_seqlens_k, max_q, max_k, causal
        )


def attention_backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in q's, k's, v's dtypes.

    `out` and `lse` [T, H] may be those of attention over more keys than these, of which these are a part, as in ring attention: the sum of
    dq over the parts, and each part's dk and dv, are then the gradients of the whole. Gradients of a part come rounded to the
    inputs' dtype: add them up in float32.
    """
    with torch.no_grad():
        return torch.ops.orrery.varlen_attention_backward(
            dout_THD,
            q_THD,
            k_SGD,
            v_SGD,
            out_THD,
            lse_TH.t().contiguous(),
            cu_seqlens_q,
            cu_seqlens_k,
            max_q,
            max_k,
            causal,
            q_THD.shape[-1] ** -0.5,
        )
