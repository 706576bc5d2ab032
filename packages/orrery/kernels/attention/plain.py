"""Attention in plain matrix products, one document and one block of queries at a time.

- The fallback: any device, dtype and layout. Exact in float32 (float64 for float64).
- Formulas: FlashAttention (arXiv 2205.14135), appendix B.
- The backward pass takes the log-sum-exp over *all* keys, so it may run on a part of them (ring
  attention, arXiv 2310.01889).
"""

import torch
from torch import Tensor

from orrery.kernels.attention.layout import Layout, lse_dtype

_BLOCK_QUERIES = 512  # scores are [H, 512, keys]


def supports(q: Tensor, k: Tensor, layout: Layout) -> bool:
    return True


def forward(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    out_THD = torch.zeros_like(q_THD, memory_format=torch.contiguous_format)
    lse_HT = q_THD.new_full(q_THD.shape[1::-1], -torch.inf, dtype=lse_dtype(q_THD))
    for q_slice, k_slice, ahead in _blocks(layout):
        v_HSD = _heads(v_SGD, k_slice, q_THD, lse_HT.dtype)
        scores_HTS, _, _ = _scores(q_THD, k_SGD, q_slice, k_slice, ahead, layout, lse_HT.dtype)
        lse_HT[:, q_slice] = scores_HTS.logsumexp(-1)
        out_HTD = _weights(scores_HTS, lse_HT[:, q_slice]) @ v_HSD
        out_THD[q_slice] = out_HTD.transpose(0, 1).to(out_THD.dtype)
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
    dq_THD, dk_SGD, dv_SGD = (x.new_zeros(x.shape, dtype=dtype) for x in (q_THD, k_SGD, v_SGD))
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
    """Return (queries, keys that any of them sees, last key that the first query sees)."""
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
    heads_per_group = q_THD.shape[1] // x_SGD.shape[1]
    return x_SGD[part].repeat_interleave(heads_per_group, dim=1).transpose(0, 1).to(dtype)


def _groups(x_HSD: Tensor, like_SGD: Tensor) -> Tensor:
    """Sum over each group's query heads: [S, G, D]."""
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
        future_TS = torch.ones_like(scores_HTS[0], dtype=torch.bool).triu(ahead + 1)
        scores_HTS = scores_HTS.masked_fill(future_TS, -torch.inf)
    return scores_HTS, q_HTD, k_HSD


def _weights(scores_HTS: Tensor, lse_HT: Tensor) -> Tensor:
    """Return exp(score − lse). The clamp turns a NaN without keys (lse −∞) into 0."""
    return (scores_HTS - lse_HT.clamp_min(torch.finfo(lse_HT.dtype).min)[..., None]).exp()
