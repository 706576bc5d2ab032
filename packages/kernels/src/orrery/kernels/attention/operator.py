"""`orrery::varlen_attention_forward` and `…_backward`: attention as one operator each, which compilers see from outside only.

- `torch.compile(fullgraph=True)` traces through; the lengths are symbolic, so that a new packing is no new compilation.
- The forward's outputs are what its backward needs, so that nothing recomputes attention, unless a checkpoint policy that names
  `torch.ops.orrery.varlen_attention_forward.default` says so.
- Which form runs is chosen inside, at run time (`forms`).
"""

import torch
from torch import Tensor

from orrery.kernels.attention import forms
from orrery.kernels.attention.layout import Layout, lse_dtype


@torch.library.custom_op("orrery::varlen_attention_forward", mutates_args=())
def varlen_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out [T, H, D] and lse [H, T] of q [T, H, D], k and v [S, G, D]: see `Layout`."""
    out, lse = forms.forward(
        q, k, v, Layout(cu_seqlens_q, cu_seqlens_k, max_q, max_k, causal, scale)
    )
    return out, lse


@varlen_attention_forward.register_fake
def _(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, causal, scale):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype(q))


@torch.library.custom_op("orrery::varlen_attention_backward", mutates_args=())
def varlen_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = forms.backward(
        dout, q, k, v, out, lse, Layout(cu_seqlens_q, cu_seqlens_k, max_q, max_k, causal, scale)
    )
    return dq, dk, dv


@varlen_attention_backward.register_fake
def _(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_q, max_k, causal, scale):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens_q, cu_seqlens_k, *ctx.options = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)


def _backward(ctx, dout, _):  # type: ignore[no-untyped-def]
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    if dout is None:
        return (None,) * 9
    gradients = torch.ops.orrery.varlen_attention_backward(
        dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *ctx.options
    )
    return *gradients, *(None,) * 6


varlen_attention_forward.register_autograd(_backward, setup_context=_keep)
