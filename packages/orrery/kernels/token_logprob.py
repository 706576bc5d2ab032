"""Compute target tokens' log-probs, and entropies, from hidden states and the LM head.

    z_tv = (hidden_t · weight_v) / temperature_t        in float32
    logprob_t = z_t[target_t] − log Σ_v exp z_tv
    entropy_t = log Σ_v exp z_tv − Σ_v softmax(z_t)_v z_tv

A tile has at most `chunk_tokens` × vocabulary logits. The backward pass recomputes bitwise equal
tiles, unless `keep_logits` is set. Only hidden and weight get gradients. There are no host syncs.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from orrery.kernels import HAS_TRITON
from orrery.manifest import devices as budget

ChunkTokens = int | Literal["auto"]
Backend = Literal["plain", "triton"]

AUTO_CPU_TOKENS = 256


def token_logprob(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    target_T: Tensor,
    temperature_T: Tensor,
    chunk_tokens: ChunkTokens,
    *,
    keep_logits: bool = False,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probs of `target_T` and entropies, float32 [T] each (float64 for float64).

    hidden [T, D] and weight [V, D] have one floating dtype. target i64 [T] is in [0, V),
    temperature f32 [T] > 0. `keep_logits` keeps 4·T·V bytes of logits, and saves one of the three
    matrix products of the backward pass. Raise ValueError on other shapes or dtypes.
    """
    num_tokens = hidden_TD.shape[0]
    if chunk_tokens != "auto" and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; it must be at least 1, or 'auto'")
    if hidden_TD.dtype != weight_VD.dtype or hidden_TD.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"hidden {hidden_TD.dtype} {list(hidden_TD.shape)} and weight {weight_VD.dtype} "
            f"{list(weight_VD.shape)} must be [T, D] and [V, D] of one dtype"
        )
    if target_T.shape != (num_tokens,) or temperature_T.shape != (num_tokens,):
        raise ValueError(
            f"target {list(target_T.shape)} and temperature {list(temperature_T.shape)} "
            f"must be [{num_tokens}]"
        )
    if backend is None:
        fits = HAS_TRITON and hidden_TD.is_cuda and hidden_TD.dtype != torch.float64
        backend = "triton" if fits else "plain"
    if chunk_tokens == "auto":
        chunk_tokens = auto_chunk_tokens(hidden_TD.device, weight_VD.shape[0])
    tensors = (hidden_TD, weight_VD, target_T, temperature_T)
    return _ChunkedTokenLogprob.apply(*tensors, chunk_tokens, backend, keep_logits)


def reference_token_logprob(
    hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor, temperature_T: Tensor
) -> tuple[Tensor, Tensor]:
    dtype = _wide(hidden_TD)
    logits_TV = hidden_TD.to(dtype) @ weight_VD.to(dtype).T / temperature_T.to(dtype)[:, None]
    log_softmax_TV = torch.log_softmax(logits_TV, dim=-1)
    logprob_T = log_softmax_TV.gather(1, target_T[:, None]).squeeze(1)
    entropy_T = -(log_softmax_TV.exp() * log_softmax_TV).sum(dim=-1)
    return logprob_T, entropy_T


def auto_chunk_tokens(device: torch.device, vocab_size: int) -> int:
    """Return 256 on a CPU, or the tokens whose logits, at 6 bytes, fill 1/16 of GPU memory."""
    if device.type != "cuda":
        return AUTO_CPU_TOKENS
    device_bytes = torch.cuda.get_device_properties(device).total_memory
    return budget.auto_chunk_tokens(device_bytes, vocab_size)


def tiles(
    num_tokens: int, vocab_size: int, chunk_tokens: int, backend: Backend
) -> list[tuple[slice, slice]]:
    """Return each tile's (tokens, vocabulary) slices.

    Tiles of the plain backend span the vocabulary. Triton's tiles span all tokens.
    """
    if backend == "plain":
        starts = range(0, num_tokens, chunk_tokens)
        every_word = slice(0, vocab_size)
        return [(slice(i, min(i + chunk_tokens, num_tokens)), every_word) for i in starts]
    longest = chunk_tokens * vocab_size // max(1, num_tokens)
    return [(slice(0, num_tokens), words) for words in budget.blocks(vocab_size, longest)]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def wide_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in float32 (float64 for float64)."""
    out = _wide(a)
    if a.dtype == out:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=out)
    return a.to(out) @ b.to(out)


def _add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += wide_matmul(a, b)


def _write_matmul(out: Tensor, a: Tensor, b: Tensor) -> None:
    if a.is_cuda or a.dtype == _wide(a):
        torch.mm(a, b, out=out)
    else:
        out.copy_(wide_matmul(a, b))


class _ChunkedTokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        target_T: Tensor,
        temperature_T: Tensor,
        chunk_tokens: int,
        backend: Backend,
        keep_logits: bool,
    ) -> tuple[Tensor, Tensor]:
        update, _ = _passes(backend)
        ctx.logits = []
        ctx.tiles = tiles(hidden_TD.shape[0], weight_VD.shape[0], chunk_tokens, backend)
        state_4T = initial_state(hidden_TD.shape[0], _wide(hidden_TD), hidden_TD.device)
        for tokens, words in ctx.tiles:
            logits_CB = wide_matmul(hidden_TD[tokens], weight_VD[words].T)
            if keep_logits:  # the plain `update` overwrites the logits
                ctx.logits.append(logits_CB.clone() if backend == "plain" else logits_CB)
            rows = (target_T[tokens], temperature_T[tokens])
            update(state_4T[:, tokens], logits_CB, *rows, words.start)
            del logits_CB
        logprob_T, entropy_T, log_normalizer_T = finish_state(state_4T)
        inputs = (hidden_TD, weight_VD, target_T, temperature_T)
        ctx.save_for_backward(*inputs, log_normalizer_T, entropy_T)
        ctx.backend = backend
        return logprob_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob_T: Tensor, grad_entropy_T: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, *rows = ctx.saved_tensors
        rows += [grad_logprob_T, grad_entropy_T]
        _, gradient_pass = _passes(ctx.backend)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        dtype = _wide(hidden_TD)
        # Tiles of different tokens add to the same rows of the weight's gradient.
        is_summed = len({tokens.start for tokens, _ in ctx.tiles}) != 1
        multiply_weight = _add_matmul if is_summed else _write_matmul
        grad_hidden_TD = grad_weight_VD = None
        if wants_hidden:
            grad_hidden_TD = torch.zeros_like(hidden_TD, dtype=dtype)
        if wants_weight and is_summed:
            grad_weight_VD = torch.zeros_like(weight_VD, dtype=dtype)
        elif wants_weight:
            grad_weight_VD = torch.empty_like(weight_VD)
        for tokens, words in ctx.tiles:
            hidden_CD, weight_BD = hidden_TD[tokens], weight_VD[words]
            rows_C = (row[tokens] for row in rows)
            logits_CB = ctx.logits.pop(0) if ctx.logits else wide_matmul(hidden_CD, weight_BD.T)
            grad_logits_CB = gradient_pass(logits_CB, *rows_C, words.start, hidden_TD.dtype)
            del logits_CB
            if grad_hidden_TD is not None:
                _add_matmul(grad_hidden_TD[tokens], grad_logits_CB, weight_BD)
            if grad_weight_VD is not None:
                multiply_weight(grad_weight_VD[words], grad_logits_CB.T, hidden_CD)
            del grad_logits_CB
        if grad_hidden_TD is not None:
            grad_hidden_TD = grad_hidden_TD.to(hidden_TD.dtype)
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_TD, grad_weight_VD, None, None, None, None, None


def _passes(backend: Backend) -> tuple[Callable[..., None], Callable[..., Tensor]]:
    if backend == "plain":
        return update_state, gradient
    from orrery.kernels import token_logprob_triton

    return token_logprob_triton.update_state, token_logprob_triton.gradient


def initial_state(num_tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the initial state [4, T]: `update_state`'s m, s and w, and the target's z."""
    state_4T = torch.zeros(4, num_tokens, dtype=dtype, device=device)
    state_4T[0] = -1e38  # finite, because −∞ would give 0 · ∞ = NaN
    return state_4T


def update_state(
    state_4T: Tensor, logits_TB: Tensor, target_T: Tensor, temperature_T: Tensor, first_column: int
) -> None:
    """Add logits [T, B] of token ids from `first_column` on to the state. Overwrite the logits.

    Online softmax: m = max z, s = Σ exp d, w = Σ d exp d with d = z − m. When m rises by δ, w
    becomes exp(−δ)(w − δ s) and s becomes exp(−δ) s.
    """
    m_T, s_T, w_T, target_logit_T = state_4T
    z_TB = logits_TB.div_(temperature_T.to(logits_TB.dtype)[:, None])
    column_T, inside_T = _target_columns(target_T, first_column, z_TB.shape[1])
    target_logit_T.copy_(torch.where(inside_T, z_TB.gather(1, column_T).squeeze(1), target_logit_T))
    risen_T = torch.maximum(m_T, z_TB.amax(1))
    fall_T = m_T - risen_T
    d_TB = z_TB.sub_(risen_T[:, None])
    e_TB = d_TB.exp()
    w_T.copy_(fall_T.exp() * (w_T + fall_T * s_T) + torch.linalg.vecdot(d_TB, e_TB))
    s_T.copy_(fall_T.exp() * s_T + e_TB.sum(1))
    m_T.copy_(risen_T)


def finish_state(state_4T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the target's log-prob, the entropy (log s − w / s), and the normalizer (m + log s)."""
    m_T, s_T, w_T, target_logit_T = state_4T
    log_s_T = s_T.log()
    log_normalizer_T = m_T + log_s_T
    return target_logit_T - log_normalizer_T, log_s_T - w_T / s_T, log_normalizer_T


def gradient(
    logits_TB: Tensor,
    target_T: Tensor,
    temperature_T: Tensor,
    log_normalizer_T: Tensor,
    entropy_T: Tensor,
    grad_logprob_T: Tensor,
    grad_entropy_T: Tensor,
    first_column: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """Return the logits' gradient [T, B], rounded once to `out_dtype`. Overwrite the logits.

    With softmax p, entropy H, and gradients g of the log-prob and h of the entropy:
    (g_t (1[v = target_t] − p_tv) − h_t p_tv (log p_tv + H_t)) / temperature_t.
    """
    dtype = logits_TB.dtype
    g_T, h_T, temperature_T = (x.to(dtype) for x in (grad_logprob_T, grad_entropy_T, temperature_T))
    log_softmax_TB = logits_TB.div_(temperature_T[:, None]).sub_(log_normalizer_T[:, None])
    softmax_TB = log_softmax_TB.exp()
    grad_TB = log_softmax_TB.add_(entropy_T[:, None]).mul_(h_T[:, None]).add_(g_T[:, None])
    grad_TB = grad_TB.mul_(softmax_TB).neg_()
    column_T, inside_T = _target_columns(target_T, first_column, grad_TB.shape[1])
    grad_TB.scatter_add_(1, column_T, torch.where(inside_T, g_T, 0)[:, None])
    return grad_TB.div_(temperature_T[:, None]).to(out_dtype)


def _target_columns(target_T: Tensor, first_column: int, width: int) -> tuple[Tensor, Tensor]:
    column_T = target_T - first_column
    return column_T.clamp(0, width - 1)[:, None], (column_T >= 0) & (column_T < width)
