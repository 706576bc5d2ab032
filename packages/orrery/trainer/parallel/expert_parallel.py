"""Expert parallel: each ep rank holds 1/ep of every layer's experts, and receives their tokens.

Expert parameters are DTensors with Shard(0) on mesh axis `ep`. Their gradients cover all ep ranks'
tokens.

    T: this rank's tokens, K: experts per token, M ≤ T·K: rows that this rank sends, R: ranks,
    E: experts, D: hidden size, N: all ranks' tokens that use this rank's experts
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

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
from orrery.models.layers import Experts, MixtureOfExperts
from orrery.trainer.parallel import blocks
from orrery.trainer.parallel.world import World, all_to_all, exchange
from orrery.trainer.policy import Policy

NVLINK_RANKS = 8  # DeepEP's maximum number of ranks in a group without RDMA


def make_exchange(
    backend: str,
    group: dist.ProcessGroup,
    num_experts: int,
    num_sms: int | None = None,
    chunk_tokens: int | None = None,
) -> nn.Module:
    """Return the token exchange. Rank i of `group` holds the i-th part of the experts.

    Raise OrreryError if `backend` is unknown or not installed.
    """
    if backend not in KINDS:
        choices = ", ".join(KINDS)
        raise OrreryError(
            f"trainer.mesh.ep_backend: {backend!r} is no exchange; choose from {choices}"
        )
    if backend == "deepep":
        return DeepEpExchange(group, num_experts, num_sms, chunk_tokens)
    return KINDS[backend](group, num_experts)


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
            options = spec.deepep_num_sms, spec.deepep_token_chunk_size
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


class TorchExchange(nn.Module):
    """Send each token once to each rank that holds any of its experts. Sum the results."""

    eager = ("forward",)  # `blocks.py` does not compile it

    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        super().__init__()
        self.group, self.num_experts = group, num_experts

    def forward(
        self, x_TD: Tensor, score_TK: Tensor, expert_TK: Tensor, experts: Experts
    ) -> Tensor:
        num_ranks = self.group.size()
        num_local = self.num_experts // num_ranks
        rank_TK = expert_TK // num_local
        is_same_TKK = rank_TK[:, :, None] == rank_TK[:, None, :]
        is_first_TK = ~is_same_TKK.tril(-1).any(2)
        rows = sort_by_expert(torch.where(is_first_TK, rank_TK, num_ranks), num_ranks)
        if (known := blocks.recall()) is None:
            known = blocks.keep(self._lengths(rows.counts_E, expert_TK))
        sent, arriving, slots_of_expert = known
        num_sent = sum(sent)
        rows = rows._replace(
            row_M=rows.row_M[: num_sent + 1], place_TK=rows.place_TK.clamp(max=num_sent)
        )
        token_M = rows.row_M[:num_sent] // expert_TK.shape[1]
        to_M = rank_TK.flatten()[rows.row_M[:num_sent]]
        is_there_MK = rank_TK[token_M] == to_M[:, None]
        expert_MK = torch.where(is_there_MK, expert_TK[token_M] - num_local * to_M[:, None], -1)
        score_MK = torch.where(is_there_MK, gather_rows(score_TK, rows)[:num_sent], 0)

        to_experts = partial(all_to_all, group=self.group, sent=sent, arriving=arriving)
        to_tokens = partial(all_to_all, group=self.group, sent=arriving, arriving=sent)
        (expert_NK,) = to_experts([expert_MK])
        x_ND, score_NK = exchange(
            to_experts, to_tokens, gather_rows(x_TD, rows)[:num_sent], score_MK
        )
        here = _rows(expert_NK, num_local, slots_of_expert, experts.row_block)
        y_ND = experts(x_ND, score_NK, here, has_spare=True)
        (y_MD,) = exchange(to_tokens, to_experts, y_ND)
        # A token has one row per rank: the sum over its experts there. Other slots read zeros.
        if len(rows.row_M) > num_sent:
            y_MD = torch.cat((y_MD, y_MD.new_zeros(1, y_MD.shape[1])))
        return combine_rows(y_MD, rows)

    def _lengths(self, sent_R: Tensor, expert_TK: Tensor) -> list[list[int]]:
        slots_RE = torch.zeros(self.num_experts, dtype=torch.long, device=expert_TK.device)
        slots = expert_TK.flatten()
        slots_RE = slots_RE.scatter_add_(0, slots, torch.ones_like(slots))
        counts = torch.cat((sent_R.long()[:, None], slots_RE.view(len(sent_R), -1)), 1)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        numbers = torch.cat((sent_R.long(), arriving[:, 0], arriving[:, 1:].sum(0)))
        all_ = HostLengths(numbers).wait()
        size = len(sent_R)
        return [all_[:size], all_[size : 2 * size], all_[2 * size :]]


class HostLengths:
    def __init__(self, numbers: Tensor) -> None:
        self._event = None
        if numbers.is_cuda:
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers = host.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._numbers = numbers

    def wait(self) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()


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
        if (size := self.chunk_tokens) is None:
            return self._exchange(x_TD, score_TK, expert_TK, experts)
        # Exchanges are collectives, so all ranks run equally many chunks.
        if (count := blocks.recall()) is None:
            most = torch.tensor(len(x_TD), device=x_TD.device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
            count = blocks.keep(-(-int(most) // size))
        chunks = (slice(start, start + size) for start in range(0, count * size, size))
        each = [self._exchange(x_TD[at], score_TK[at], expert_TK[at], experts) for at in chunks]
        return torch.cat(each)

    def _exchange(
        self, x_TD: Tensor, score_TK: Tensor, expert_TK: Tensor, experts: Experts
    ) -> Tensor:
        buffer = _buffer(self.group, x_TD.shape[1] * x_TD.element_size(), self.num_sms)
        x_ND, score_NK, expert_NK, rows_of_expert, handle = _DeepEpDispatch.apply(
            x_TD, score_TK.float().contiguous(), expert_TK.contiguous(), buffer, self.num_experts
        )
        num_local = self.num_experts // self.group.size()
        rows = _rows(expert_NK, num_local, rows_of_expert, experts.row_block)
        y_ND = experts(x_ND, score_NK, rows, has_spare=True)
        return _DeepEpCombine.apply(y_ND, buffer, handle)


def _rows(expert_NK: Tensor, num_local: int, rows_of_expert: list[int], block: int) -> RowOrder:
    """Sort received tokens by local expert. Pad each expert's rows to a multiple of `block`.

    `expert_NK` is −1 for experts of other ranks.
    """
    rows = sort_by_expert(torch.where(expert_NK < 0, num_local, expert_NK), num_local, block)
    last = sum((count + block - 1) // block * block for count in rows_of_expert)
    place_TK = rows.place_TK.clamp(max=last)
    return rows._replace(row_M=rows.row_M[: last + block], place_TK=place_TK)


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
    def forward(ctx: Any, y_ND: Tensor, buffer: Any, handle: Any) -> Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        out_TD, _, _event = buffer.combine(y_ND.contiguous(), handle)
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        grad_ND, *_ = ctx.buffer.dispatch(grad_TD.contiguous(), handle=ctx.handle)
        return grad_ND, None, None


KINDS: dict[str, Callable[[dist.ProcessGroup, int], nn.Module]] = {
    "torch": TorchExchange,
    "deepep": DeepEpExchange,
}
