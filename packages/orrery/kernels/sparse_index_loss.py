"""Compute the KL loss that trains an indexer's scores to match attention weights.

T queries, S keys, H heads, D key width, J indexer heads, I indexer width, K chosen keys

    score_tk = Σ_j weights_tj · relu(q_tj · k_c), c = chosen_tk, in float32
    p_tk     = 1/H Σ_h softmax over k of scale · (q_th · kv_c)
    KL_t     = Σ_k p_tk (log p_tk − log softmax over k of score_tk)

q_tj and k_c belong to the indexer, q_th and kv_c to attention. c = −1 means no key.

Source: https://arxiv.org/abs/2512.02556, equation 4.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
from torch import Tensor

from orrery.kernels.sparse_mla import _add_rows, _chunks, _wide


def chosen_scores(q_TJI: Tensor, k_SI: Tensor, weights_TJ: Tensor, chosen_TK: Tensor) -> Tensor:
    """Return the indexer's scores of the chosen keys, f32 [T, K], 0 where `chosen_TK` is −1.

    q, k and weights get gradients. Raise ValueError on other shapes.
    """
    num_queries, num_heads, width = q_TJI.shape
    if k_SI.shape[1:] != (width,) or weights_TJ.shape != (num_queries, num_heads):
        raise ValueError(
            f"q {list(q_TJI.shape)}, k {list(k_SI.shape)} and weights {list(weights_TJ.shape)} "
            "must be [T, J, I], [S, I] and [T, J]"
        )
    return torch.ops.orrery.chosen_scores(q_TJI, k_SI, weights_TJ, chosen_TK)


@torch.no_grad()
def attention_of_chosen(q_THD: Tensor, kv_SD: Tensor, chosen_TK: Tensor, scale: float) -> Tensor:
    """Return attention weights p, f32 [T, K], 0 where `chosen_TK` is −1."""
    return torch.ops.orrery.attention_of_chosen(q_THD, kv_SD, chosen_TK, scale)


def index_kl(score_TK: Tensor, attention_TK: Tensor, chosen_TK: Tensor) -> Tensor:
    """Return KL_t, f32 [T], 0 for queries without keys. Only `score_TK` gets a gradient."""
    is_none_TK = chosen_TK < 0
    has_no_key_T1 = is_none_TK.all(dim=1, keepdim=True)
    score_TK = score_TK.masked_fill(is_none_TK & ~has_no_key_T1, -torch.inf)
    log_q_TK = score_TK.log_softmax(dim=1).masked_fill(is_none_TK, 0.0)
    p_TK = attention_TK.detach().masked_fill(is_none_TK, 0.0)
    return torch.xlogy(p_TK, p_TK).sum(dim=1) - (p_TK * log_q_TK).sum(dim=1)


@torch.library.custom_op("orrery::chosen_scores", mutates_args=())
def _scores(q: Tensor, k: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    scores = q.new_empty(chosen.shape, dtype=_wide(q))
    for rows in _chunks(chosen, q.shape[1] + q.shape[2]):
        product_TJK, _ = _products(q[rows], k, chosen[rows])
        weight_TJ = weights[rows].to(scores.dtype)
        score_TK = torch.einsum("tj,tjk->tk", weight_TJ, product_TJK.relu_())
        scores[rows] = score_TK.masked_fill_(chosen[rows] < 0, 0.0)
    return scores


def _products(q_TJI: Tensor, k_SI: Tensor, chosen_TK: Tensor) -> tuple[Tensor, Tensor]:
    dtype = _wide(q_TJI)
    k_TKI = k_SI[chosen_TK.clamp(min=0).long()].to(dtype)
    return torch.einsum("tji,tki->tjk", q_TJI.to(dtype), k_TKI), k_TKI


@_scores.register_fake
def _(q, k, weights, chosen):
    return q.new_empty(chosen.shape, dtype=_wide(q))


@torch.library.custom_op("orrery::chosen_scores_backward", mutates_args=())
def _scores_backward(
    grad: Tensor, q: Tensor, k: Tensor, weights: Tensor, chosen: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = _wide(q)
    grad_q, grad_weights = torch.empty_like(q), torch.empty_like(weights)
    grad_k = torch.zeros_like(k, dtype=dtype)
    for rows in _chunks(chosen, q.shape[1] + q.shape[2]):
        grad_TK = grad[rows].to(dtype).masked_fill(chosen[rows] < 0, 0.0)
        product_TJK, k_TKI = _products(q[rows], k, chosen[rows])
        grad_weights[rows] = torch.einsum("tk,tjk->tj", grad_TK, product_TJK.relu()).to(
            weights.dtype
        )
        weight_TJ1 = weights[rows].to(dtype)[..., None]
        grad_TJK = weight_TJ1 * grad_TK[:, None] * (product_TJK > 0)
        grad_q[rows] = torch.einsum("tjk,tki->tji", grad_TJK, k_TKI).to(q.dtype)
        grad_TKI = torch.einsum("tjk,tji->tki", grad_TJK, q[rows].to(dtype))
        _add_rows(grad_k, chosen[rows], grad_TKI)
    return grad_q, grad_k.to(k.dtype), grad_weights


@_scores_backward.register_fake
def _(grad, q, k, weights, chosen):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(weights)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _gradients(ctx, grad):
    grads = torch.ops.orrery.chosen_scores_backward(grad.contiguous(), *ctx.saved_tensors)
    return *grads, None


_scores.register_autograd(_gradients, setup_context=_setup_context)


@torch.library.custom_op("orrery::attention_of_chosen", mutates_args=())
def _attention(q: Tensor, kv: Tensor, chosen: Tensor, scale: float) -> Tensor:
    attention = q.new_zeros(chosen.shape, dtype=_wide(q))
    for rows in _chunks(chosen, q.shape[1] + kv.shape[1]):
        logit_THK = _products(q[rows], kv, chosen[rows])[0] * scale
        is_none_T1K = (chosen[rows] < 0)[:, None]
        p_THK = logit_THK.masked_fill_(is_none_T1K, -torch.inf).softmax(dim=-1)
        attention[rows] = p_THK.masked_fill_(is_none_T1K, 0.0).mean(dim=1)
    return attention


@_attention.register_fake
def _(q, kv, chosen, scale):
    return q.new_empty(chosen.shape, dtype=_wide(q))
