"""Torch's own FlashAttention 2: half precision on a GPU, any layout."""

import torch
from torch import Tensor

from orrery.kernels.attention.layout import Layout, has_signatures

_SIGNATURES = {
    "_flash_attention_forward": "query key value cum_seq_q cum_seq_k max_q max_k dropout_p "
    "is_causal return_debug_mask scale",
    "_flash_attention_backward": "grad_out query key value out logsumexp cum_seq_q cum_seq_k "
    "max_q max_k dropout_p is_causal rng_state unused scale",
}


def supports(q: Tensor, k: Tensor, layout: Layout) -> bool:
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] <= 256
        and q.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
        and has_signatures(_SIGNATURES)
    )


def forward(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    cu_q, cu_k, max_q, max_k, causal, scale = layout
    out_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
        q_THD, k_SGD, v_SGD, cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=scale
    )
    if not layout.is_self_attention:  # the kernel gives +∞, not −∞, without keys
        lse_HT = lse_HT.masked_fill(lse_HT == torch.inf, -torch.inf)
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
    cu_q, cu_k, max_q, max_k, causal, scale = layout
    rng_state = torch.zeros(2, dtype=torch.uint64, device=q_THD.device)  # for dropout only
    unused = torch.empty(0, device=q_THD.device)
    tensors = (dout_THD, q_THD, k_SGD, v_SGD, out_THD, lse_HT)
    options = (cu_q, cu_k, max_q, max_k, 0.0, causal, rng_state, unused)
    return torch.ops.aten._flash_attention_backward(*tensors, *options, scale=scale)
