"""Ring attention (Liu et al. 2023, arXiv 2310.01889) in zig-zag order.

T: tokens of this rank, H: query heads, G: key and value heads, K: head size

Rank r has pieces r (early) and 2·cp − 1 − r (late) of each document's 2·cp (`zigzag`). Ranks
pass keys and values in a ring. A step with rank j's keys is one of three equal-cost cases:

    j = r   all queries, all keys, causal in this rank's token order
    j < r   all queries, early keys
    j > r   late queries, all keys
"""

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from orrery.kernels.attention import Documents, attention_backward, attention_forward

_KEYS, _GRADIENTS = 0, 1  # message tags


class Halves(NamedTuple):
    early: Tensor  # i64 [T / 2], token indices
    late: Tensor  # i64 [T / 2]
    cu_whole: Tensor  # i32 [documents + 1], offsets of whole documents
    cu_half: Tensor  # i32 [documents + 1], offsets in `early` and `late`
    max_whole: int
    max_half: int

    @classmethod
    def of(cls, documents: Documents, num_places: int) -> "Halves":
        cu_half = documents.cu_seqlens // 2
        sizes, half = cu_half.diff(), num_places // 2
        before = cu_half[:-1].long().repeat_interleave(sizes, output_size=half)
        early = torch.arange(half, device=cu_half.device) + before
        late = early + sizes.long().repeat_interleave(sizes, output_size=half)
        longest = documents.max_seqlen
        return cls(early, late, documents.cu_seqlens, cu_half, longest, longest // 2)


class RingCore(nn.Module):
    eager = ("forward",)  # not compiled (`blocks.py`)

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.watch: Callable[[Tensor], object] = lambda out: None

    def forward(self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, documents: Documents) -> Tensor:
        if (halves := _halves.get(documents)) is None:
            halves = _halves[documents] = Halves.of(documents, q_THK.shape[0])
        out_THK = _Ring.apply(q_THK, k_TGK, v_TGK, halves, self.group)
        self.watch(out_THK)
        return out_THK


_halves: WeakKeyDictionary[Documents, Halves] = WeakKeyDictionary()


class RingStep(NamedTuple):
    """Queries and keys of one step, as token indices. None means all tokens."""

    queries: Tensor | None
    keys: Tensor | None
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    causal: bool

    @classmethod
    def of(cls, halves: Halves, rank: int, source: int) -> "RingStep":
        _, _, whole, half, max_whole, max_half = halves
        if source == rank:
            return cls(None, None, whole, whole, max_whole, max_whole, True)
        if source < rank:
            return cls(None, halves.early, whole, half, max_whole, max_half, False)
        return cls(halves.late, None, half, whole, max_half, max_whole, False)

    @property
    def offsets(self) -> tuple[Tensor, Tensor, int, int, bool]:
        return self.cu_q, self.cu_k, self.max_q, self.max_k, self.causal


def _pick(x: Tensor, places: Tensor | None) -> Tensor:
    return x if places is None else x.index_select(0, places)


def _put(whole: Tensor, places: Tensor | None, part: Tensor) -> None:
    if places is None:
        whole.copy_(part)
    else:
        whole.index_copy_(0, places, part)


def _add(whole: Tensor, places: Tensor | None, part: Tensor) -> None:
    """Add `part` to the distinct rows `places` of `whole`, without the atomics of `index_add_`."""
    if places is None:
        whole.add_(part)
    else:
        whole.index_copy_(0, places, whole.index_select(0, places).add_(part))


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGK: Tensor,
        halves: Halves,
        group: dist.ProcessGroup,
    ) -> Tensor:
        rank, size = group.rank(), group.size()
        kv = torch.stack((k_TGK, v_TGK))
        for step in range(size):
            following = _pass_on(kv, group, _KEYS) if step + 1 < size else None
            pair = RingStep.of(halves, rank, (rank - step) % size)
            k, v = (_pick(x, pair.keys) for x in kv)
            part, part_lse = attention_forward(_pick(q_THK, pair.queries), k, v, *pair.offsets)
            if step == 0:
                # Copy, because later steps change the sums, and checkpointing may keep `part`.
                total_THK, lse_TH = part.to(part_lse.dtype, copy=True), part_lse.clone()
            else:
                before, before_lse = _pick(total_THK, pair.queries), _pick(lse_TH, pair.queries)
                joined_lse = torch.logaddexp(before_lse, part_lse)
                joined = (
                    before * (before_lse - joined_lse).exp()[..., None]
                    + part * (part_lse - joined_lse).exp()[..., None]
                )
                _put(total_THK, pair.queries, joined)
                _put(lse_TH, pair.queries, joined_lse)
            if following is not None:
                kv = following.wait()
        out_THK = total_THK.to(q_THK.dtype)
        ctx.save_for_backward(q_THK, k_TGK, v_TGK, out_THK, lse_TH)
        ctx.halves, ctx.group = halves, group
        return out_THK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_THK: Tensor) -> tuple[Tensor | None, ...]:
        q_THK, k_TGK, v_TGK, out_THK, lse_TH = ctx.saved_tensors
        halves, group = ctx.halves, ctx.group
        rank, size = group.rank(), group.size()
        dout_THK = dout_THK.contiguous()
        kv = torch.stack((k_TGK, v_TGK))
        dq_THK = torch.zeros_like(q_THK, dtype=lse_TH.dtype)
        dkv = torch.zeros_like(kv, dtype=lse_TH.dtype)
        passing = None
        for step in range(size):
            following = _pass_on(kv, group, _KEYS) if step + 1 < size else None
            pair = RingStep.of(halves, rank, (rank - step) % size)
            dout, q, out, lse = (_pick(x, pair.queries) for x in (dout_THK, q_THK, out_THK, lse_TH))
            k, v = (_pick(x, pair.keys) for x in kv)
            dq, dk, dv = attention_backward(dout, q, k, v, out, lse, *pair.offsets)
            _add(dq_THK, pair.queries, dq)
            if passing is not None:
                dkv = passing.wait()
            _add(dkv[0], pair.keys, dk)
            _add(dkv[1], pair.keys, dv)
            passing = _pass_on(dkv, group, _GRADIENTS)
            if following is not None:
                kv = following.wait()
        assert passing is not None
        dk_TGK, dv_TGK = passing.wait()
        return dq_THK.to(q_THK.dtype), dk_TGK.to(k_TGK.dtype), dv_TGK.to(v_TGK.dtype), None, None


class _Passing(NamedTuple):
    works: list[Any]
    arriving: Tensor
    leaving: Tensor

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.arriving


def _pass_on(x: Tensor, group: dist.ProcessGroup, tag: int) -> _Passing:
    ranks = dist.get_process_group_ranks(group)
    rank, size = group.rank(), group.size()
    arriving = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, ranks[(rank + 1) % size], group, tag)
    receive = dist.P2POp(dist.irecv, arriving, ranks[(rank - 1) % size], group, tag)
    return _Passing(dist.batch_isend_irecv([send, receive]), arriving, x)
