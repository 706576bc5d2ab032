"""Causal attention of short documents on a GPU in float32: padded batches in matrix products.

No fused backend supports float32. Formulas as in `plain`, batches as in `padded`. Exact in float32
(float64 for float64).
"""

import torch
from torch import Tensor

from orrery.kernels.attention.layout import Layout, lse_dtype
from orrery.kernels.attention.padded import Grids

_MAX_LENGTH = 1024  # scores are quadratic in the length
_MAX_SCORES = 1 << 26  # at a time: three tensors of 256 MiB in float32


def supports(q: Tensor, k: Tensor, layout: Layout) -> bool:
    is_causal = layout.causal and layout.is_self_attention
    return q.is_cuda and lse_dtype(q) == q.dtype and is_causal and layout.max_q <= _MAX_LENGTH


def forward(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    grids = Grids.of(layout.cu_seqlens_q)
    outputs, lses = [], []
    for grid in range(len(grids.sources)):
        for q_NGRLD, k_NG1LD, v_NG1LD in _parts(grids, grid, q_THD, k_TGD, v_TGD):
            scores_NGRLS = _scores(q_NGRLD, k_NG1LD, layout.scale)
            lse_NGRL = scores_NGRLS.logsumexp(-1)
            outputs.append(_cells((scores_NGRLS - lse_NGRL[..., None]).exp() @ v_NG1LD))
            lses.append(_cells(lse_NGRL[..., None]).squeeze(-1))
    return grids.packed(outputs).contiguous(), grids.packed(lses).t().contiguous()


def backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    layout: Layout,
) -> tuple[Tensor, Tensor, Tensor]:
    grids = Grids.of(layout.cu_seqlens_q)
    gradients: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    spread = grids.spread(dout_THD)  # zeros in padding
    for grid in range(len(grids.sources)):
        others = _parts(grids, grid, q_THD, k_TGD, v_TGD, out_THD, lse_HT.t()[..., None])
        douts = _grouped(spread[grid], k_TGD.shape[1]).split(_rows(grids, grid, q_THD))
        for dout_NGRLD, (q_NGRLD, k_NG1LD, v_NG1LD, out_NGRLD, lse_NGRL1) in zip(
            douts, others, strict=True
        ):
            weights_NGRLS = (_scores(q_NGRLD, k_NG1LD, layout.scale) - lse_NGRL1).exp()
            mean_NGRL1 = (dout_NGRLD * out_NGRLD).sum(-1, keepdim=True)
            dweights_NGRLS = dout_NGRLD @ v_NG1LD.mT - mean_NGRL1
            dscores_NGRLS = weights_NGRLS * dweights_NGRLS * layout.scale
            gradients[0].append(_cells(dscores_NGRLS @ k_NG1LD))
            gradients[1].append(_cells((dscores_NGRLS.mT @ q_NGRLD).sum(2, keepdim=True)))
            gradients[2].append(_cells((weights_NGRLS.mT @ dout_NGRLD).sum(2, keepdim=True)))
    dq_THD, dk_TGD, dv_TGD = (grids.packed(x) for x in gradients)
    return dq_THD, dk_TGD, dv_TGD


def _rows(grids: Grids, grid: int, q_THD: Tensor) -> int:
    return max(1, _MAX_SCORES // (q_THD.shape[1] * grids.sources[grid].shape[1] ** 2))


def _parts(
    grids: Grids, grid: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *like_q: Tensor
) -> list[tuple[Tensor, ...]]:
    """Split a grid's tensors into batches of [N, G, R, L, D], with R query heads a key head."""
    groups = k_TGD.shape[1]
    wholes = [_grouped(grids.gather(x, grid), groups) for x in (q_THD, k_TGD, v_TGD, *like_q)]
    return list(zip(*(whole.split(_rows(grids, grid, q_THD)) for whole in wholes), strict=True))


def _grouped(x_NLHD: Tensor, groups: int) -> Tensor:
    return x_NLHD.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)


def _cells(x_NGRLD: Tensor) -> Tensor:
    """Return [N · L, G · R, D]."""
    return x_NGRLD.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)


def _scores(q_NGRLD: Tensor, k_NG1LD: Tensor, scale: float) -> Tensor:
    length = q_NGRLD.shape[-2]
    future_LL = torch.ones(length, length, dtype=torch.bool, device=q_NGRLD.device).triu(1)
    return (q_NGRLD @ k_NG1LD.mT * scale).masked_fill(future_LL, -torch.inf)
