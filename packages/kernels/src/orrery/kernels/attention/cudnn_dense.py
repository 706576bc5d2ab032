"""cuDNN's attention on a batch of equally long documents (one document is the common case), through torch's own operator.

Grouped heads go in as they are. Torch builds a plan the first time that a shape (documents, length, heads, head size) is seen, which
costs some 100 ms, and keeps it for the life of the thread. So this form takes lengths that somebody chose, multiples of 256, which come
again in every step; a length that comes of a document's own text is left to the other forms.
"""

import torch
from torch import Tensor

from orrery.kernels.attention.layout import Layout
from orrery.kernels.attention.signatures import takes

_SIGNATURES = {
    "_scaled_dot_product_cudnn_attention": "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale",
    "_scaled_dot_product_cudnn_attention_backward": "grad_out query key value out logsumexp philox_seed philox_offset attn_bias "
    "cum_seq_q cum_seq_k max_q max_k dropout_p is_causal scale",
}

_STEP = 256


def runs_on(q: Tensor) -> bool:
    """Devices and dtypes for which cuDNN's kernels are the fast ones, with head sizes that its backward pass takes.

    Its gradients differ in their last bits from run to run; where torch is asked for the same bits, FlashAttention gives them.
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
    # cuDNN lines up a causal mask's beginnings, this room its ends: the same thing only where queries and keys are as many.
    square = not layout.causal or q.shape[0] == k.shape[0]
    again = q.shape[0] % (_STEP * max(layout.num_documents, 1)) == 0
    return (
        runs_on(q)
        and square
        and again
        and layout.dense(q.shape[0], k.shape[0])
        and takes(_SIGNATURES)
    )


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
    lse_NHL1 = (
        lse_HT.unflatten(1, (layout.num_documents, -1)).transpose(0, 1).contiguous()[..., None]
    )
    random_state = torch.zeros(
        (), dtype=torch.int64, device=q_THD.device
    )  # of dropout, which there is none of
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout_NHLD,
        q_NHLD,
        k_NGMD,
        v_NGMD,
        out_NHLD,
        lse_NHL1,
        random_state,
        random_state,
        None,
        None,
        None,
        q_NHLD.shape[2],
        k_NGMD.shape[2],
        0.0,
        layout.causal,
        scale=layout.scale,
    )
    dq_THD, dk_SGD, dv_SGD = (_packed(x) for x in gradients)
    return dq_THD, dk_SGD, dv_SGD


def _batch(x_THD: Tensor, num_documents: int) -> Tensor:
    return x_THD.unflatten(0, (num_documents, -1)).transpose(1, 2)


def _packed(x_NHLD: Tensor) -> Tensor:
    return x_NHLD.transpose(1, 2).flatten(0, 1)
