"""Causal attention on a CPU: padded batches of documents in torch's CPU kernel.

Padding follows each document, so the causal mask hides it.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from orrery.kernels.attention.layout import Layout, has_signatures

# Shortest over longest document of a grid: padding stays below a third.
_SHORTEST_SHARE = 0.75

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
_SIGNATURES = {
    _FORWARD: "query key value dropout_p is_causal attn_mask scale",
    _BACKWARD: "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale",
}


def supports(q: Tensor, k: Tensor, layout: Layout) -> bool:
    is_causal = layout.causal and layout.is_self_attention
    return q.device.type == "cpu" and is_causal and has_signatures(_SIGNATURES)


def forward(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
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
    douts = grids.spread(dout_THD)
    gradients: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for grid, dout_NLHD in enumerate(douts):
        tensors = (_batch(x, grids, grid, q_THD.shape[1]) for x in (q_THD, k_TGD, v_TGD, out_THD))
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


def _batch(x: Tensor, grids: "Grids", grid: int, num_heads: int) -> Tensor:
    """Return one grid's [N, H, L, D]. Key heads are repeated, because the kernel has no groups."""
    x_NLHD = grids.gather(x, grid)
    if x.shape[1] != num_heads:
        x_NLHD = x_NLHD.repeat_interleave(num_heads // x.shape[1], dim=2)
    return x_NLHD.transpose(1, 2)


class Grids:
    """Documents of similar lengths as rows of padded grids, longest first, without empty documents.

    `sources[b]` i64 [N_b, L_b]: each cell's packed token. Padding repeats the document's last
    token. `place` i64 [T]: each token's cell over all grids, or None if one grid has them in order.
    """

    def __init__(self, sources: list[Tensor], place: Tensor | None) -> None:
        self.sources, self.place = sources, place

    @staticmethod
    def of(cu_seqlens: Tensor) -> "Grids":
        return _grids(tuple(cu_seqlens.tolist()), cu_seqlens.device)

    def gather(self, x: Tensor, grid: int) -> Tensor:
        """Return one grid's [N_b, L_b, …] of a packed [T, …]."""
        source_NL = self.sources[grid]
        cells = x if self.place is None else x.index_select(0, source_NL.view(-1))
        return cells.unflatten(0, source_NL.shape)

    def spread(self, x: Tensor) -> list[Tensor]:
        """Return every grid's [N_b, L_b, …] of a packed [T, …], with zeros in padding."""
        sizes = [source.numel() for source in self.sources]
        if self.place is not None:
            x = x.new_zeros(sum(sizes), *x.shape[1:]).index_copy_(0, self.place, x)
        pairs = zip(x.split(sizes), self.sources, strict=True)
        return [part.unflatten(0, source.shape) for part, source in pairs]

    def packed(self, cells: list[Tensor]) -> Tensor:
        """Return the packed [T, …] of all grids' cells, in any number of pieces."""
        whole = cells[0] if len(cells) == 1 else torch.cat(cells)
        return whole if self.place is None else whole.index_select(0, self.place)


@lru_cache(maxsize=32)
def _grids(cu_seqlens: tuple[int, ...], device: torch.device) -> Grids:
    """Cached, because layers and passes share one result."""
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
