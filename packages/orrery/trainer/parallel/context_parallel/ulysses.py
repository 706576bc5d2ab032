"""Ulysses (Jacobs et al. 2023, arXiv 2309.14509): each rank attends with 1/cp of the heads.

t tokens here · T = cp·t tokens of the group · H query heads · G key and value heads · K head size

Ranks that share a key head have copies of it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from orrery.kernels.attention import Documents, varlen_attention


class UlyssesCore(nn.Module):
    """Attention over `group`. `documents` cover all T tokens."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.watch: Callable[[Tensor], object] = lambda out: None

    @torch.compiler.disable
    def forward(self, q_tHK: Tensor, k_tGK: Tensor, v_tGK: Tensor, documents: Documents) -> Tensor:
        if (repeats := self.group.size() // k_tGK.shape[1]) > 1:
            k_tGK, v_tGK = (x.repeat_interleave(repeats, dim=1) for x in (k_tGK, v_tGK))
        q_ThK, k_TgK, v_TgK = _ToHeads.apply(self.group, q_tHK, k_tGK, v_tGK)
        out_ThK = varlen_attention(q_ThK, k_TgK, v_TgK, documents)
        out_tHK = _ToTokens.apply(self.group, out_ThK)[0]
        self.watch(out_tHK)
        return out_tHK


def _to_heads(group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Exchange this rank's tokens [t, H, K] for its heads [T, H/cp, K]."""
    leaving = [x.unflatten(1, (group.size(), -1)).transpose(0, 1).contiguous() for x in tensors]
    return tuple(x.flatten(0, 1) for x in _all_to_all(group, leaving))


def _to_tokens(group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    leaving = [x.contiguous().unflatten(0, (group.size(), -1)) for x in tensors]
    return tuple(x.transpose(0, 1).flatten(1, 2) for x in _all_to_all(group, leaving))


def _all_to_all(group: dist.ProcessGroup, leaving: list[Tensor]) -> list[Tensor]:
    arriving = [torch.empty_like(x) for x in leaving]
    works = [
        dist.all_to_all_single(into, x, group=group, async_op=True)
        for into, x in zip(arriving, leaving, strict=True)
    ]
    for work in works:
        work.wait()
    return arriving


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return _to_heads(group, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, *_to_tokens(ctx.group, gradients)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return _to_tokens(group, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, *_to_heads(ctx.group, gradients)
