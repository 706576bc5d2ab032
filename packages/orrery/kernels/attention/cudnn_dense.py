"""cuDNN attention on equally long documents, commonly one, through torch's operator.

Torch builds a plan per shape in some 100 ms and keeps it for the thread's life. So only multiples
of 256 are supported: configured lengths recur in every step.
"""

import torch
from torch import Tensor

from orrery.kernels.attention.layout import Layout, has_signatures

_SIGNATURES = {
    "_scaled_dot_product_cudnn_attention": "query key value attn_bias compute_log_sumexp "
    "dropout_p is_causal return_debug_mask scale",
    "_scaled_dot_product_cudnn_attention_backward": "grad_out query key value out logsumexp "
    "philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q max_k dropout_p is_causal scale",
}

_LENGTH_MULTIPLE = 256


def runs_on(q: Tensor) -> bool:
    """Return whether cuDNN is fast on this device and dtype, and its backward has the head size.

    Its gradients vary in their last bits, so deterministic runs use FlashAttention.
    """
    return (
        q.is_cuda
        and not torch.are_deterministic_algorithms_enabled()
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] <= 128
        and q.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(q.device) >= (9, 0)
        and torch.backends.cudnn.is_available()
    )


def supports(q: Tensor, k: Tensor, layout: Layout) -> bool:
    num_q, num_k = q.shape[0], k.shape[0]
    # cuDNN aligns the starts of a causal mask, `Layout` its ends: they agree for equal lengths.
    agrees = not layout.causal or num_q == num_k
    recurs = num_q % (_LENGTH_MULTIPLE * max(layout.num_documents, 1)) == 0
    fits = agrees and recurs and layout.is_dense(num_q, num_k)
    return runs_on(q) and fits and has_signatures(_SIGNATURES)


def forward(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    q_NHLD, k_NGMD, v_NGMD = (_batch(x, layout.num_documents) for x in (q_THD, k_SGD, v_SGD))
    out_NHLD, lse_NHL1, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q_NHLD, k_NGMD, v_NGMD, None, True, 0.0, layout.causal, False, scale=layout.scale
    )
    lse_NHL = lse_NHL1.reshape(out_NHLD.shape[:3])
    return _packed(out_NHLD), lse_NHL.transpose(0, 1).reshape(q_THD.shape[1], q_THD.shape[0])


def backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    layout: Layout,
) -> tuple[Tensor, Tensor, Tensor]:
    dout_NHLD, q_NHLD, k_NGMD, v_NGMD, out_NHLD = (
        _batch(x, layout.num_documents) for x in (dout_THD, q_THD, k_SGD, v_SGD, out_THD)
    )
    lse_NHL = lse_HT.unflatten(1, (layout.num_documents, -1)).transpose(0, 1).contiguous()
    tensors = (dout_NHLD, q_NHLD, k_NGMD, v_NGMD, out_NHLD, lse_NHL[..., None])
    rng_state = torch.zeros((), dtype=torch.int64, device=q_THD.device)  # for dropout only
    lengths = (q_NHLD.shape[2], k_NGMD.shape[2])
    options = (rng_state, rng_state, None, None, None, *lengths, 0.0, layout.causal)
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *tensors, *options, scale=layout.scale
    )
    dq_THD, dk_SGD, dv_SGD = (_packed(x) for x in gradients)
    return dq_THD, dk_SGD, dv_SGD


def _batch(x_THD: Tensor, num_documents: int) -> Tensor:
    return x_THD.unflatten(0, (num_documents, -1)).transpose(1, 2)


def _packed(x_NHLD: Tensor) -> Tensor:
    return x_NHLD.transpose(1, 2).flatten(0, 1)
