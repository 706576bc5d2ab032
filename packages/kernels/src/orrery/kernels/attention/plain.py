"""Attention in plain matrix products, document by document and a block of queries at a time: any device, any dtype, any layout.

Exact in float32 (float64 for float64 inputs): what the other forms fall back to, and what a CPU runs where documents of queries and
keys differ. Formulas: FlashAttention (arXiv 2205.14135), appendix B; the backward pass is given the log-sum-exp over *all* keys of a
query, so that it may be handed a part of them (ring attention, arXiv 2310.01889).
"""

import torch
from torch import Tensor

from orrery.kernels.attention.layout import Layout, lse_dtype

_BLOCK_QUERIES = 512  # a block's scores are [H, 512, keys]


def supports(q: Tensor, k: Tensor, layout: Layout) -> bool:
    return True


def forward(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    out_THD = torch.zeros_like(q_THD, memory_format=torch.contiguous_format)
    lse_HT = torch.full(
        (q_THD.shape[1], q_THD.shape[0]), -torch.inf, dtype=lse_dtype(q_THD), device=q_THD.device
    )
    for q_slice, k_slice, ahead in _blocks(layout):
        v_HSD = _heads(v_SGD, k_slice, q_THD, lse_HT.dtype)
        scores_HTS, _, _ = _scores(q_THD, k_SGD, q_slice, k_slice, ahead, layout, lse_HT.dtype)
        lse_HT[:, q_slice] = scores_HTS.logsumexp(-1)
        out_THD[q_slice] = (
            (_weights(scores_HTS, lse_HT[:, q_slice]) @ v_HSD).transpose(0, 1).to(out_THD.dtype)
        )
    return out_THD, lse_HT


def backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    layout: Layout,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = lse_HT.dtype
    dq_THD, dk_SGD, dv_SGD = (
        torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q_THD, k_SGD, v_SGD)
    )
    for q_slice, k_slice, ahead in _blocks(layout):
        v_HSD = _heads(v_SGD, k_slice, q_THD, dtype)
        scores_HTS, q_HTD, k_HSD = _scores(q_THD, k_SGD, q_slice, k_slice, ahead, layout, dtype)
        weights_HTS = _weights(scores_HTS, lse_HT[:, q_slice])
        dout_HTD, out_HTD = (x[q_slice].transpose(0, 1).to(dtype) for x in (dout_THD, out_THD))
        mean_HT1 = (dout_HTD * out_HTD).sum(-1, keepdim=True)
        dscores_HTS = weights_HTS * (dout_HTD @ v_HSD.transpose(1, 2) - mean_HT1) * layout.scale
        dq_THD[q_slice] = (dscores_HTS @ k_HSD).transpose(0, 1)
        dk_SGD[k_slice] += _groups(dscores_HTS.transpose(1, 2) @ q_HTD, k_SGD)
        dv_SGD[k_slice] += _groups(weights_HTS.transpose(1, 2) @ dout_HTD, v_SGD)
    return dq_THD.to(q_THD.dtype), dk_SGD.to(k_SGD.dtype), dv_SGD.to(v_SGD.dtype)


def _blocks(layout: Layout) -> list[tuple[slice, slice, int]]:
    """(queries, the keys that any of them sees, the last key that the first query sees, from 0) of every block with work to do."""
    blocks = []
    for q_start, q_end, k_start, k_end in layout.spans():
        ahead = (k_end - k_start) - (q_end - q_start)
        for start in range(q_start, q_end, _BLOCK_QUERIES):
            end = min(start + _BLOCK_QUERIES, q_end)
            visible = min(k_end, k_start + end - q_start + ahead) if layout.causal else k_end
            if visible > k_start:
                blocks.append((slice(start, end), slice(k_start, visible), start - q_start + ahead))
    return blocks


def _heads(x_SGD: Tensor, part: slice, q_THD: Tensor, dtype: torch.dtype) -> Tensor:
    return (
        x_SGD[part]
        .repeat_interleave(q_THD.shape[1] // x_SGD.shape[1], dim=1)
        .transpose(0, 1)
        .to(dtype)
    )


def _groups(x_HSD: Tensor, like_SGD: Tensor) -> Tensor:
    """The sum over each group's query heads: [S, G, D]."""
    return x_HSD.unflatten(0, (like_SGD.shape[1], -1)).sum(1).transpose(0, 1)


def _scores(
    q_THD: Tensor,
    k_SGD: Tensor,
    q_slice: slice,
    k_slice: slice,
    ahead: int,
    layout: Layout,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    q_HTD, k_HSD = q_THD[q_slice].transpose(0, 1).to(dtype), _heads(k_SGD, k_slice, q_THD, dtype)
    scores_HTS = q_HTD @ k_HSD.transpose(1, 2) * layout.scale
    if layout.causal:
        hidden_TS = torch.ones(scores_HTS.shape[1:], dtype=torch.bool, device=q_THD.device).triu(
            ahead + 1
        )
        scores_HTS = scores_HTS.masked_fill(hidden_TS, -torch.inf)
    return scores_HTS, q_HTD, k_HSD


def _weights(scores_HTS: Tensor, lse_HT: Tensor) -> Tensor:
    """exp(score − lse); a query without any key has lse −∞ and weights 0, where the plain difference would be NaN."""
    return (scores_HTS - lse_HT.clamp_min(torch.finfo(lse_HT.dtype).min)[..., None]).exp()
