"""Packed documents, and the interface of attention backends."""

import itertools
import logging
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

log = logging.getLogger("orrery.kernels.attention")


class Documents:
    """Packed documents. Document i is tokens `cu_seqlens[i]:cu_seqlens[i + 1]`.

    `cu_seqlens` is i32 [n + 1]. `is_padding` bool [T] marks padding tokens. No document is longer
    than `max_seqlen`. Compiled code must pass it, because computing it syncs the device.
    """

    def __init__(
        self,
        cu_seqlens: Tensor,
        max_seqlen: int | None = None,
        is_padding: Tensor | None = None,
    ) -> None:
        self.cu_seqlens, self.is_padding = cu_seqlens, is_padding
        if max_seqlen is None:
            max_seqlen = int(cu_seqlens.diff().max()) if cu_seqlens.numel() > 1 else 0
        self.max_seqlen = max_seqlen


class Layout(NamedTuple):
    """Packed queries and keys. Document i has queries `cu_seqlens_q[i]:cu_seqlens_q[i + 1]`.

    Its keys are `cu_seqlens_k[i]:cu_seqlens_k[i + 1]`. No document has more than `max_q` queries or
    `max_k` keys. If `causal`, query a attends to keys 0 to a + m − l (l queries, m keys).
    `scale` multiplies all scores.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_q: int
    max_k: int
    causal: bool
    scale: float

    @property
    def num_documents(self) -> int:
        return len(self.cu_seqlens_q) - 1

    @property
    def is_self_attention(self) -> bool:
        """Return whether queries and keys share one offset tensor, without a device sync."""
        q, k = self.cu_seqlens_q, self.cu_seqlens_k
        return q.data_ptr() == k.data_ptr() and q.shape == k.shape

    def is_dense(self, num_q: int, num_k: int) -> bool:
        """Return whether all documents have maximum length, without a device sync."""
        n = self.num_documents
        full = n == 1 or (n * self.max_q == num_q and n * self.max_k == num_k)
        return n > 0 and full and num_q > 0 and num_k > 0

    def spans(self) -> list[tuple[int, int, int, int]]:
        """Return (query start, query end, key start, key end) per document. Syncs the device."""
        pairs_q = itertools.pairwise(self.cu_seqlens_q.tolist())
        pairs_k = itertools.pairwise(self.cu_seqlens_k.tolist())
        return [(*q, *k) for q, k in zip(pairs_q, pairs_k, strict=True)]


Output = tuple[Tensor, Tensor]  # out [T, H, D], and log-sum-exp of scores (base e) [H, T]
Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q [T, H, D], k, v [S, G, D], out, lse
Gradients = tuple[Tensor, Tensor, Tensor]  # dq, dk, dv


class AttentionBackend(Protocol):
    """An attention kernel for contiguous tensors.

    `saved` may hold the output of another backend's `forward`.
    """

    def supports(self, q: Tensor, k: Tensor, layout: Layout) -> bool: ...

    def forward(self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, layout: Layout) -> Output: ...

    def backward(self, dout_THD: Tensor, saved: Saved, layout: Layout) -> Gradients: ...


def lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def has_signatures(signatures: dict[str, str]) -> bool:
    """Return whether torch's private operators have the expected first parameters."""
    return all(_matches(name, tuple(words.split())) for name, words in signatures.items())


@cache
def _matches(name: str, expected: tuple[str, ...]) -> bool:
    operator, version = getattr(torch.ops.aten, name, None), torch.__version__
    if operator is None:
        log.warning("aten::%s is not in torch %s: attention uses another backend", name, version)
        return False
    found = tuple(argument.name for argument in operator.default._schema.arguments)
    if found[: len(expected)] != expected:
        log.warning(
            "aten::%s of torch %s takes (%s) and not (%s): attention uses another backend",
            *(name, version, ", ".join(found), ", ".join(expected)),
        )
        return False
    return True
