"""The exchange by DeepEP (https://github.com/deepseek-ai/DeepEP): bfloat16, over NVLink and RDMA.

T tokens here · K experts a token · N tokens from all ranks with an expert here
M rows of this rank's experts · E experts · D hidden

A token travels once to each rank with experts for it. `dispatch` and `combine` are each other's
gradient.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from orrery.kernels.expert_rows import (
    RowOrder,
    combine_rows,
    gather_rows,
    order_slots,
    sort_by_expert,
)
from orrery.manifest.errors import OrreryError


class DeepEpExchange(nn.Module):
    """Raise OrreryError if deep_ep is not installed."""

    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        super().__init__()
        if find_spec("deep_ep") is None:
            raise OrreryError(
                "trainer.mesh.ep_backend 'deepep': the package deep_ep is not installed here; "
                "install it or set trainer.mesh.ep_backend to 'torch'"
            )
        self.group, self.num_experts = group, num_experts

    @torch.compiler.disable
    def forward(
        self, x_TD: Tensor, score_TK: Tensor, expert_TK: Tensor, experts: nn.Module
    ) -> Tensor:
        buffer = _buffer(self.group, x_TD.shape[1] * x_TD.element_size())
        x_ND, score_NK, expert_NK, num_rows, handle = _DeepEpDispatch.apply(
            x_TD, score_TK.float(), expert_TK, buffer, self.num_experts
        )
        num_local = self.num_experts // self.group.size()
        rows = _rows(expert_NK, num_local, num_rows)
        real_M = torch.arange(len(rows.row_M), device=x_TD.device) < num_rows
        # Kernels skip rows without an expert, so these rows are zeroed.
        x_MD = torch.where(real_M[:, None], gather_rows(x_ND, rows), 0)
        score_M = torch.where(real_M, order_slots(score_NK, rows), 0)
        y_MD = torch.where(real_M[:, None], experts(x_MD, score_M, rows.ends_E), 0)
        return _DeepEpCombine.apply(combine_rows(y_MD, rows), buffer, handle)


def _rows(expert_NK: Tensor, num_local: int, num_rows: int) -> RowOrder:
    """Sort rows by expert, then one row for all slots with an expert on another rank (−1)."""
    rows = sort_by_expert(torch.where(expert_NK < 0, num_local, expert_NK), num_local)
    return RowOrder(rows.row_M[: num_rows + 1], rows.place_TK.clamp(max=num_rows), rows.ends_E)


@cache
def _buffer(group: dist.ProcessGroup, row_bytes: int) -> Any:
    """Return the group's buffer for all layers. A collective."""
    from deep_ep import Buffer

    size = group.size()
    configs = Buffer.get_dispatch_config(size), Buffer.get_combine_config(size)
    nvlink_bytes = max(config.get_nvl_buffer_size_hint(row_bytes, size) for config in configs)
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
        return x_ND, score_NK, expert_NK, sum(rows_of_expert), handle

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
