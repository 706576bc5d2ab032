"""How a packed tensor divides into documents, computed once a forward and shared by its layers."""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

# A bucket takes documents down to this share of its longest one: padding stays below a third, buckets stay few.
_SHORTEST_SHARE = 0.75


class Documents:
    """Packed documents: document i owns tokens `cu_seqlens[i]:cu_seqlens[i + 1]`.

    `cu_seqlens` i32 [n + 1], rising from 0; `max_seqlen` saves a device-to-host copy where the caller knows the longest document.
    """

    def __init__(self, cu_seqlens: Tensor, max_seqlen: int | None = None) -> None:
        self.cu_seqlens = cu_seqlens
        self._max_seqlen = max_seqlen

    @cached_property
    def max_seqlen(self) -> int:
        if self._max_seqlen is not None:
            return self._max_seqlen
        return int(self.cu_seqlens.diff().max()) if len(self.cu_seqlens) > 1 else 0

    @cached_property
    def grids(self) -> "Grids":
        return Grids.of(self.cu_seqlens)


class Grids:
    """Documents of like lengths as the rows of padded grids, longest first; empty documents are in none.

    `sources[b]` i64 [N_b, L_b]: the packed token behind each cell; a padding cell repeats its document's last token.
    `place` i64 [T]: where a packed token stands among all cells, grid after grid; None where one grid without padding holds
    the tokens in their own order.
    """

    def __init__(self, sources: list[Tensor], place: Tensor | None) -> None:
        self.sources, self.place = sources, place

    @classmethod
    def of(cls, cu_seqlens: Tensor) -> "Grids":
        offsets = cu_seqlens.cpu().numpy().astype(np.int64)
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
        device = cu_seqlens.device
        in_order = num_cells == len(place) and bool((place == np.arange(num_cells)).all()) and len(sources) <= 1
        return cls([torch.from_numpy(source).to(device) for source in sources], None if in_order else torch.from_numpy(place).to(device))
