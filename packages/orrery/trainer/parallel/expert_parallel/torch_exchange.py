"""The exchange by torch.distributed: rows go to their experts' ranks in expert order, and back.

T tokens here · K experts a token · M = T·K rows here · N rows of this rank's experts, from all
ranks · R ranks · E experts · D hidden

Counts travel first, because torch's all-to-all needs lengths on the host. Backward pass and
recomputation reuse them. Stable sorts make results deterministic.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from orrery.kernels.expert_rows import combine_rows, gather_rows, order_slots, sort_by_expert
from orrery.trainer.parallel import recomputation


class TorchExchange(nn.Module):
    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        super().__init__()
        self.group, self.num_experts = group, num_experts

    @torch.compiler.disable
    def forward(
        self, x_TD: Tensor, score_TK: Tensor, expert_TK: Tensor, experts: nn.Module
    ) -> Tensor:
        rows = sort_by_expert(expert_TK, self.num_experts)
        known = recomputation.recall()
        requested = self._request_lengths(rows.ends_E) if known is None else None
        x_MD, score_M = gather_rows(x_TD, rows), order_slots(score_TK, rows)
        if requested is not None:
            known = recomputation.keep((requested[0], requested[1].wait()))
        arriving_RE, (sent, arriving) = known
        x_ND, score_N = exchange_rows((x_MD, score_M), sent, arriving, self.group)

        local_E = torch.arange(arriving_RE.shape[1], device=x_TD.device).expand_as(arriving_RE)
        expert_N = local_E.flatten().repeat_interleave(
            arriving_RE.flatten(), output_size=sum(arriving)
        )
        here = sort_by_expert(expert_N[:, None], arriving_RE.shape[1])
        y_ND = experts(gather_rows(x_ND, here), order_slots(score_N[:, None], here), here.ends_E)
        (y_MD,) = exchange_rows((combine_rows(y_ND, here),), arriving, sent, self.group)
        return combine_rows(y_MD, rows)

    def _request_lengths(self, ends_E: Tensor) -> tuple[Tensor, "HostLengths"]:
        """Return the arriving rows by (source rank, local expert), and lengths for the host."""
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1)).long()
        arriving_E = torch.empty_like(counts_E)
        dist.all_to_all_single(arriving_E, counts_E, group=self.group)
        counts_RE = counts_E.view(self.group.size(), -1)
        arriving_RE = arriving_E.view(self.group.size(), -1)
        return arriving_RE, HostLengths(torch.stack((counts_RE.sum(1), arriving_RE.sum(1))))


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

    def wait(self) -> list[list[int]]:
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()


def exchange_rows(
    tensors: Sequence[Tensor], sent: list[int], arriving: list[int], group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Exchange rows of tensors [M, …]: the first `sent[0]` go to rank 0 of `group`, and so on.

    Return tensors [N, …] with `arriving[r]` rows of each rank r, in rank order.
    """
    return _ExchangeRows.apply(sent, arriving, group, *tensors)


def _all_to_all(
    tensors: Sequence[Tensor], sent: list[int], arriving: list[int], group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    results = [tensor.new_empty(sum(arriving), *tensor.shape[1:]) for tensor in tensors]
    works = [
        dist.all_to_all_single(
            result, tensor.contiguous(), arriving, sent, group=group, async_op=True
        )
        for result, tensor in zip(results, tensors, strict=True)
    ]
    for work in works:
        work.wait()
    return tuple(results)


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sent: list[int], arriving: list[int], group: dist.ProcessGroup, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.sent, ctx.arriving, ctx.group = sent, arriving, group
        return _all_to_all(tensors, sent, arriving, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, None, *_all_to_all(gradients, ctx.arriving, ctx.sent, ctx.group)
