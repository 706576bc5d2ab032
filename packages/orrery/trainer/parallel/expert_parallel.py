"""Expert parallel: each ep rank holds 1/ep of every layer's experts, and receives their tokens.

Expert parameters are DTensors with Shard(0) on mesh axis `ep`. Their gradients cover all ep ranks'
tokens.

    T: this rank's tokens, K: experts per token, M ≤ T·K: rows that this rank sends, R: ranks,
    E: experts, D: hidden size, N: all ranks' tokens that use this rank's experts
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from orrery.kernels.expert_rows import (
    RowOrder,
    combine_rows,
    gather_rows,
    sort_by_expert,
)
from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Trainer
from orrery.models import expert_modules
from orrery.models.layers import Experts, MixtureOfExperts, count_tokens
from orrery.trainer.parallel import blocks
from orrery.trainer.parallel.world import RowTransfer, World, receive, send
from orrery.trainer.policy import Policy

KINDS = ("torch", "deepep")
NVLINK_RANKS = 8  # DeepEP's maximum number of ranks in a group without RDMA


def make_exchange(
    backend: str,
    group: dist.ProcessGroup,
    num_experts: int,
    num_sms: int | None = None,
    chunk_tokens: int | None = None,
    num_chunks: int = 1,
) -> nn.Module:
    """Return the token exchange. Rank i of `group` holds the i-th part of the experts.

    Raise OrreryError if `backend` is unknown or not installed.
    """
    if backend == "torch":
        return TorchExchange(group, num_experts, num_chunks)
    if backend == "deepep":
        return DeepEpExchange(group, num_experts, num_sms, chunk_tokens)
    choices = ", ".join(KINDS)
    raise OrreryError(f"trainer.mesh.ep_backend: {backend!r} is no exchange; choose from {choices}")


def apply(policy: Policy, world: World, trainer: Trainer) -> None:
    if trainer.mesh.ep == 1:
        return
    mesh, moe = world.expert_mesh, policy.network.config.moe
    if moe is None:
        raise OrreryError(
            f"trainer.mesh.ep {trainer.mesh.ep}: {policy.network.config.family} has no experts; "
            "set trainer.mesh.ep to 1"
        )
    assert mesh is not None
    for experts in expert_modules(policy.network):
        _shard(experts, mesh["ep"])
    for module in policy.network.modules():
        if isinstance(module, MixtureOfExperts):
            spec, group = trainer.mesh, mesh.get_group("ep")
            options = spec.deepep_num_sms, spec.deepep_token_chunk_size, spec.ep_chunks
            module.exchange = make_exchange(spec.ep_backend, group, moe.num_experts, *options)


def _shard(experts: nn.Module, mesh: DeviceMesh) -> None:
    for module in experts.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            share = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(
                name, nn.Parameter(share, requires_grad=parameter.requires_grad)
            )
    forward = experts.forward

    def on_local_shares(*args: Any, **options: Any) -> Tensor:
        with _local_shares(experts):
            return forward(*args, **options)

    # Replace only `forward`, because FSDP's hooks need the DTensors.
    experts.forward = on_local_shares


@contextmanager
def _local_shares(experts: nn.Module) -> Iterator[None]:
    found = [
        (module, name, parameter)
        for module in experts.modules()
        for name, parameter in module._parameters.items()
    ]
    try:
        for module, name, parameter in found:
            if isinstance(parameter, DTensor):
                module._parameters[name] = parameter.to_local()  # type: ignore[assignment]
        yield
    finally:
        for module, name, parameter in found:
            module._parameters[name] = parameter


class ExchangeLengths(NamedTuple):
    """Numbers of rows in one exchange. They may include rows without a token."""

    sent: list[int]  # by rank
    arriving: list[int]  # by rank
    num_rows: int  # of all local experts, with padding
    sent_R: Tensor  # i64 [R]: `sent` on the device


class TorchExchange(nn.Module):
    """Send each token once to each rank that holds any of its experts. Sum the results.

    Tokens travel in `num_chunks` chunks, one while the experts compute another.
    """

    eager = ("forward",)  # `blocks.py` does not compile it

    def __init__(self, group: dist.ProcessGroup, num_experts: int, num_chunks: int = 1) -> None:
        super().__init__()
        self.group, self.num_experts, self.num_chunks = group, num_experts, num_chunks
        self.known: list[ExchangeLengths] | None = None  # of each chunk, see `ExchangePlan`

    def forward(
        self, x_TD: Tensor, score_TK: Tensor, expert_TK: Tensor, experts: Experts
    ) -> Tensor:
        if (lengths := blocks.recall()) is None:
            lengths = self.known
            if lengths is None:
                ids = self.split(expert_TK)
                lengths = agree_on_lengths(ids, self.num_experts, self.group, experts.row_block)
            lengths = blocks.keep(lengths)
        inputs = zip(*map(self.split, (x_TD, score_TK, expert_TK)), strict=True)
        chunks = [
            _Chunk(self, each, *tensors) for each, tensors in zip(lengths, inputs, strict=True)
        ]
        sent = [chunk.send_rows() for chunk in chunks]
        returned = experts.forward_chunks(
            sent,
            [chunk.receive_rows for chunk in chunks],
            [chunk.send_results for chunk in chunks],
        )
        return _joined(
            [chunk.receive_results(each) for chunk, each in zip(chunks, returned, strict=True)]
        )

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        return _split(
            tensor, [len(tensor) * end // self.num_chunks for end in range(1, self.num_chunks + 1)]
        )


def _split(tensor: Tensor, ends: Sequence[int]) -> Sequence[Tensor]:
    if len(ends) == 1:
        return [tensor]
    return tensor.split([end - start for start, end in zip((0, *ends), ends, strict=False)])


def _joined(chunks: Sequence[Tensor]) -> Tensor:
    return chunks[0] if len(chunks) == 1 else torch.cat(list(chunks))


class _Chunk:
    """The exchange of a chunk of tokens. Its methods run once, in the order of their names."""

    def __init__(
        self,
        exchange: TorchExchange,
        lengths: ExchangeLengths,
        x_TD: Tensor,
        score_TK: Tensor,
        expert_TK: Tensor,
    ) -> None:
        self._lengths, self._num_local = lengths, exchange.num_experts // exchange.group.size()
        self._x_TD, self._score_TK, self._expert_TK = x_TD, score_TK, expert_TK
        counts = lengths.sent, lengths.arriving
        self._ids, self._there = (RowTransfer(exchange.group, *counts) for _ in range(2))
        self._back = RowTransfer(exchange.group, *reversed(counts))

    def send_rows(self) -> tuple[Tensor]:
        """Return the ticket of rows [N, D] and scores [N, K] of arriving tokens."""
        rank_TK, expert_TK = self._expert_TK // self._num_local, self._expert_TK
        self._rows, is_token_M = _rows_by_rank(rank_TK, self._lengths)
        token_M = self._rows.row_M // expert_TK.shape[1]
        to_M = rank_TK.flatten()[self._rows.row_M]
        is_there_MK = (rank_TK[token_M] == to_M[:, None]) & is_token_M[:, None]
        local_MK = expert_TK[token_M] - self._num_local * to_M[:, None]
        self._ids.begin([torch.where(is_there_MK, local_MK, -1)])
        x_MD, score_MK = (gather_rows(each, self._rows) for each in (self._x_TD, self._score_TK))
        return (send(self._there, x_MD, torch.where(is_there_MK, score_MK, 0)),)

    def receive_rows(self, ticket: Tensor, block: int) -> tuple[Tensor, Tensor, RowOrder]:
        (expert_NK,) = self._ids.end()
        x_ND, score_NK = receive(self._there, ticket)
        return x_ND, score_NK, _rows(expert_NK, self._num_local, self._lengths.num_rows, block)

    def send_results(self, y_ND: Tensor) -> Tensor:
        return send(self._back, y_ND)

    def receive_results(self, ticket: Tensor) -> Tensor:
        (y_MD,) = receive(self._back, ticket)
        return combine_rows(y_MD, self._rows)


def _rows_by_rank(rank_TK: Tensor, lengths: ExchangeLengths) -> tuple[RowOrder, Tensor]:
    """Order tokens by destination, one row per rank. Return the order, and which rows have tokens.

    Rank r's rows begin after the `lengths.sent` of earlier ranks.
    """
    is_same_TKK = rank_TK[:, :, None] == rank_TK[:, None, :]
    is_first_TK = ~is_same_TKK.tril(-1).any(2)
    num_ranks, num_rows = len(lengths.sent), sum(lengths.sent)
    order = sort_by_expert(torch.where(is_first_TK, rank_TK, num_ranks), num_ranks)
    start_R = lengths.sent_R.cumsum(0) - lengths.sent_R
    shift_R = start_R - (order.ends_E - order.counts_E)
    place_TK = torch.where(is_first_TK, order.place_TK + shift_R[rank_TK], -1)
    slots = torch.arange(rank_TK.numel(), device=rank_TK.device)
    row_M = slots.new_full((num_rows + 1,), -1)
    row_M.scatter_(0, place_TK.flatten().remainder(num_rows + 1), slots)  # −1 is the last row
    row_M = row_M[:num_rows]
    return order._replace(row_M=row_M.clamp(min=0), place_TK=place_TK), row_M >= 0


UNKNOWN = 1 << 40  # number of missing routes that says: exchange the lengths in each layer
MAX_MISSING = 0.25  # share of tokens without a route, because each travels to all ranks


class ExchangePlan:
    """Exchange all layers' lengths at once, so that the host does not wait in each layer."""

    def __init__(self, policy: Policy, device: torch.device) -> None:
        modules = policy.network.modules()
        layers = [each for each in modules if isinstance(each, MixtureOfExperts)]
        exchanges = [layer.exchange for layer in layers]
        self._exchanges = [each for each in exchanges if isinstance(each, TorchExchange)]
        self._row_block = layers[0].experts.row_block if layers else 1
        self._missing_TK = torch.full((1, 1), -1, device=device)

    def set(self, routes_TLK: Tensor | None) -> None:
        """Exchange the next micro-batch's lengths. A collective of ranks along `ep`.

        A token without a route counts for each rank and expert. Without routes, or with too few,
        each layer exchanges its own lengths.
        """
        if not self._exchanges:
            return
        first, layers = self._exchanges[0], [self._missing_TK] * len(self._exchanges)
        if routes_TLK is not None:
            layers = list(routes_TLK.unbind(1))
        ids = [chunk for layer in layers for chunk in first.split(layer)]
        found = agree_on_lengths(ids, first.num_experts, first.group, self._row_block)
        for index, exchange in enumerate(self._exchanges):
            start = index * first.num_chunks
            exchange.known = found and found[start : start + first.num_chunks]


def agree_on_lengths(
    ids: Sequence[Tensor], num_experts: int, group: dist.ProcessGroup, block: int
) -> list[ExchangeLengths] | None:
    """Return the lengths of the exchange of each of `ids` [T, K]. The host waits once.

    Ids outside 0 to `num_experts` − 1 are missing. Return None if a rank misses too many. A
    collective.
    """
    size = group.size()
    sent = torch.stack([_count(each, num_experts, size) for each in ids], 1)
    arriving = torch.empty_like(sent)
    dist.all_to_all_single(arriving, sent, group=group)
    columns = sent[:, :, 0].T, arriving[:, :, 0].T, arriving[:, :, 1:].sum(0)
    numbers = torch.cat(columns, 1).tolist()
    if any(row[2 * size] >= UNKNOWN for row in numbers):
        return None
    return [
        ExchangeLengths(
            row[:size],
            row[size : 2 * size],
            _padded(row[2 * size + 1 :], block, row[2 * size], each.shape[1]),
            sent[:, index, 0],
        )
        for index, (row, each) in enumerate(zip(numbers, ids, strict=True))
    ]


def _count(expert_TK: Tensor, num_experts: int, size: int) -> Tensor:
    """Return i64 [R, 2 + E / R]: a rank's rows, all missing tokens, slots of the rank's experts."""
    expert_TK = expert_TK.long()
    is_id_TK = (expert_TK >= 0) & (expert_TK < num_experts)
    expert_TK = torch.where(is_id_TK, expert_TK, num_experts)
    slots_E = count_tokens(expert_TK, num_experts + 1, None)
    is_sent_TR = is_id_TK.new_zeros(len(expert_TK), size + 1)
    is_sent_TR.scatter_(1, expert_TK // (num_experts // size), True)
    missing = (~is_id_TK).any(1).sum()
    rows_R = is_sent_TR[:, :size].sum(0) + missing
    is_too_many = missing > MAX_MISSING * len(expert_TK)
    missing = torch.where(is_too_many, UNKNOWN, missing).expand(size)
    return torch.cat((torch.stack((rows_R, missing), 1), slots_E[:-1].view(size, -1)), 1)


def _padded(counts: Sequence[int], block: int, missing: int = 0, top_k: int = 0) -> int:
    """Return the most rows of experts with `counts` slots, each padded to a multiple of `block`.

    `missing` tokens may each add a slot to `top_k` experts.
    """
    most = sum((count + missing + block - 1) // block * block for count in counts)
    if not missing:
        return most
    slots = sum(counts) + missing * top_k + len(counts) * (block - 1)
    return min(most, (slots + block - 1) // block * block)


class DeepEpExchange(nn.Module):
    """Exchange tokens in bfloat16 over NVLink and RDMA (https://github.com/deepseek-ai/DeepEP)."""

    eager = ("forward",)

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_experts: int,
        num_sms: int | None = None,
        chunk_tokens: int | None = None,
    ) -> None:
        super().__init__()
        if find_spec("deep_ep") is None:
            raise OrreryError(
                "trainer.mesh.ep_backend 'deepep': the package deep_ep is not installed here; "
                "install it or set trainer.mesh.ep_backend to 'torch'"
            )
        self.group, self.num_experts = group, num_experts
        self.num_sms, self.chunk_tokens = num_sms, chunk_tokens

    def forward(
        self, x_TD: Tensor, score_TK: Tensor, expert_TK: Tensor, experts: Experts
    ) -> Tensor:
        count = self._count_chunks(x_TD)
        inputs = [self._split(tensor, count) for tensor in (x_TD, score_TK.float(), expert_TK)]
        buffer = _buffer(self.group, x_TD.shape[1] * x_TD.element_size(), self.num_sms)
        sent = [
            _DeepEpDispatch.apply(*(each.contiguous() for each in chunk), buffer, self.num_experts)
            for chunk in zip(*inputs, strict=True)
        ]
        outs = experts.forward_chunks(
            [(x_ND, score_NK) for x_ND, score_NK, *_ in sent],
            [partial(self._order, expert_NK, counts) for _, _, expert_NK, counts, _ in sent],
            [partial(_DeepEpCombine.apply, buffer, handle) for *_, handle in sent],
        )
        return _joined(outs)

    def _count_chunks(self, x_TD: Tensor) -> int:
        """Return the number of chunks, equal on all ranks because each chunk is a collective."""
        if self.chunk_tokens is None:
            return 1
        if (count := blocks.recall()) is None:
            most = torch.tensor(len(x_TD), device=x_TD.device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
            count = blocks.keep(max(1, -(-int(most) // self.chunk_tokens)))
        return count

    def _split(self, tensor: Tensor, count: int) -> Sequence[Tensor]:
        size = self.chunk_tokens or len(tensor)
        return _split(tensor, [min(end * size, len(tensor)) for end in range(1, count + 1)])

    def _order(
        self,
        expert_NK: Tensor,
        rows_of_expert: list[int],
        x_ND: Tensor,
        score_NK: Tensor,
        block: int,
    ) -> tuple[Tensor, Tensor, RowOrder]:
        num_local = self.num_experts // self.group.size()
        return x_ND, score_NK, _rows(expert_NK, num_local, _padded(rows_of_expert, block), block)


def _rows(expert_NK: Tensor, num_local: int, num_rows: int, block: int) -> RowOrder:
    """Sort received tokens by local expert. Pad each expert's rows to a multiple of `block`.

    `expert_NK` is −1 for experts of other ranks. `num_rows`: at least the number of experts' rows.
    """
    is_here_NK = expert_NK >= 0
    rows = sort_by_expert(torch.where(is_here_NK, expert_NK, num_local), num_local, block)
    place_NK = torch.where(is_here_NK, rows.place_TK, -1)
    return rows._replace(row_M=rows.row_M[: max(num_rows, block)], place_TK=place_NK)


@cache
def _buffer(group: dist.ProcessGroup, row_bytes: int, num_sms: int | None) -> Any:
    """Return the group's DeepEP buffer, shared by all layers. A collective."""
    from deep_ep import Buffer

    if num_sms is not None:
        Buffer.set_num_sms(num_sms)
    size = group.size()
    configs = Buffer.get_dispatch_config(size), Buffer.get_combine_config(size)
    nvlink_bytes = max(config.get_nvl_buffer_size_hint(row_bytes, size) for config in configs)
    rdma_bytes = 0
    if size > NVLINK_RANKS:  # a build without NVSHMEM has no size for RDMA
        rdma_bytes = max(config.get_rdma_buffer_size_hint(row_bytes, size) for config in configs)
    return Buffer(group, nvlink_bytes, rdma_bytes)


class _DeepEpDispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, score_TK: Tensor, expert_TK: Tensor, buffer: Any, num_experts: int
    ) -> tuple[Any, ...]:
        tokens_of_rank, tokens_of_node, tokens_of_expert, is_in_rank, _ = (
            buffer.get_dispatch_layout(expert_TK, num_experts)
        )
        x_ND, expert_NK, score_NK, rows_of_expert, handle, _ = buffer.dispatch(
            x_TD.contiguous(),
            topk_idx=expert_TK,
            topk_weights=score_TK,
            num_tokens_per_rank=tokens_of_rank,
            num_tokens_per_rdma_rank=tokens_of_node,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=tokens_of_expert,
        )
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(expert_NK)
        return x_ND, score_NK, expert_NK, rows_of_expert, handle

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_x_ND: Tensor, grad_score_NK: Tensor, *_: Any
    ) -> tuple[Tensor | None, ...]:
        grad_x_TD, grad_score_TK, _event = ctx.buffer.combine(
            grad_x_ND.contiguous(), ctx.handle, topk_weights=grad_score_NK.contiguous()
        )
        return grad_x_TD, grad_score_TK, None, None, None


class _DeepEpCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Any, handle: Any, y_ND: Tensor) -> Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        out_TD, _, _event = buffer.combine(y_ND.contiguous(), handle)
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        grad_ND, *_ = ctx.buffer.dispatch(grad_TD.contiguous(), handle=ctx.handle)
        return None, None, grad_ND
