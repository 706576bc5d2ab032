"""What a form of attention is asked for, beside its tensors: which queries meet which keys, and how scores are scaled."""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """Document i's queries are `cu_seqlens_q[i]:cu_seqlens_q[i + 1]`, its keys and values `cu_seqlens_k[i]:cu_seqlens_k[i + 1]`.

    `causal` lines up the ends: query a of a document with l queries and m keys sees its keys up to a + m − l.
    `max_q` and `max_k` are not below the longest document's counts.
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
    def shared(self) -> bool:
        """Queries and keys are of the same tokens, as far as can be told without reading device memory."""
        q, k = self.cu_seqlens_q, self.cu_seqlens_k
        return q.data_ptr() == k.data_ptr() and q.shape == k.shape

    def dense(self, num_q: int, num_k: int) -> bool:
        """All documents are of one length, so that packed tensors are a batch. Told from counts alone: n documents of at most m
        tokens that have n·m tokens together have m each."""
        n = self.num_documents
        return (
            n > 0
            and (n == 1 or (n * self.max_q == num_q and n * self.max_k == num_k))
            and num_q > 0
            and num_k > 0
        )

    def spans(self) -> list[tuple[int, int, int, int]]:
        """(first query, past its last, first key, past its last) of every document; reads device memory."""
        pairs_q, pairs_k = (
            itertools.pairwise(x.tolist()) for x in (self.cu_seqlens_q, self.cu_seqlens_k)
        )
        return [(*q, *k) for q, k in zip(pairs_q, pairs_k, strict=True)]


def lse_dtype(q: Tensor) -> torch.dtype:
    """Of the log-sum-exps that go with queries of this dtype: float32, and float64 for float64."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32
