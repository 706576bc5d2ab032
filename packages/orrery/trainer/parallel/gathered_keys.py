"""Context parallel for latent attention: each of R ranks gathers all latent keys.

- A rank's queries are an early and a late piece of each document (`context_parallel.zigzag`).
- The padded stream concatenates all padded documents.
- Each rank sums the gradients of its keys in float32, in rank order.

t: queries of this rank, S = R·t: all keys, K: keys that this rank reads
K is S if keys stay latent, and (R + ½)·t if dense attention expands keys.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from orrery.kernels.attention import Documents
from orrery.models.latent_attention import LocalKeys
from orrery.trainer.parallel import blocks
from orrery.trainer.parallel.world import receive, send


class KeyOrder(NamedTuple):
    """Rows of the all-gathered keys that this rank's queries read.

    Row r·t + i is the key of token i of rank r. If keys stay latent, both pieces of a document read
    one copy of all keys. Otherwise, each piece reads its own copy of the document's keys, up to the
    piece's end. A copy must not repeat a row, because `begin_back` would lose a gradient.
    """

    row: Tensor  # i64 [K], rows of the all-gathered keys
    parts: list[tuple[Tensor, Tensor | None]]  # rows of each copy, and indices in `row` (None: all)
    first: Tensor  # i32 [t], each query's first key in the padded stream
    last: Tensor  # i32 [t], each query's last key: the query's own token
    queries: Documents  # early and late pieces as separate sequences
    keys: Documents  # whole documents if latent, otherwise each document up to the piece's end

    @classmethod
    def of(cls, documents: Documents, t: int, size: int, rank: int, is_latent: bool) -> "KeyOrder":
        start, length = documents.cu_seqlens[:-1].long(), documents.cu_seqlens.diff().long()
        place_Rt = _places(start, length, t, size)
        row_S = torch.empty_like(place_Rt).flatten()
        row_S[place_Rt.flatten()] = torch.arange(len(row_S), device=start.device)
        first = start.repeat_interleave(length // size, output_size=t)
        piece, longest = length // (2 * size), documents.max_seqlen // (2 * size)
        queries = _side(piece, (1, 1), longest)
        if is_latent:
            parts: list[tuple[Tensor, Tensor | None]] = [(row_S, None)]
            return cls(row_S, parts, first.int(), place_Rt[rank].int(), queries, documents)
        early, late = rank + 1, 2 * size - rank
        keys = _side(piece, (early, late), longest)
        row = row_S.new_empty((early + late) * (t // 2))
        parts = []
        for turn, count in enumerate((early, late)):
            at = keys.cu_seqlens[turn:-1:2]
            rows, places = _prefixes(row_S, start, count * piece, at, count * (t // 2))
            row[places] = rows
            parts.append((rows, places))
        return cls(row, parts, first.int(), place_Rt[rank].int(), queries, keys)


def _places(start: Tensor, length: Tensor, t: int, size: int) -> Tensor:
    """Return i64 [R, t], each rank's tokens as indices in the padded stream.

    `start`, `length`: of each document, i64 [documents]. `size` is R.
    """
    here = length // size
    start_t, before_t, piece_t = (
        x.repeat_interleave(here, output_size=t) for x in (start, start // size, here // 2)
    )
    place_t = torch.arange(t, device=start.device) - before_t
    rank_R1 = torch.arange(size, device=start.device)[:, None]
    early_Rt = rank_R1 * piece_t + place_t
    late_Rt = (2 * size - 2 - rank_R1) * piece_t + place_t
    return start_t + torch.where(place_t < piece_t, early_Rt, late_Rt)


def _side(piece: Tensor, counts: tuple[int, int], longest: int) -> Documents:
    """Return two sequences per document, of `counts[0]` (early) and `counts[1]` (late) pieces."""
    lengths = torch.stack([count * piece for count in counts], dim=1).flatten()
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int()
    return Documents(offsets, max(counts) * longest)


def _prefixes(
    row_S: Tensor, start: Tensor, length: Tensor, at: Tensor, total: int
) -> tuple[Tensor, Tensor]:
    """Return rows of each document's first `length` keys, and their indices in `KeyOrder.row`."""
    before = length.cumsum(0) - length
    offset = torch.arange(total, device=start.device)
    offset = offset - before.repeat_interleave(length, output_size=total)
    start, at = (x.long().repeat_interleave(length, output_size=total) for x in (start, at))
    return row_S[start + offset], at + offset


_orders: WeakKeyDictionary[Documents, KeyOrder] = WeakKeyDictionary()


class GatheredKeys(LocalKeys):
    """All-gather keys. Recomputation does it again, unless `keeps` stores them."""

    is_gathered = True
    eager = ("send", "receive", "ranges", "sides")  # `blocks.py` does not compile them

    def __init__(self, group: dist.ProcessGroup, keeps: bool) -> None:
        super().__init__()
        self.group, self.keeps = group, keeps
        self.watch: Callable[[Tensor], object] = lambda out: None

    def send(self, keys: Sequence[Tensor], documents: Documents, is_latent: bool) -> Any:
        if (order := _orders.get(documents)) is None:
            sizes = keys[0].shape[0], self.group.size(), self.group.rank()
            order = _orders[documents] = KeyOrder.of(documents, *sizes, is_latent)
        transfer = _KeyTransfer(self.group, order, keys, blocks.recall())
        return transfer, send(transfer, *keys)

    def receive(self, sent: Any) -> Sequence[Tensor]:
        transfer, ticket = sent
        received = receive(transfer, ticket)
        kept = (
            x.detach() for x, is_read in zip(received, transfer.read_again, strict=True) if is_read
        )
        blocks.keep(tuple(kept) if self.keeps else ())
        if torch.is_grad_enabled():
            self.watch(received[0])
        return received

    def ranges(self, documents: Documents, num_queries: int) -> tuple[Tensor, Tensor]:
        return _orders[documents].first, _orders[documents].last

    def sides(self, documents: Documents) -> tuple[Documents, Documents]:
        return _orders[documents].queries, _orders[documents].keys


class _KeyTransfer:
    """Gather one layer's keys, and send gradients back.

    `known`: None in a forward pass. In recomputation, the stored keys, or () to gather again.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        order: KeyOrder,
        keys: Sequence[Tensor],
        known: tuple[Tensor, ...] | None,
    ) -> None:
        self.group, self.order, self.known = group, order, known
        self.is_trained: Sequence[bool] = [key.requires_grad for key in keys]
        self.read_again = [True, *self.is_trained[1:]]
        self.widths = [key.shape[1] for key in keys]

    def begin(self, keys: Sequence[Tensor]) -> None:
        if self.known:
            return
        is_again = self.known is not None
        sent = [
            key for key, reads in zip(keys, self.read_again, strict=True) if reads or not is_again
        ]
        local = torch.cat(sent, dim=1)
        self.gathered = local.new_empty(self.group.size() * local.shape[0], local.shape[1])
        self.work = dist.all_gather_into_tensor(
            self.gathered, local, group=self.group, async_op=True
        )

    def end(self) -> tuple[Tensor, ...]:
        if self.known:
            found = [x.detach() for x in self.known]
        else:
            self.work.wait()
            read = self.read_again if self.known is not None else [True] * len(self.widths)
            widths = [width for width, is_read in zip(self.widths, read, strict=True) if is_read]
            found = [x.index_select(0, self.order.row) for x in self.gathered.split(widths, dim=1)]
            del self.work, self.gathered
        while len(found) < len(self.widths):
            found.append(found[0].new_empty(1, 1).expand(len(self.order.row), self.widths[-1]))
        return tuple(found)

    def begin_back(self, gradients: Sequence[Tensor]) -> None:
        trained = [g for g, trains in zip(gradients, self.is_trained, strict=True) if trains]
        gradient = torch.cat(trained, dim=1)
        num_keys = self.group.size() * len(self.order.first)
        leaving = gradient.new_zeros(num_keys, gradient.shape[1])
        for index, (row, place) in enumerate(self.order.parts):
            part = gradient if place is None else gradient.index_select(0, place)
            before = leaving.index_select(0, row) if index else 0
            leaving.index_copy_(0, row, part + before)
        self.arriving = torch.empty_like(leaving)
        self.work = dist.all_to_all_single(self.arriving, leaving, group=self.group, async_op=True)

    def end_back(self) -> list[Tensor | None]:
        self.work.wait()
        first, *others = self.arriving.unflatten(0, (self.group.size(), -1))
        total = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
        for other in others:
            total += other
        widths = [w for w, trains in zip(self.widths, self.is_trained, strict=True) if trains]
        gradients = iter(total.to(first.dtype).split(widths, dim=1))
        del self.work, self.arriving
        return [next(gradients) if trains else None for trains in self.is_trained]
