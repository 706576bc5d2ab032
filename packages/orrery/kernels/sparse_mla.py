"""Compute sparse attention of latent queries to chosen latent keys (MLA in absorbed form).

T queries, H heads, S keys, K chosen keys per query, D key width, V value width

    p_thk = softmax over k of scale · (q_th · kv_j), j = indices_tk, without k where j = −1
    out_th = Σ_k p_thk kv_j[:V]                lse_th = log Σ_k exp(scale · (q_th · kv_j))

All heads share the keys. A key's first V columns are its value (DeepSeek-V2,
https://arxiv.org/abs/2405.04434, section 2.1).
"""

# mypy: disable-error-code="no-untyped-def"
from typing import Any, Literal

import torch
from torch import Tensor

from orrery.kernels import HAS_TRITON, flash_mla

Backend = Literal["flash_mla", "triton", "plain"]

CHUNK_ELEMENTS = 2**24  # elements of gathered keys per chunk: 64 MiB in float32
GPU_CHUNK_ELEMENTS = 2**27  # on a GPU, for fewer kernel launches: 512 MiB


def sparse_mla(
    q_THD: Tensor,
    kv_SD: Tensor,
    indices_TK: Tensor,
    scale: float,
    value_width: int,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out [T, H, V] in q's dtype, and lse [T, H] in float32 (float64 for float64).

    V is `value_width`. q and kv have one floating dtype. `indices` are i32 rows of kv, unique per
    query, or −1 for no key. Queries without keys get out 0 and lse −∞. Only out has gradients.
    Raise ValueError on other shapes or dtypes.
    """
    width = kv_SD.shape[-1]
    if q_THD.dtype != kv_SD.dtype or q_THD.shape[-1] != width or value_width > width:
        raise ValueError(
            f"q {q_THD.dtype} {list(q_THD.shape)}, kv {kv_SD.dtype} {list(kv_SD.shape)} "
            f"and value_width {value_width} must be [T, H, D], [S, D] of one dtype, and at most D"
        )
    if indices_TK.dtype != torch.int32 or indices_TK.shape[:1] != q_THD.shape[:1]:
        raise ValueError(
            f"indices {indices_TK.dtype} {list(indices_TK.shape)} "
            f"must be torch.int32 [{q_THD.shape[0]}, K]"
        )
    if backend is None:
        backend = fastest_backend(q_THD, value_width, indices_TK.shape[1])
    out_THV, lse_TH = torch.ops.orrery.sparse_mla(
        q_THD, kv_SD, indices_TK, scale, value_width, backend
    )
    return out_THV, lse_TH.detach()


def fastest_backend(q_THD: Tensor, value_width: int, num_chosen: int) -> Backend:
    is_half = q_THD.dtype in (torch.bfloat16, torch.float16)
    if not (HAS_TRITON and q_THD.is_cuda and is_half and _triton().supports(q_THD, value_width)):
        return "plain"
    return "flash_mla" if flash_mla.supports(q_THD, value_width, num_chosen) else "triton"


def reference_sparse_mla(
    q_THD: Tensor, kv_SD: Tensor, indices_TK: Tensor, scale: float, value_width: int
) -> tuple[Tensor, Tensor]:
    dtype = _wide(q_THD)
    kv_TKD = kv_SD.to(dtype)[indices_TK.clamp(min=0).long()]
    logit_THK = torch.einsum("thd,tkd->thk", q_THD.to(dtype), kv_TKD) * scale
    is_none_T1K = (indices_TK < 0)[:, None]
    lse_TH = logit_THK.masked_fill(is_none_T1K, -torch.inf).logsumexp(dim=-1)
    is_empty_TH1 = lse_TH.isinf()[..., None]
    p_THK = (logit_THK - lse_TH[..., None].masked_fill(is_empty_TH1, 0.0)).exp()
    p_THK = p_THK.masked_fill(is_none_T1K, 0.0)
    out_THV = torch.einsum("thk,tkv->thv", p_THK, kv_TKD[..., :value_width])
    return out_THV.to(q_THD.dtype), lse_TH


def _triton() -> Any:
    from orrery.kernels import sparse_mla_triton

    return sparse_mla_triton


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _chunks(indices_TK: Tensor, width: int) -> list[slice]:
    num_queries, num_chosen = indices_TK.shape
    most = GPU_CHUNK_ELEMENTS if indices_TK.is_cuda else CHUNK_ELEMENTS
    step = max(1, most // max(1, num_chosen * width))
    return [slice(start, start + step) for start in range(0, num_queries, step)]


@torch.library.custom_op("orrery::sparse_mla", mutates_args=())
def _forward(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, value_width: int, backend: str
) -> tuple[Tensor, Tensor]:
    if backend == "flash_mla":
        length = _triton().lengths(indices)
        out, lse = flash_mla.forward(q, kv, indices, scale, length)
        _triton().clear_empty(out, length)
        return out, lse
    if backend == "triton":
        tensors = (q.contiguous(), kv.contiguous(), indices.contiguous())
        return _triton().forward(*tensors, scale, value_width)
    out = q.new_empty(*q.shape[:2], value_width)
    lse = q.new_empty(q.shape[:2], dtype=_wide(q))
    for rows in _chunks(indices, kv.shape[1]):
        arguments = (q[rows], kv, indices[rows], scale, value_width)
        out[rows], lse[rows] = reference_sparse_mla(*arguments)
    return out, lse


@_forward.register_fake
def _(q, kv, indices, scale, value_width, backend):
    lse = q.new_empty(q.shape[:2], dtype=_wide(q))
    return q.new_empty(*q.shape[:2], value_width), lse


@torch.library.custom_op("orrery::sparse_mla_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of q and kv, summed in float32.

    The derivative by q_th · kv_j is scale · p_thk (grad_th · kv_j[:V] − grad_th · out_th).
    """
    if backend != "plain":
        tensors = (x.contiguous() for x in (grad, q, kv, indices, out, lse))
        return _triton().backward(*tensors, scale)
    dtype, value_width = _wide(q), grad.shape[-1]
    grad_q, grad_kv = torch.empty_like(q), torch.zeros_like(kv, dtype=dtype)
    for rows in _chunks(indices, kv.shape[1]):
        chosen = indices[rows].clamp(min=0).long()
        q_THD, kv_TKD, grad_THV = q[rows].to(dtype), kv.to(dtype)[chosen], grad[rows].to(dtype)
        logit_THK = torch.einsum("thd,tkd->thk", q_THD, kv_TKD) * scale
        p_THK = (logit_THK - lse[rows, :, None]).exp()
        p_THK = p_THK.masked_fill((indices[rows] < 0)[:, None], 0.0)
        delta_TH1 = (grad_THV * out[rows].to(dtype)).sum(dim=-1, keepdim=True)
        grad_p_THK = torch.einsum("thv,tkv->thk", grad_THV, kv_TKD[..., :value_width])
        grad_logit_THK = p_THK * (grad_p_THK - delta_TH1) * scale
        grad_q[rows] = torch.einsum("thk,tkd->thd", grad_logit_THK, kv_TKD).to(q.dtype)
        grad_TKD = torch.einsum("thk,thd->tkd", grad_logit_THK, q_THD)
        grad_TKD[..., :value_width] += torch.einsum("thk,thv->tkv", p_THK, grad_THV)
        _add_rows(grad_kv, indices[rows], grad_TKD)
    return grad_q, grad_kv.to(kv.dtype)


def _add_rows(total_SD: Tensor, row_TK: Tensor, value_TKD: Tensor) -> None:
    """Add `value_TKD[t, k]` to row `row_TK[t, k]` of `total_SD` in a fixed order. Skip row −1.

    On a GPU, only `index_put_` has a fixed order. It is slow if many values share a row.
    """
    known_TK = row_TK >= 0
    row_M, value_MD = row_TK[known_TK].long(), value_TKD[known_TK]
    if total_SD.is_cuda:
        total_SD.index_put_((row_M,), value_MD, accumulate=True)
    else:
        total_SD.index_add_(0, row_M, value_MD)


@_backward.register_fake
def _(grad, q, kv, indices, out, lse, scale, backend):
    return torch.empty_like(q), torch.empty_like(kv)


def _setup_context(ctx, inputs, output):
    q, kv, indices, ctx.scale, _, ctx.backend = inputs
    ctx.save_for_backward(q, kv, indices, *output)


def _gradients(ctx, grad_out, grad_lse):
    grads = torch.ops.orrery.sparse_mla_backward(
        grad_out.contiguous(), *ctx.saved_tensors, ctx.scale, ctx.backend
    )
    return *grads, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_setup_context)
