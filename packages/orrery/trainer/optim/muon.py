"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for the matrices of blocks.

    m ← momentum · m + (1 − momentum) · g          g: gradient, w: weight
    u = m, or Nesterov: momentum · m + (1 − momentum) · g
    w ← (1 − lr · weight_decay) · w − lr · 0.2 · √max(rows, columns) · orthogonal(u)

The factor 0.2 · √max(rows, columns) matches the RMS of AdamW's updates (arXiv 2502.16982, eq. 4).
Other weights use AdamW. Updates are collectives, so a weight must have a gradient on all ranks or
on none.

B: matrices in a stack, M: rows, N: columns
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from orrery.manifest.budget.trainer_memory import BATCH_VALUES
from orrery.manifest.schema import Muon
from orrery.trainer.optim import rules
from orrery.trainer.optim.gradient import sharding_axes
from orrery.trainer.optim.rules import ParamGroup, UpdateRule, WeightPart, is_bias
from orrery.trainer.parallel.world import all_to_all

RMS = 0.2
FUSED = re.compile(r"\.gate_up_(proj|proj\.weight|lora\.b)$")
NOT_MATRICES = ("gate", "router", "conv", "conv1d", "conv_1d", "A_log")
# (a, b, c) of a·x + b·x³ + c·x⁵, which quickly moves singular values towards 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7


@dataclass(frozen=True)
class GateUp:
    """Layout of an MLP's gate and up projections in one weight [M, N] or [B, M, N].

    `dim`: −2 if rows are joined, −1 if columns are. Gate comes first unless `is_interleaved`.
    """

    dim: int = -2
    is_interleaved: bool = False

    @property
    def _pair_dim(self) -> int:
        return self.dim if self.is_interleaved else self.dim - 1

    def split(self, x_BMN: Tensor) -> Tensor:
        """Return [2·B, M/2, N] or [2·B, M, N/2]: gate and up of matrix 0, then of matrix 1, …"""
        sizes = (-1, 2) if self.is_interleaved else (2, -1)
        return x_BMN.unflatten(self.dim, sizes).movedim(self._pair_dim, 1).flatten(0, 1)

    def join(self, x: Tensor) -> Tensor:
        pairs = x.unflatten(0, (-1, 2)).movedim(1, self._pair_dim)
        return pairs.flatten(self.dim - 1, self.dim)


class MuonRule(UpdateRule):
    keys = ("momentum",)
    needs_whole_shards = True

    def __init__(self, spec: Muon, fused: dict[nn.Parameter, GateUp]):
        super().__init__(spec)
        self.fused = fused

    def update(
        self, parts: list[WeightPart], lr: float, weight_decay: float, divisor: Tensor | None
    ) -> None:
        directions = self._directions([part for part in parts if part.weight.numel()], divisor)
        shards = []
        for part in parts:
            direction = directions.get(part.source, part.gradient)
            shards.append(MatrixShard(part.source, direction, self.fused.get(part.source)))
        updates = orthogonalize(shards, self.spec.num_newton_schulz_steps)
        for part, shard, update in zip(parts, shards, updates, strict=True):
            part.weight.mul_(1.0 - lr * weight_decay)
            part.weight.add_(update, alpha=-lr * RMS * math.sqrt(max(shard.sides)))

    def _directions(
        self, parts: list[WeightPart], divisor: Tensor | None
    ) -> dict[nn.Parameter, Tensor]:
        if not parts:
            return {}
        gradients = [part.gradient for part in parts]
        directions = momenta = [part.state["momentum"] for part in parts]
        if divisor is not None:
            torch._foreach_div_(gradients, divisor)
        torch._foreach_lerp_(momenta, gradients, 1.0 - self.spec.momentum)
        if self.spec.nesterov:
            torch._foreach_lerp_(gradients, momenta, self.spec.momentum)
            directions = gradients
        return dict(zip([part.source for part in parts], directions, strict=True))


def is_block_matrix(name: str, weight: Tensor) -> bool:
    owner = name.removesuffix(".weight").rpartition(".")[2]
    inside = re.search(r"\.\d+\.", name) is not None
    return weight.ndim in (2, 3) and inside and owner not in NOT_MATRICES and not is_bias(name)


def gate_up(policy: nn.Module, name: str) -> GateUp:
    """Return the layout of weight `name`, inferred from `down_proj`.

    Orrery's shape is [experts, 2·MLP size, hidden size]. Some Hugging Face models swap the last two
    dimensions, and gpt_oss interleaves gate and up.
    """
    owner = policy.get_submodule(name.rpartition(".")[0])
    shape, down = policy.get_parameter(name).shape, getattr(owner, "down_proj", None)
    if (
        len(shape) == 3
        and isinstance(down, Tensor)
        and shape[1:] == (down.shape[2], 2 * down.shape[1])
    ):
        return GateUp(-1, not getattr(owner, "is_concatenated", True))
    return GateUp()


def groups(spec: Muon, policy: nn.Module, weights: dict[str, nn.Parameter]) -> list[ParamGroup]:
    matrices = {name: weight for name, weight in weights.items() if is_block_matrix(name, weight)}
    fused = {one: gate_up(policy, name) for name, one in matrices.items() if FUSED.search(name)}
    rest = {name: weight for name, weight in weights.items() if name not in matrices}
    return [
        ParamGroup(list(matrices.values()), MuonRule(spec, fused), spec.lr, spec.weight_decay),
        *rules.groups(spec.rest, rest),
    ]


@dataclass(frozen=True)
class MatrixShard:
    """This rank's shard of an update direction, [M, N] or [B, M, N]."""

    source: nn.Parameter
    shard: Tensor
    fused: GateUp | None

    @property
    def sides(self) -> tuple[int, int]:
        *_, rows, columns = self.source.shape
        if self.fused is None:
            return rows, columns
        return (rows // 2, columns) if self.fused.dim == -2 else (rows, columns // 2)

    @cached_property
    def axes(self) -> dict[int, int]:
        """Return {mesh axis: 0 (rows) or 1 (columns)} of the axes that split matrices."""
        first = self.source.ndim - 2
        cut = sharding_axes(self.source)
        return {axis: dim - first for axis, dim in cut.items() if dim >= first}

    @cached_property
    def split(self) -> tuple[DeviceMesh, int, int] | None:
        """Return (mesh, axis, dim) if exactly one mesh axis splits matrices, or None."""
        if len(self.axes) != 1:
            return None
        assert isinstance(self.source, DTensor)
        [(axis, dim)] = self.axes.items()
        return self.source.device_mesh, axis, dim

    def whole(self, stack: Tensor) -> tuple[Tensor, list[Placement]]:
        """Return whole matrices and their placements. A collective."""
        assert isinstance(self.source, DTensor)
        mesh, old = self.source.device_mesh, self.source.placements
        new = [Replicate() if axis in self.axes else one for axis, one in enumerate(old)]
        shape, stride = self.source.shape, self.source.stride()
        parts = DTensor.from_local(
            stack.view(self.shard.shape), mesh, old, run_check=False, shape=shape, stride=stride
        )
        return parts.redistribute(mesh, new).to_local(), new

    def part(self, matrices: Tensor, placements: list[Placement]) -> Tensor:
        assert isinstance(self.source, DTensor)
        mesh, old = self.source.device_mesh, self.source.placements
        shape, stride = self.source.shape, self.source.stride()
        whole = DTensor.from_local(
            matrices, mesh, placements, run_check=False, shape=shape, stride=stride
        )
        return whole.redistribute(mesh, old).to_local()

    @property
    def device(self) -> torch.device:
        if isinstance(self.source, DTensor):
            return torch.device(self.source.device_mesh.device_type)
        return self.shard.device


def newton_schulz(x_BMN: Tensor, num_steps: int, dtype: torch.dtype) -> Tensor:
    """Approximate the nearest semi-orthogonal matrices (singular values 0.7 to 1.2)."""
    a, b, c = COEFFICIENTS
    tall = x_BMN.shape[-2] > x_BMN.shape[-1]
    x = (x_BMN.mT if tall else x_BMN).to(dtype)
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def orthogonalize(shards: Sequence[MatrixShard], num_steps: int) -> list[Tensor]:
    """Return this rank's shards of orthogonalized directions. A collective.

    Compute in bfloat16 on CUDA, in the shard's dtype on a CPU.
    """
    found: dict[int, Tensor] = {}
    together: dict[tuple[DeviceMesh, int] | None, list[int]] = {}
    for index, one in enumerate(shards):
        if len(one.axes) > 1:
            found[index] = _orthogonalize_gathered(one, num_steps)
        else:
            together.setdefault(one.split and one.split[:2], []).append(index)
    for axis, indices in together.items():
        some = [shards[index] for index in indices]
        stacks = [_stack(one) for one in some]
        if axis is None:
            done = _orthogonalize_whole(stacks, [one.fused for one in some], num_steps)
        else:
            done = _orthogonalize_split(stacks, some, *axis, num_steps)
        for index, one, stack in zip(indices, some, done, strict=True):
            found[index] = stack.view(one.shard.shape).to(one.shard.device)
    return [found[index] for index in range(len(shards))]


def _stack(one: MatrixShard) -> Tensor:
    dtype = torch.bfloat16 if one.device.type == "cuda" else one.shard.dtype
    stack = one.shard if one.source.ndim == 3 else one.shard.unsqueeze(0)
    return stack.to(one.device, dtype)


def _orthogonalize_gathered(one: MatrixShard, num_steps: int) -> Tensor:
    whole, placements = one.whole(_stack(one))
    stack = whole if whole.ndim == 3 else whole.unsqueeze(0)
    [done] = _orthogonalize_whole([stack], [one.fused], num_steps)
    return one.part(done.view(whole.shape), placements).to(one.shard.device)


def _orthogonalize_whole(
    stacks: list[Tensor], fused: list[GateUp | None], num_steps: int
) -> list[Tensor]:
    matrices = [
        stack if how is None else how.split(stack) for stack, how in zip(stacks, fused, strict=True)
    ]
    alike: dict[tuple[int, int], list[int]] = {}
    for index, one in enumerate(matrices):
        alike.setdefault((one.shape[1], one.shape[2]), []).append(index)
    done = list(stacks)
    for (rows, columns), indices in alike.items():
        batch_BMN = torch.cat([matrices[index] for index in indices])
        for chunk_BMN in batch_BMN.split(max(BATCH_VALUES // (rows * columns), 1)):
            if len(chunk_BMN):
                chunk_BMN.copy_(newton_schulz(chunk_BMN, num_steps, chunk_BMN.dtype))
        counts = [len(matrices[index]) for index in indices]
        for index, part in zip(indices, batch_BMN.split(counts), strict=True):
            how = fused[index]
            done[index] = part if how is None else how.join(part)
    return done


@dataclass(frozen=True)
class _SplitMatrix:
    stack: int
    position: int
    shape: tuple[int, int]
    dim: int
    bounds: tuple[int, ...]  # rank r holds bounds[r] to bounds[r + 1] along `dim`
    fused: GateUp | None

    def size(self, rank: int) -> int:
        return self.bounds[rank + 1] - self.bounds[rank]

    def part_shape(self, rank: int) -> tuple[int, int]:
        size = self.size(rank)
        return (size, self.shape[1]) if self.dim == 0 else (self.shape[0], size)

    def part_numel(self, rank: int) -> int:
        return math.prod(self.part_shape(rank))

    @property
    def cost(self) -> int:
        return math.prod(self.shape) * min(self.shape)


def _orthogonalize_split(
    stacks: list[Tensor], shards: list[MatrixShard], mesh: DeviceMesh, axis: int, num_steps: int
) -> list[Tensor]:
    """Orthogonalize stacks [B, M, N] that ranks split along M or N.

    Each matrix is gathered, orthogonalized and scattered by one rank (Dion, arXiv 2504.05295).
    """
    group, num_ranks, rank = mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis)
    ranks = range(num_ranks)
    assigned = _assign(_split_matrices(stacks, shards, num_ranks), num_ranks)
    own, every = assigned[rank], [matrix for matrices in assigned for matrix in matrices]

    sent = torch.cat([stacks[one.stack][one.position].reshape(-1) for one in every])
    to_owners = [sum(one.part_numel(rank) for one in matrices) for matrices in assigned]
    to_me = [sum(one.part_numel(sender) for one in own) for sender in ranks]
    (arrived,) = all_to_all([sent], group, to_owners, to_me)
    parts = iter(arrived.split([one.part_numel(sender) for sender in ranks for one in own]))
    by_sender = [[next(parts).view(one.part_shape(sender)) for one in own] for sender in ranks]
    whole = [
        torch.cat(of_one, one.dim).unsqueeze(0)
        for one, of_one in zip(own, zip(*by_sender, strict=True), strict=True)
    ]

    whole = _orthogonalize_whole(whole, [one.fused for one in own], num_steps)

    back = [
        matrix[0].narrow(one.dim, one.bounds[to], one.size(to)).reshape(-1)
        for to in ranks
        for one, matrix in zip(own, whole, strict=True)
    ]
    (arrived,) = all_to_all([torch.cat(back) if back else sent[:0]], group, to_me, to_owners)
    done = [torch.empty_like(stack, memory_format=torch.contiguous_format) for stack in stacks]
    results = arrived.split([one.part_numel(rank) for one in every])
    for one, part in zip(every, results, strict=True):
        done[one.stack][one.position] = part.view(one.part_shape(rank))
    return done


def _split_matrices(
    stacks: list[Tensor], shards: list[MatrixShard], num_ranks: int
) -> list[_SplitMatrix]:
    found = []
    for index, one in enumerate(shards):
        assert one.split is not None
        dim = one.split[2]
        shape = (one.source.shape[-2], one.source.shape[-1])
        bounds = _bounds(one.source.shape[dim - 2], num_ranks)
        for position in range(len(stacks[index])):
            found.append(_SplitMatrix(index, position, shape, dim, bounds, one.fused))
    return found


def _bounds(size: int, num_ranks: int) -> tuple[int, ...]:
    """Return the offsets at which DTensor's `Shard` cuts a dimension."""
    step = -(-size // num_ranks)
    return tuple(min(step * rank, size) for rank in range(num_ranks + 1))


def _assign(matrices: list[_SplitMatrix], num_ranks: int) -> list[list[_SplitMatrix]]:
    loads = [0] * num_ranks
    assigned: list[list[_SplitMatrix]] = [[] for _ in range(num_ranks)]
    for matrix in sorted(matrices, key=lambda matrix: -matrix.cost):
        owner = loads.index(min(loads))
        loads[owner] += matrix.cost
        assigned[owner].append(matrix)
    return assigned
