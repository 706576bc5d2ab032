"""Context parallel: the cp ranks of a group share each micro-batch's tokens.

`trainer.mesh.cp_style` selects the attention and the tokens of rank r:

    ulysses   one contiguous part. All-to-alls give each rank all tokens for 1/cp of the heads
    ring      pieces r and 2·cp − 1 − r of a document's 2·cp pieces. Ranks pass keys in a ring
    dsa       pieces as in ring. Each rank gathers all latent keys (latent attention only)

Ranks get equally many tokens. Padding repeats a real token, is not scored, and is hidden from
real tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from orrery.kernels.attention import Documents, varlen_attention
from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Mesh, Trainer
from orrery.models.latent_attention import LatentAttention
from orrery.models.layers import Attention
from orrery.trainer.loss import Targets
from orrery.trainer.micro_batch import MicroBatch, unweighted_token
from orrery.trainer.parallel.gathered_keys import GatheredKeys
from orrery.trainer.parallel.ring_attention import RingCore
from orrery.trainer.parallel.world import World, all_to_all, exchange
from orrery.trainer.policy import Policy


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
            f"trainer.mesh.cp {trainer.mesh.cp}: attention of family {family!r} cannot be spread; "
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
    """Return the `tokens` of `batch`. Only the first rank keeps the counts."""
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
    """Ulysses (Jacobs et al. 2023, arXiv 2309.14509): each rank attends with 1/cp of the heads.

    t: tokens of this rank, T = cp·t: tokens of the group and of `documents`, H: query heads,
    G: key and value heads, K: head size
    """

    eager = ("forward",)  # not compiled (`blocks.py`)

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


CORES: dict[str, Callable[[dist.ProcessGroup], nn.Module]] = {
    "ulysses": UlyssesCore,
    "ring": RingCore,
}
SHARDS: dict[str, Callable[[list[int], int, int], TokenShard]] = {
    "ulysses": contiguous,
    "ring": zigzag,
    "dsa": zigzag_of_whole,
}
