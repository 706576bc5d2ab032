"""Reference attention: one document at a time, all scores, softmax in float32 or float64."""

import itertools

import torch
from torch import Tensor


def varlen_attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, cu_seqlens: Tensor, max_seqlen: int | None = None
) -> Tensor:
    """Return `orrery.kernels.attention.varlen_attention`'s result, on any device and dtype."""
    dtype = torch.float64 if q_THD.dtype == torch.float64 else torch.float32
    heads_per_group = q_THD.shape[1] // k_TGD.shape[1]
    outputs = [q_THD[:0]]
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        q_HLD = q_THD[start:end].transpose(0, 1).to(dtype)
        k_HLD = k_TGD[start:end].repeat_interleave(heads_per_group, dim=1).transpose(0, 1).to(dtype)
        v_HLD = v_TGD[start:end].repeat_interleave(heads_per_group, dim=1).transpose(0, 1).to(dtype)
        scores_HLL = q_HLD @ k_HLD.transpose(1, 2) * q_THD.shape[-1] ** -0.5
        future_LL = torch.ones_like(scores_HLL[0], dtype=torch.bool).triu(1)
        weights_HLL = scores_HLL.masked_fill(future_LL, -torch.inf).softmax(dim=-1)
        outputs.append((weights_HLL @ v_HLD).transpose(0, 1).to(q_THD.dtype))
    return torch.cat(outputs)
