"""Which form of attention runs where."""

from torch import Tensor

from orrery.kernels.attention import varlen
from orrery.kernels.attention.documents import Documents
from orrery.kernels.attention.padded import padded_attention


def varlen_attention(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, cu_seqlens: Tensor | Documents, max_seqlen: int | None = None) -> Tensor:
    """Causal attention inside each packed document, scaled by head_dim^-1/2: [T, H, D] in q's dtype.

    q [T, H, D]; k, v [T, G, D] with H a multiple of G (query head h reads group h // (H / G)); cu_seqlens i32 [n + 1] from 0 to T,
    or the `Documents` made of it, which layers share.
    """
    documents = cu_seqlens if isinstance(cu_seqlens, Documents) else Documents(cu_seqlens, max_seqlen)
    if q_THD.shape[1] % k_TGD.shape[1]:
        raise ValueError(f"{q_THD.shape[1]} query heads are not a multiple of {k_TGD.shape[1]} key heads")
    if varlen.supports(q_THD):
        return varlen.flash_attention(q_THD, k_TGD, v_TGD, documents)
    return padded_attention(q_THD, k_TGD, v_TGD, documents)
