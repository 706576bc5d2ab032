"""Compute attention on any device, by document or in padded batches.

`Plain` and `Batched` compute in float32 (float64 for float64). Formulas: FlashAttention (arXiv
2205.14135), appendix B. Padding follows each document, so the causal mask hides it.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from orrery.kernels.attention.layout import (
    AttentionBackend,
    Gradients,
    Layout,
    Output,
    Saved,
    has_signatures,
    lse_dtype,
)

_BLOCK_QUERIES = 512
_SHORTEST_SHARE = 0.75  # minimum ratio of a batch's shortest to longest document
_MAX_LENGTH = 1024  # longest document in `Batched`
_MAX_SCORES = 1 << 26  # scores per step, 256 MiB in each of three float32 tensors

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
_SIGNATURES = {
    _FORWARD: "query key value dropout_p is_causal attn_mask scale",
    _BACKWARD: "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale",
}


class Plain(AttentionBackend):
    def supports(self, q: Tensor, k: Tensor, layout: Layout) -> bool:
        return True

    def forward(self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, layout: Layout) -> Output:
        out_THD = torch.zeros_like(q_THD, memory_format=torch.contiguous_format)
        lse_HT = q_THD.new_full(q_THD.shape[1::-1], -torch.inf, dtype=lse_dtype(q_THD))
        for q_slice, k_slice, ahead in _blocks(layout):
            v_HSD = _heads(v_SGD, k_slice, q_THD, lse_HT.dtype)
            scores_HTS, _, _ = _scores(q_THD, k_SGD, q_slice, k_slice, ahead, layout, lse_HT.dtype)
            lse_HT[:, q_slice] = scores_HTS.logsumexp(-1)
            out_HTD = _weights(scores_HTS, lse_HT[:, q_slice]) @ v_HSD
            out_THD[q_slice] = out_HTD.transpose(0, 1).to(out_THD.dtype)
        return out_THD, lse_HT

    def backward(self, dout_THD: Tensor, saved: Saved, layout: Layout) -> Gradients:
        q_THD, k_SGD, v_SGD, out_THD, lse_HT = saved
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
    """Return exp(score − lse). The clamp avoids NaN for queries without keys."""
    return (scores_HTS - lse_HT.clamp_min(torch.finfo(lse_HT.dtype).min)[..., None]).exp()


class Grids:
    """Padded batches ("grids") of documents of similar length, one document per row.

    `sources[b]` i64 [N_b, L_b]: the token index of each cell of grid b. Padding cells repeat their
    row's last token. `place` i64 [T]: each token's cell index in the flattened grids, or None if
    the cells are the tokens in order.
    """

    def __init__(self, sources: list[Tensor], place: Tensor | None) -> None:
        self.sources, self.place = sources, place

    @staticmethod
    def of(cu_seqlens: Tensor) -> "Grids":
        return _grids(tuple(cu_seqlens.tolist()), cu_seqlens.device)

    def gather(self, x: Tensor, grid: int) -> Tensor:
        """Return grid b = `grid` of packed x [T, …] as [N_b, L_b, …]."""
        source_NL = self.sources[grid]
        cells = x if self.place is None else x.index_select(0, source_NL.view(-1))
        return cells.unflatten(0, source_NL.shape)

    def spread(self, x: Tensor) -> list[Tensor]:
        """Return packed x [T, …] as one zero-padded tensor [N_b, L_b, …] per grid."""
        sizes = [source.numel() for source in self.sources]
        if self.place is not None:
            x = x.new_zeros(sum(sizes), *x.shape[1:]).index_copy_(0, self.place, x)
        pairs = zip(x.split(sizes), self.sources, strict=True)
        return [part.unflatten(0, source.shape) for part, source in pairs]

    def packed(self, cells: list[Tensor]) -> Tensor:
        whole = cells[0] if len(cells) == 1 else torch.cat(cells)
        return whole if self.place is None else whole.index_select(0, self.place)


@lru_cache(maxsize=32)
def _grids(cu_seqlens: tuple[int, ...], device: torch.device) -> Grids:
    offsets = np.asarray(cu_seqlens, dtype=np.int64)
    starts, lengths = offsets[:-1], np.diff(offsets)
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    sources, place, num_cells = [], np.empty(offsets[-1], dtype=np.int64), 0
    while len(order):
        longest = lengths[order[0]]
        count = int(np.searchsorted(-lengths[order], -_SHORTEST_SHARE * longest, side="right"))
        rows, order = order[:count], order[count:]
        column = np.arange(longest)
        source = starts[rows, None] + np.minimum(column, lengths[rows, None] - 1)
        real = np.flatnonzero(column < lengths[rows, None])
        place[source.reshape(-1)[real]] = num_cells + real
        num_cells += source.size
        sources.append(source)
    is_unpadded = num_cells == len(place) and len(sources) <= 1
    in_order = is_unpadded and bool((place == np.arange(num_cells)).all())
    on_device = [torch.from_numpy(source).to(device) for source in sources]
    return Grids(on_device, None if in_order else torch.from_numpy(place).to(device))


class Padded(AttentionBackend):
    """Causal self-attention on a CPU with torch's FlashAttention."""

    def supports(self, q: Tensor, k: Tensor, layout: Layout) -> bool:
        is_causal = layout.causal and layout.is_self_attention
        return q.device.type == "cpu" and is_causal and has_signatures(_SIGNATURES)

    def forward(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, layout: Layout) -> Output:
        grids = Grids.of(layout.cu_seqlens_q)
        outputs, lses = [], []
        for grid in range(len(grids.sources)):
            q_NHLD, k_NHLD, v_NHLD = (
                _batch(x, grids, grid, q_THD.shape[1]) for x in (q_THD, k_TGD, v_TGD)
            )
            out_NHLD, lse_NHL = getattr(torch.ops.aten, _FORWARD)(
                q_NHLD, k_NHLD, v_NHLD, 0.0, True, scale=layout.scale
            )
            outputs.append(out_NHLD.transpose(1, 2).flatten(0, 1))
            lses.append(lse_NHL.transpose(1, 2).flatten(0, 1))
        return grids.packed(outputs).contiguous(), grids.packed(lses).t().contiguous()

    def backward(self, dout_THD: Tensor, saved: Saved, layout: Layout) -> Gradients:
        q_THD, k_TGD, v_TGD, out_THD, lse_HT = saved
        grids = Grids.of(layout.cu_seqlens_q)
        douts = grids.spread(dout_THD)
        gradients: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        for grid, dout_NLHD in enumerate(douts):
            tensors = (
                _batch(x, grids, grid, q_THD.shape[1]) for x in (q_THD, k_TGD, v_TGD, out_THD)
            )
            lse_NHL = grids.gather(lse_HT.t(), grid).transpose(1, 2)
            found = getattr(torch.ops.aten, _BACKWARD)(
                dout_NLHD.transpose(1, 2), *tensors, lse_NHL, 0.0, True, scale=layout.scale
            )
            for kept, gradient_NHLD, x in zip(gradients, found, (q_THD, k_TGD, v_TGD), strict=True):
                cells = gradient_NHLD.transpose(1, 2).flatten(0, 1)
                if x.shape[1] != cells.shape[1]:
                    cells = cells.unflatten(1, (x.shape[1], -1)).sum(2)
                kept.append(cells)
        dq_THD, dk_TGD, dv_TGD = (grids.packed(x) for x in gradients)
        return dq_THD, dk_TGD, dv_TGD


def _batch(x: Tensor, grids: Grids, grid: int, num_heads: int) -> Tensor:
    x_NLHD = grids.gather(x, grid)
    if x.shape[1] != num_heads:
        x_NLHD = x_NLHD.repeat_interleave(num_heads // x.shape[1], dim=2)
    return x_NLHD.transpose(1, 2)


class Batched(AttentionBackend):
    """Causal self-attention of short documents on a GPU."""

    def supports(self, q: Tensor, k: Tensor, layout: Layout) -> bool:
        is_causal = layout.causal and layout.is_self_attention
        return q.is_cuda and lse_dtype(q) == q.dtype and is_causal and layout.max_q <= _MAX_LENGTH

    def forward(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, layout: Layout) -> Output:
        grids = Grids.of(layout.cu_seqlens_q)
        outputs, lses = [], []
        for grid in range(len(grids.sources)):
            for q_NGRLD, k_NG1LD, v_NG1LD in _parts(grids, grid, q_THD, k_TGD, v_TGD):
                scores_NGRLS = _batched_scores(q_NGRLD, k_NG1LD, layout.scale)
                lse_NGRL = scores_NGRLS.logsumexp(-1)
                outputs.append(_cells((scores_NGRLS - lse_NGRL[..., None]).exp() @ v_NG1LD))
                lses.append(_cells(lse_NGRL[..., None]).squeeze(-1))
        return grids.packed(outputs).contiguous(), grids.packed(lses).t().contiguous()

    def backward(self, dout_THD: Tensor, saved: Saved, layout: Layout) -> Gradients:
        q_THD, k_TGD, v_TGD, out_THD, lse_HT = saved
        grids = Grids.of(layout.cu_seqlens_q)
        gradients: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        spread = grids.spread(dout_THD)
        for grid in range(len(grids.sources)):
            others = _parts(grids, grid, q_THD, k_TGD, v_TGD, out_THD, lse_HT.t()[..., None])
            douts = _grouped(spread[grid], k_TGD.shape[1]).split(_rows(grids, grid, q_THD))
            for dout_NGRLD, (q_NGRLD, k_NG1LD, v_NG1LD, out_NGRLD, lse_NGRL1) in zip(
                douts, others, strict=True
            ):
                weights_NGRLS = (_batched_scores(q_NGRLD, k_NG1LD, layout.scale) - lse_NGRL1).exp()
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
    groups = k_TGD.shape[1]
    wholes = [_grouped(grids.gather(x, grid), groups) for x in (q_THD, k_TGD, v_TGD, *like_q)]
    return list(zip(*(whole.split(_rows(grids, grid, q_THD)) for whole in wholes), strict=True))


def _grouped(x_NLHD: Tensor, groups: int) -> Tensor:
    return x_NLHD.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)


def _cells(x_NGRLD: Tensor) -> Tensor:
    return x_NGRLD.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)


def _batched_scores(q_NGRLD: Tensor, k_NG1LD: Tensor, scale: float) -> Tensor:
    length = q_NGRLD.shape[-2]
    future_LL = torch.ones(length, length, dtype=torch.bool, device=q_NGRLD.device).triu(1)
    return (q_NGRLD @ k_NG1LD.mT * scale).masked_fill(future_LL, -torch.inf)
