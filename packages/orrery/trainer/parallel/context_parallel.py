"""Context parallel: the cp ranks of a group share each micro-batch's tokens.

`trainer.mesh.cp_style` selects the attention and the tokens of rank r:

    ulysses   one contiguous part. All-to-alls give each rank all tokens for 1/cp of the heads
    ring      pieces r and 2·cp − 1 − r of a document's 2·cp pieces. Ranks pass keys in a ring
    dsa       as ring, but each rank gathers all latent keys (latent attention only)

Ranks get equally many tokens. Padding repeats a real token, is not scored, and is hidden from
real tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from orrery.kernels.attention import (
    Documents,
    attention_backward,
    attention_forward,
    varlen_attention,
)
from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Mesh, Trainer
from orrery.models.latent_attention import LatentAttention
from orrery.models.layers import Attention
from orrery.trainer.loss import Targets
from orrery.trainer.parallel.gathered_keys import GatheredKeys
from orrery.trainer.parallel.world import World, all_to_all, exchange
from orrery.trainer.policy import MicroBatch, Policy, unweighted_token

_KEYS, _GRADIENTS = 0, 1  # message tags


def apply(policy: Policy, world: World, trainer: Trainer) -> None:
    if trainer.mesh.cp == 1:
        return
    num_spread, group = 0, world.group("cp")
    is_kept = "attention" in trainer.kept and not trainer.memory.activation_offload
    for module in policy.network.modules():
        if isinstance(module, Attention):
            module.core = CORES[trainer.mesh.cp_style](group)
        elif isinstance(module, LatentAttention):
            module.keys = GatheredKeys(group, is_kept)
        else:
            continue
        num_spread += 1
    if not num_spread:
        family = policy.network.config.family
        raise OrreryError(
            f"trainer.mesh.cp {trainer.mesh.cp}: family {family!r} lacks context parallel; "
            "set trainer.mesh.cp to 1"
        )


def watch(policy: Policy, observe: Callable[[Tensor], object]) -> None:
    """Call `observe` with each attention output (or gathered keys) in forward passes.

    Gradient hooks on this tensor run before ranks exchange gradients.
    """
    for module in policy.modules():
        if isinstance(module, UlyssesCore | RingCore | GatheredKeys):
            module.watch = observe


def shard(batch: MicroBatch, world: World, mesh: Mesh) -> MicroBatch:
    if mesh.cp == 1:
        return batch
    lengths, rank = batch.cu_seqlens.diff().tolist(), world.axis_rank("cp")
    tokens = SHARDS[mesh.cp_style](lengths, mesh.cp, rank)
    return select_shard(batch, tokens, is_first=rank == 0)


class TokenShard(NamedTuple):
    source: np.ndarray  # i64 [t]: each token's index in the micro-batch
    is_real: np.ndarray  # bool [t]: False for padding
    cu_seqlens: np.ndarray  # i32: document offsets for attention


def contiguous(lengths: list[int], num_ranks: int, rank: int) -> TokenShard:
    """Return part `rank` of `num_ranks` equal parts of the padded micro-batch.

    `cu_seqlens` covers all parts. Padding forms the last document.
    """
    num_tokens = sum(lengths)
    size = -(-num_tokens // num_ranks)
    place = np.arange(rank * size, (rank + 1) * size)
    offsets = np.append(0, np.cumsum(lengths))
    if num_tokens < size * num_ranks:
        offsets = np.append(offsets, size * num_ranks)
    return TokenShard(
        np.minimum(place, num_tokens - 1), place < num_tokens, offsets.astype(np.int32)
    )


def zigzag(lengths: list[int], num_ranks: int, rank: int) -> TokenShard:
    """Return pieces `rank` and 2·num_ranks − 1 − `rank` of each document's 2·num_ranks pieces.

    `cu_seqlens` covers one rank's tokens, and is equal on all ranks.
    """
    length = np.asarray(lengths, dtype=np.int64)
    piece = -(-length // (2 * num_ranks))
    offsets = np.append(0, np.cumsum(2 * piece))
    document = np.repeat(np.arange(len(length)), 2 * piece)
    place = np.arange(offsets[-1]) - offsets[document]
    half = piece[document]
    early, late = rank * half + place, (2 * num_ranks - 1 - rank) * half + place - half
    position = np.where(place < half, early, late)
    start = (np.cumsum(length) - length)[document]
    last = length[document] - 1
    return TokenShard(
        start + np.minimum(position, last), position <= last, offsets.astype(np.int32)
    )


def zigzag_of_whole(lengths: list[int], num_ranks: int, rank: int) -> TokenShard:
    shard = zigzag(lengths, num_ranks, rank)
    return shard._replace(cu_seqlens=shard.cu_seqlens * num_ranks)


def select_shard(batch: MicroBatch, tokens: TokenShard, is_first: bool) -> MicroBatch:
    """Return the `tokens` of `batch`. Only the first rank keeps counts, because ranks sum them."""
    source = torch.from_numpy(tokens.source)
    place = np.full(len(batch.token_id), -1, dtype=np.int64)
    place[tokens.source[tokens.is_real]] = np.flatnonzero(tokens.is_real)
    row = place[batch.row.numpy()]
    scored = torch.from_numpy(np.flatnonzero(row >= 0))
    part = replace(
        batch,
        token_id=batch.token_id[source],
        position=batch.position[source],
        cu_seqlens=torch.from_numpy(tokens.cu_seqlens),
        max_seqlen=int(np.diff(tokens.cu_seqlens).max()),
        row=torch.from_numpy(row)[scored],
        target=batch.target[scored],
        temperature=batch.temperature[scored],
        routed_experts=_routes(batch.routed_experts, source, torch.from_numpy(tokens.is_real)),
        loss=Targets(*(getattr(batch.loss, field.name)[scored] for field in fields(Targets))),
        origin=batch.origin[scored],
        num_samples=batch.num_samples if is_first else 0,
        num_tokens=batch.num_tokens if is_first else 0,
        routes_missing=batch.routes_missing if is_first else 0,
        routes_replayed=batch.routes_replayed if is_first else 0,
        engine_keys=_routes(batch.engine_keys, source, torch.from_numpy(tokens.is_real)),
        is_padding=torch.from_numpy(~tokens.is_real | (batch.num_samples == 0)),
        choices_sent=batch.choices_sent if is_first else 0,
    )
    if len(scored):
        return part
    token = unweighted_token()
    names = ("row", "target", "temperature", "loss", "origin")
    return replace(part, **{name: getattr(token, name) for name in names})


def _routes(
    routes: torch.Tensor | None, source: torch.Tensor, is_real: torch.Tensor
) -> torch.Tensor | None:
    if routes is None:
        return None
    here = routes[source]
    here[~is_real] = 255 if routes.dtype == torch.uint8 else -1
    return here


class UlyssesCore(nn.Module):
    """Ulysses (Jacobs et al. 2023, arXiv 2309.14509).

    t: tokens of this rank, T = cp·t: tokens of the group and of `documents`, H: query heads,
    G: key and value heads, K: head size
    """

    eager = ("forward",)  # `blocks.py` does not compile it

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.watch: Callable[[Tensor], object] = lambda out: None

    def forward(self, q_tHK: Tensor, k_tGK: Tensor, v_tGK: Tensor, documents: Documents) -> Tensor:
        if (repeats := self.group.size() // k_tGK.shape[1]) > 1:
            k_tGK, v_tGK = (x.repeat_interleave(repeats, dim=1) for x in (k_tGK, v_tGK))
        to_heads, to_tokens = (partial(one, group=self.group) for one in (_to_heads, _to_tokens))
        q_ThK, k_TgK, v_TgK = exchange(to_heads, to_tokens, q_tHK, k_tGK, v_tGK)
        out_ThK = varlen_attention(q_ThK, k_TgK, v_TgK, documents)
        (out_tHK,) = exchange(to_tokens, to_heads, out_ThK)
        self.watch(out_tHK)
        return out_tHK


def _to_heads(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    leaving = [x.unflatten(1, (group.size(), -1)).transpose(0, 1) for x in tensors]
    return tuple(x.flatten(0, 1) for x in all_to_all(leaving, group))


def _to_tokens(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    leaving = [x.contiguous().unflatten(0, (group.size(), -1)) for x in tensors]
    return tuple(x.transpose(0, 1).flatten(1, 2) for x in all_to_all(leaving, group))


class Halves(NamedTuple):
    early: Tensor  # i64 [T / 2], tokens of early pieces
    late: Tensor  # i64 [T / 2], tokens of late pieces
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
    """Ring attention (Liu et al. 2023, arXiv 2310.01889).

    Rank r has an early and a late piece of each document (`zigzag`). A step with rank j's keys is
    one of three equal-cost cases:

        j = r   all queries, all keys, causal in this rank's token order
        j < r   all queries, early keys
        j > r   late queries, all keys

    T: tokens of this rank. H, G and K are as in `UlyssesCore`.
    """

    eager = ("forward",)

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
    """Token indices of a step's queries and keys. None means all tokens."""

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
    """Add `part` to distinct rows of `whole`, without the atomics of `index_add_`."""
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


CORES: dict[str, Callable[[dist.ProcessGroup], nn.Module]] = {
    "ulysses": UlyssesCore,
    "ring": RingCore,
}
SHARDS: dict[str, Callable[[list[int], int, int], TokenShard]] = {
    "ulysses": contiguous,
    "ring": zigzag,
    "dsa": zigzag_of_whole,
}
