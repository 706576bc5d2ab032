"""Rows that change ranks: an all-to-all of unequal shares, whose gradient is the same journey back.

M rows here before · N rows here after
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def exchange_rows(
    tensors: Sequence[Tensor], sent: list[int], arriving: list[int], group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Of each tensor [M, …], the first `sent[0]` rows to rank 0 of `group` and so on: [N, …], `arriving[r]` rows of each rank r in order.

    All tensors travel at the same time. A rank may send or get nothing.
    """
    return _ExchangeRows.apply(sent, arriving, group, *tensors)


def _travel(
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
        return _travel(tensors, sent, arriving, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, None, *_travel(gradients, ctx.arriving, ctx.sent, ctx.group)
