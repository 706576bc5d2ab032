"""Causal attention of many short documents on a CPU: documents of like lengths as one padded batch through torch's CPU kernel.

Padding stands behind each document, so the causal mask alone keeps it from every real query; its outputs are never read, and the
gradient that it is given is zero.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from orrery.kernels.attention.layout import Layout
from orrery.kernels.attention.signatures import takes

# A bucket takes documents down to this share of its longest one: padding stays below a third, buckets stay few.
_SHORTEST_SHARE = 0.75

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
_SIGNATURES = {
    _FORWARD: "query key value dropout_p is_causal attn_mask scale",
    _BACKWARD: "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale",
}


def supports(q: Tensor, k: Tensor, layout: Layout) -> bool:
    return q.device.type == "cpu" and layout.causal and layout.shared and takes(_SIGNATURES)


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
            kept.append(
                cells
                if x.shape[1] == cells.shape[1]
                else cells.unflatten(1, (x.shape[1], -1)).sum(2)
            )
    dq_THD, dk_TGD, dv_TGD = (grids.packed(x) for x in gradients)
    return dq_THD, dk_TGD, dv_TGD


def _batch(x: Tensor, grids: "Grids", grid: int, num_heads: int) -> Tensor:
    """[N, H, L, D] of one grid; a key head is repeated for its group, since the CPU kernel knows no groups."""
    x_NLHD = grids.gather(x, grid)
    if x.shape[1] != num_heads:
        x_NLHD = x_NLHD.repeat_interleave(num_heads // x.shape[1], dim=2)
    return x_NLHD.transpose(1, 2)


class Grids:
    """Documents of like lengths as the rows of padded grids, longest first; empty documents are in none.

    `sources[b]` i64 [N_b, L_b]: the packed token behind each cell; a padding cell repeats its document's last token.
    `place` i64 [T]: where a packed token stands among all cells, grid after grid; None where one grid without padding holds
    the tokens in their own order.
    """

    def __init__(self, sources: list[Tensor], place: Tensor | None) -> None:
        self.sources, self.place = sources, place

    @staticmethod
    def of(cu_seqlens: Tensor) -> "Grids":
        return _grids(tuple(cu_seqlens.tolist()), cu_seqlens.device)

    def gather(self, x: Tensor, grid: int) -> Tensor:
        """[N_b, L_b, …] of a packed [T, …]."""
        source_NL = self.sources[grid]
        return (x if self.place is None else x.index_select(0, source_NL.view(-1))).unflatten(
            0, source_NL.shape
        )

    def spread(self, x: Tensor) -> list[Tensor]:
        """Every grid's [N_b, L_b, …] of a packed [T, …], zeros in padding cells."""
        cells = x
        if self.place is not None:
            cells = x.new_zeros(
                sum(source.numel() for source in self.sources), *x.shape[1:]
            ).index_copy_(0, self.place, x)
        parts = cells.split([source.numel() for source in self.sources])
        return [
            part.unflatten(0, source.shape)
            for part, source in zip(parts, self.sources, strict=True)
        ]

    def packed(self, cells: list[Tensor]) -> Tensor:
        """The packed [T, …] of every grid's [N_b · L_b, …], in as many pieces as the caller likes."""
        whole = cells[0] if len(cells) == 1 else torch.cat(cells)
        return whole if self.place is None else whole.index_select(0, self.place)


@lru_cache(maxsize=32)
def _grids(cu_seqlens: tuple[int, ...], device: torch.device) -> Grids:
    """Worked out once for all layers of a forward and its backward: the offsets themselves are the key."""
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
    in_order = (
        num_cells == len(place)
        and bool((place == np.arange(num_cells)).all())
        and len(sources) <= 1
    )
    return Grids(
        [_there(source, device) for source in sources], None if in_order else _there(place, device)
    )


def _there(index: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(index).to(device)
