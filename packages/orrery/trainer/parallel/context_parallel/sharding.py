"""The tokens of a packed micro-batch for each context-parallel rank.

Ranks get equal numbers. Padding repeats a real token, is never scored, and follows its document or
forms another, so no real token attends to it.
"""

from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np
import torch

from orrery.trainer.loss import Targets
from orrery.trainer.micro_batch import MicroBatch


class TokenShard(NamedTuple):
    source: np.ndarray  # i64 [t]: each place's token of the stream
    is_real: np.ndarray  # bool [t]: not padding
    cu_seqlens: np.ndarray  # i32: offsets for the attention core


def contiguous(lengths: list[int], num_ranks: int, rank: int) -> TokenShard:
    """Return the rank-th of equal runs of the stream, with the whole padded stream's offsets.

    The padding is one document at its end.
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
    """Cut documents into 2·num_ranks equal pieces. Return the rank-th from the front and the back.

    Offsets count pairs of pieces, so all ranks have equal offsets and work.
    """
    length = np.asarray(lengths, dtype=np.int64)
    piece = -(-length // (2 * num_ranks))
    offsets = np.append(0, np.cumsum(2 * piece))
    document = np.repeat(np.arange(len(length)), 2 * piece)
    place = np.arange(offsets[-1]) - offsets[document]  # in the pair of pieces
    half = piece[document]
    early, late = rank * half + place, (2 * num_ranks - 1 - rank) * half + place - half
    position = np.where(place < half, early, late)
    start = (np.cumsum(length) - length)[document]
    last = length[document] - 1
    return TokenShard(
        start + np.minimum(position, last), position <= last, offsets.astype(np.int32)
    )


def select_shard(batch: MicroBatch, tokens: TokenShard, is_first: bool) -> MicroBatch:
    """Return the part of `batch` with `tokens`. Only the first rank counts samples."""
    source = torch.from_numpy(tokens.source)
    place = np.full(len(batch.token_id), -1, dtype=np.int64)  # each token's place here
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
    )
    return part if len(scored) else _with_unweighted_token(part)


def _routes(
    routes: torch.Tensor | None, source: torch.Tensor, is_real: torch.Tensor
) -> torch.Tensor | None:
    """Return the routes, without padding's: its mismatches would count twice."""
    if routes is None:
        return None
    here = routes[source]
    here[~is_real] = 255 if routes.dtype == torch.uint8 else -1
    return here


def _with_unweighted_token(batch: MicroBatch) -> MicroBatch:
    """Score one token with weight 0, for the LM head's collectives."""
    zeros = {
        field.name: torch.zeros(1, dtype=getattr(batch.loss, field.name).dtype)
        for field in fields(Targets)
    }
    first = torch.zeros(1, dtype=torch.int64)
    return replace(
        batch,
        row=first,
        target=first,
        temperature=torch.ones(1),
        loss=Targets(**zeros),
        origin=first.new_zeros(1, 2),
    )
