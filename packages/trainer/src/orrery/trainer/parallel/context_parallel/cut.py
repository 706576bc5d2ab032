"""Which tokens of a packed micro-batch belong to which rank of a context-parallel group, and a micro-batch of those alone.

- All ranks get equally many tokens. Padding repeats a real token and is never scored: it stands where no real token sees it, behind
  its document or in a document of its own, and no gradient comes from it.
- `zigzag` pads every document to a multiple of 2·cp. That is at most 2·cp − 1 tokens a document, little beside documents for which a
  sequence is spread at all; and it makes the pieces of all ranks alike, so that every rank has the same offsets and equal work, and
  a block of keys that arrives needs no description. Documents shorter than 2·cp are right too, and mostly padding.
"""

from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np
import torch

from orrery.trainer.loss import Targets
from orrery.trainer.micro_batch import MicroBatch


class Cut(NamedTuple):
    """What one rank takes of a stream of T tokens."""

    source: np.ndarray  # i64 [t]: the token behind each of this rank's places
    is_real: np.ndarray  # bool [t]: not padding
    cu_seqlens: np.ndarray  # i32: offsets as this rank's attention core wants them


def contiguous(lengths: list[int], num_ranks: int, rank: int) -> Cut:
    """The rank-th of equal runs of the stream, padded at its end by a document of its own. Offsets are the whole padded stream's."""
    num_tokens = sum(lengths)
    size = -(-num_tokens // num_ranks)
    place = np.arange(rank * size, (rank + 1) * size)
    ends = np.cumsum(lengths)
    padded = ends if num_tokens == size * num_ranks else np.append(ends, size * num_ranks)
    return Cut(
        np.minimum(place, num_tokens - 1), place < num_tokens, np.append(0, padded).astype(np.int32)
    )


def zigzag(lengths: list[int], num_ranks: int, rank: int) -> Cut:
    """Of each document, in 2·num_ranks equal pieces, the rank-th from the front and the rank-th from the back. Offsets are the pairs'."""
    length = np.asarray(lengths, dtype=np.int64)
    piece = -(-length // (2 * num_ranks))
    offsets = np.append(0, np.cumsum(2 * piece))
    document = np.repeat(np.arange(len(length)), 2 * piece)
    place = np.arange(offsets[-1]) - offsets[document]  # in the pair of pieces
    half = piece[document]
    position = np.where(
        place < half, rank * half + place, (2 * num_ranks - 1 - rank) * half + place - half
    )
    start = (np.cumsum(length) - length)[document]
    last = length[document] - 1
    return Cut(start + np.minimum(position, last), position <= last, offsets.astype(np.int32))


def take(batch: MicroBatch, cut: Cut, is_first: bool) -> MicroBatch:
    """The cut's part of a micro-batch on the CPU. Samples and tokens are counted on the group's first rank alone."""
    source = torch.from_numpy(cut.source)
    place = np.full(len(batch.token_id), -1, dtype=np.int64)  # of each token of the stream, here
    place[cut.source[cut.is_real]] = np.flatnonzero(cut.is_real)
    row = place[batch.row.numpy()]
    scored = torch.from_numpy(np.flatnonzero(row >= 0))
    here = replace(
        batch,
        token_id=batch.token_id[source],
        position=batch.position[source],
        cu_seqlens=torch.from_numpy(cut.cu_seqlens),
        max_seqlen=int(np.diff(cut.cu_seqlens).max()),
        row=torch.from_numpy(row)[scored],
        target=batch.target[scored],
        temperature=batch.temperature[scored],
        routed_experts=_routes(batch.routed_experts, source, torch.from_numpy(cut.is_real)),
        loss=Targets(*(getattr(batch.loss, field.name)[scored] for field in fields(Targets))),
        origin=batch.origin[scored],
        num_samples=batch.num_samples if is_first else 0,
        num_tokens=batch.num_tokens if is_first else 0,
        routes_missing=batch.routes_missing if is_first else 0,
        routes_replayed=batch.routes_replayed if is_first else 0,
    )
    return here if len(scored) else _with_one_unweighted(here)


def _routes(
    routes: torch.Tensor | None, source: torch.Tensor, is_real: torch.Tensor
) -> torch.Tensor | None:
    """Of padding none is replayed, or what differs would be counted there again."""
    if routes is None:
        return None
    here = routes[source]
    here[~is_real] = 255 if routes.dtype == torch.uint8 else -1
    return here


def _with_one_unweighted(batch: MicroBatch) -> MicroBatch:
    """Scoring nothing would take the LM head out of the graph, and this rank out of its collectives."""
    nothing = {
        field.name: torch.zeros(1, dtype=getattr(batch.loss, field.name).dtype)
        for field in fields(Targets)
    }
    first = torch.zeros(1, dtype=torch.int64)
    return replace(
        batch,
        row=first,
        target=first,
        temperature=torch.ones(1),
        loss=Targets(**nothing),
        origin=first.new_zeros(1, 2),
    )
