"""Chunked LM head: at most `chunk_tokens` × V logits exist at any time.

- The forward keeps hidden, weight, target, temperature and three numbers a token; the backward makes the logits of each chunk again.
- Logits are float32 whatever the inputs are: bfloat16 operands are multiplied as they are and accumulated in float32 on a GPU, and
  converted first on a CPU. Float64 inputs stay float64 (for the referee's tests).
- The weight's gradient is summed over chunks in float32 and rounded to the weight's dtype once.
- Gradients flow through log-prob and entropy to hidden and weight; target and temperature are constants. Not twice differentiable.

With g_t, h_t the gradients that arrive at logprob_t and entropy_t, p the softmax and H the entropy:
    ∂/∂z_tv = g_t (1[v = target_t] − p_tv) − h_t p_tv (log p_tv + H_t)
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def token_logprob(
    hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor, temperature_T: Tensor, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Log-prob of `target_T` under softmax(hidden · weightᵀ / temperature), and that distribution's entropy: float32 [T] each.

    hidden [T, D] and weight [V, D] of one floating dtype; target i64 [T] in [0, V); temperature f32 [T] > 0. T may be 0.
    """
    num_tokens = hidden_TD.shape[0]
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    if hidden_TD.dtype != weight_VD.dtype or hidden_TD.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"hidden {hidden_TD.dtype} {list(hidden_TD.shape)} and weight {weight_VD.dtype} {list(weight_VD.shape)} do not go together"
        )
    if target_T.shape != (num_tokens,) or temperature_T.shape != (num_tokens,):
        raise ValueError(f"target {list(target_T.shape)} and temperature {list(temperature_T.shape)} must be [{num_tokens}]")
    return _ChunkedTokenLogprob.apply(hidden_TD, weight_VD, target_T, temperature_T, chunk_tokens)


def _accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with float32 accumulation and result (float64 for float64)."""
    out = _accumulation_dtype(a)
    if a.dtype == out:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=out)
    return a.to(out) @ b.to(out)


def _scaled_logits(hidden_CD: Tensor, weight_VD: Tensor, temperature_C: Tensor) -> Tensor:
    logits_CV = _matmul(hidden_CD, weight_VD.T)
    return logits_CV.div_(temperature_C.to(logits_CV.dtype)[:, None])


class _ChunkedTokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor, temperature_T: Tensor, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        dtype = _accumulation_dtype(hidden_TD)
        logprob_T, entropy_T, log_normalizer_T = (hidden_TD.new_empty(hidden_TD.shape[0], dtype=dtype) for _ in range(3))
        for start in range(0, hidden_TD.shape[0], chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits_CV = _scaled_logits(hidden_TD[chunk], weight_VD, temperature_T[chunk])
            log_normalizer_C = torch.logsumexp(logits_CV, dim=-1)
            target_logit_C = logits_CV.gather(1, target_T[chunk, None]).squeeze(1)
            logprob_T[chunk] = target_logit_C - log_normalizer_C
            log_normalizer_T[chunk] = log_normalizer_C
            log_softmax_CV = logits_CV.sub_(log_normalizer_C[:, None])
            entropy_T[chunk] = -torch.linalg.vecdot(log_softmax_CV.exp(), log_softmax_CV)
        ctx.save_for_backward(hidden_TD, weight_VD, target_T, temperature_T, log_normalizer_T, entropy_T)
        ctx.chunk_tokens = chunk_tokens
        return logprob_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob_T: Tensor, grad_entropy_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, target_T, temperature_T, log_normalizer_T, entropy_T = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        dtype = log_normalizer_T.dtype
        grad_hidden_TD = torch.empty_like(hidden_TD) if wants_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=dtype) if wants_weight else None
        for start in range(0, hidden_TD.shape[0], ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            hidden_CD = hidden_TD[chunk]
            g_C, h_C = grad_logprob_T[chunk].to(dtype), grad_entropy_T[chunk].to(dtype)
            log_softmax_CV = _scaled_logits(hidden_CD, weight_VD, temperature_T[chunk]).sub_(log_normalizer_T[chunk, None])
            softmax_CV = log_softmax_CV.exp()
            # −p (g + h (log p + H)), written into the log-softmax, then g added at the target.
            grad_logits_CV = log_softmax_CV.add_(entropy_T[chunk, None]).mul_(h_C[:, None]).add_(g_C[:, None]).mul_(softmax_CV).neg_()
            grad_logits_CV.scatter_add_(1, target_T[chunk, None], g_C[:, None])
            grad_logits_CV.div_(temperature_T[chunk].to(dtype)[:, None])
            grad_logits_CV = grad_logits_CV.to(hidden_CD.dtype)
            if grad_hidden_TD is not None:
                grad_hidden_TD[chunk] = _matmul(grad_logits_CV, weight_VD).to(hidden_TD.dtype)
            if grad_weight_VD is not None:
                grad_weight_VD += _matmul(grad_logits_CV.T, hidden_CD)
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_TD, grad_weight_VD, None, None, None
