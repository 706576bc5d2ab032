"""Documents of like lengths as one padded batch through `scaled_dot_product_attention`.

Padding stands behind each document, so the causal mask alone keeps it from every real query, and its outputs are never read.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from orrery.kernels.attention.documents import Documents


def padded_attention(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, documents: Documents) -> Tensor:
    """Attention grid by grid; a pack whose documents are of one length is a reshape, without any gather."""
    if q_THD.shape[0] == 0:
        return q_THD + 0 * (k_TGD.sum() + v_TGD.sum())  # keeps the graph, so that gradients are zeros and not None
    grids = documents.grids
    outputs = []
    for source_NL in grids.sources:
        if grids.place is None:
            grid = (x.unflatten(0, source_NL.shape) for x in (q_THD, k_TGD, v_TGD))
        else:
            grid = (x.index_select(0, source_NL.view(-1)).unflatten(0, source_NL.shape) for x in (q_THD, k_TGD, v_TGD))
        q_NHLD, k_NGLD, v_NGLD = (x.transpose(1, 2) for x in grid)
        out_NHLD = F.scaled_dot_product_attention(q_NHLD, k_NGLD, v_NGLD, is_causal=True, enable_gqa=q_THD.shape[1] != k_TGD.shape[1])
        outputs.append(out_NHLD.transpose(1, 2).flatten(0, 1))
    return outputs[0] if grids.place is None else torch.cat(outputs).index_select(0, grids.place)
