"""Orthogonalisation of matrices that may be in pieces on many ranks.

- A matrix that lies whole on its rank stays there: unsharded weights, and stacks that are cut between matrices (experts under FSDP or
  expert parallel). Replicas do the same work each.
- Matrices that ranks hold in pieces are dealt out: each rank receives the pieces of its share in one all-to-all, orthogonalises, and
  sends the pieces back in another. Shares are even in work (the largest matrix first to whoever has least), and no rank holds more than
  its share of a bucket. Dion (Ahn et al. 2025, arXiv 2504.05295) spreads Muon in this way.
- Matrices of one shape go through the iteration as one batch.

B matrices of a stack · M rows · N columns
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from orrery.trainer.optim.gradient import sharding_axes

COEFFICIENTS = (
    3.4445,
    -4.7750,
    2.0315,
)  # the steepest at zero of the odd quintics that keep singular values near one
EPSILON = 1e-7
BATCH_VALUES = (
    1 << 27
)  # of matrices that are orthogonalised at a time: bounds the iteration's own memory


@dataclass(frozen=True)
class Matrices:
    """A weight's direction of movement: this rank's shard of [M, N] or [B, M, N], in which `parts` matrices stand one above the other."""

    source: nn.Parameter
    shard: Tensor
    parts: int

    @property
    def rows(self) -> int:
        return self.source.shape[-2] // self.parts

    @property
    def columns(self) -> int:
        return self.source.shape[-1]

    @cached_property
    def cut(self) -> tuple[DeviceMesh, int, int] | None:
        """Mesh, its axis, and the dimension of a matrix (0 or 1) along which ranks hold pieces of matrices; None where they are whole."""
        first = self.source.ndim - 2
        axes = {
            axis: dim - first for axis, dim in sharding_axes(self.source).items() if dim >= first
        }
        if not axes:
            return None
        if len(axes) > 1:
            raise NotImplementedError(
                f"Muon: matrices cut along {len(axes)} mesh axes ({self.source.placements}) are not put together here"
            )
        assert isinstance(self.source, DTensor)
        [(axis, dim)] = axes.items()
        return self.source.device_mesh, axis, dim

    @property
    def device(self) -> torch.device:
        """Where the work is done: for weights that are offloaded to the CPU, beside the mesh."""
        return (
            torch.device(self.source.device_mesh.device_type)
            if isinstance(self.source, DTensor)
            else self.shard.device
        )


def newton_schulz(x_BMN: Tensor, num_steps: int, dtype: torch.dtype) -> Tensor:
    """The nearest semi-orthogonal matrices, roughly: singular values end between about 0.7 and 1.2. Computed and returned in `dtype`."""
    a, b, c = COEFFICIENTS
    tall = x_BMN.shape[-2] > x_BMN.shape[-1]
    x = (x_BMN.mT if tall else x_BMN).to(dtype)
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def orthogonalize(matrices: Sequence[Matrices], num_steps: int) -> list[Tensor]:
    """This rank's shard of each orthogonalised weight, like `shard`. Collective for those that are cut: the same ones on every rank."""
    found: dict[int, Tensor] = {}
    together: dict[tuple[DeviceMesh, int] | None, list[int]] = {}
    for index, one in enumerate(matrices):
        together.setdefault(one.cut and one.cut[:2], []).append(index)
    for where, indices in together.items():
        some = [matrices[index] for index in indices]
        dtype = torch.bfloat16 if some[0].device.type == "cuda" else some[0].shard.dtype
        stacks = [_stack(one).to(one.device, dtype) for one in some]
        if where is None:
            done = _orthogonalize_whole(stacks, [one.parts for one in some], num_steps)
        else:
            done = _deal(stacks, some, *where, num_steps)
        found |= {
            i: stack.view(one.shard.shape).to(one.shard.device)
            for i, one, stack in zip(indices, some, done, strict=True)
        }
    return [found[index] for index in range(len(matrices))]


def _stack(one: Matrices) -> Tensor:
    return one.shard if one.source.ndim == 3 else one.shard.unsqueeze(0)


def _orthogonalize_whole(stacks: list[Tensor], parts: list[int], num_steps: int) -> list[Tensor]:
    """Stacks [B, parts · M, N] of whole matrices, all of one dtype, those of one shape as one batch."""
    alike: dict[tuple[int, int], list[int]] = {}
    for index, (stack, num) in enumerate(zip(stacks, parts, strict=True)):
        alike.setdefault((stack.shape[-2] // num, stack.shape[-1]), []).append(index)
    done = list(stacks)
    for (rows, columns), indices in alike.items():
        batch_BMN = torch.cat([stacks[index].reshape(-1, rows, columns) for index in indices])
        for chunk_BMN in batch_BMN.split(max(BATCH_VALUES // (rows * columns), 1)):
            if len(chunk_BMN):
                chunk_BMN.copy_(newton_schulz(chunk_BMN, num_steps, chunk_BMN.dtype))
        counts = [len(stacks[index]) * parts[index] for index in indices]
        for index, part in zip(indices, batch_BMN.split(counts), strict=True):
            done[index] = part.reshape(stacks[index].shape)
    return done


@dataclass(frozen=True)
class _Unit:
    """One matrix that ranks hold in pieces: which stack and which of it, its whole shape, and how it is cut."""

    stack: int
    position: int
    shape: tuple[int, int]
    dim: int
    bounds: tuple[int, ...]  # rank r holds bounds[r] to bounds[r + 1] along `dim`
    parts: int

    def piece_shape(self, rank: int) -> tuple[int, int]:
        size = self.bounds[rank + 1] - self.bounds[rank]
        return (size, self.shape[1]) if self.dim == 0 else (self.shape[0], size)

    def piece_numel(self, rank: int) -> int:
        return math.prod(self.piece_shape(rank))


def _deal(
    stacks: list[Tensor], matrices: list[Matrices], mesh: DeviceMesh, axis: int, num_steps: int
) -> list[Tensor]:
    """Stacks of pieces [B, M or less, N or less] in, the same pieces of the orthogonalised matrices out."""
    group, num_ranks, rank = mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis)
    units = [
        _Unit(
            index,
            position,
            (one.rows * one.parts, one.columns),
            one.cut[2],
            _bounds(one.source.shape[one.cut[2] - 2], num_ranks),
            one.parts,
        )
        for index, one in enumerate(matrices)
        if one.cut is not None
        for position in range(len(stacks[index]))
    ]
    shares = _shares(units, num_ranks)
    mine = shares[rank]

    # Pieces to their matrices' owners: what arrives is in the order of senders, each sender's in the order of my share.
    sent = torch.cat(
        [stacks[unit.stack][unit.position].reshape(-1) for share in shares for unit in share]
    )
    to_owners = [sum(unit.piece_numel(rank) for unit in share) for share in shares]
    to_me = [sum(unit.piece_numel(sender) for unit in mine) for sender in range(num_ranks)]
    arrived = _exchange(sent, to_owners, to_me, group)
    pieces = iter(
        arrived.split([unit.piece_numel(sender) for sender in range(num_ranks) for unit in mine])
    )
    by_sender = [
        [next(pieces).view(unit.piece_shape(sender)) for unit in mine]
        for sender in range(num_ranks)
    ]
    whole = [
        torch.cat(of_one, unit.dim).unsqueeze(0)
        for unit, of_one in zip(mine, zip(*by_sender, strict=True), strict=True)
    ]

    whole = _orthogonalize_whole(whole, [unit.parts for unit in mine], num_steps)

    back = [
        matrix[0]
        .narrow(unit.dim, unit.bounds[to], unit.bounds[to + 1] - unit.bounds[to])
        .reshape(-1)
        for to in range(num_ranks)
        for unit, matrix in zip(mine, whole, strict=True)
    ]
    arrived = _exchange(torch.cat(back) if back else sent[:0], to_me, to_owners, group)
    done = [torch.empty_like(stack, memory_format=torch.contiguous_format) for stack in stacks]
    dealt = [unit for share in shares for unit in share]
    for unit, piece in zip(
        dealt, arrived.split([unit.piece_numel(rank) for unit in dealt]), strict=True
    ):
        done[unit.stack][unit.position] = piece.view(unit.piece_shape(rank))
    return done


def _exchange(
    sent: Tensor, to_each: list[int], from_each: list[int], group: dist.ProcessGroup
) -> Tensor:
    arrived = sent.new_empty(sum(from_each))
    dist.all_to_all_single(arrived, sent, from_each, to_each, group=group)
    return arrived


def _bounds(size: int, num_ranks: int) -> tuple[int, ...]:
    """Where DTensor's Shard cuts `size`: as `torch.chunk` does, later ranks may have nothing."""
    step = -(-size // num_ranks)
    return tuple(min(step * rank, size) for rank in range(num_ranks + 1))


def _shares(units: list[_Unit], num_ranks: int) -> list[list[_Unit]]:
    """Units by owner, even in multiplications; every rank comes to the same answer."""
    loads, shares = [0] * num_ranks, [[] for _ in range(num_ranks)]  # type: tuple[list[int], list[list[_Unit]]]
    for unit in sorted(units, key=lambda unit: -math.prod(unit.shape) * min(unit.shape)):
        owner = loads.index(min(loads))
        loads[owner] += math.prod(unit.shape) * min(unit.shape)
        shares[owner].append(unit)
    return shares
