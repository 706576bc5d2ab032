"""The plain backend: softmax and gradient of a block of logits.

A block [T, B] has some columns of all logits, before division by temperature: float32 (float64 in
tests), may be overwritten.
Forward, online softmax: m = max z, s = Σ exp d, w = Σ d exp d with d = z − m, and the target's z.
When m rises by δ, w becomes exp(−δ)(w − δ s) and s becomes exp(−δ) s. In the end the log-normalizer
is m + log s and the entropy log s − w / s, so no large terms cancel.
Backward, with softmax p, entropy H, gradients g of the log-prob and h of the entropy:
    ∂/∂z_tv = g_t (1[v = target_t] − p_tv) − h_t p_tv (log p_tv + H_t).
The logit's gradient is this over temperature_t.
"""

import torch
from torch import Tensor


def initial_state(num_tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the state [4, T] before the first block: rows m, s, w and the target's z."""
    state_4T = torch.zeros(4, num_tokens, dtype=dtype, device=device)
    state_4T[0] = -1e38  # finite: the first rise must not compute 0 · ∞
    return state_4T


def update_state(
    state_4T: Tensor, logits_TB: Tensor, target_T: Tensor, temperature_T: Tensor, first_column: int
) -> None:
    """Add the logits of columns from `first_column` on to the state."""
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
    """Return the target's log-prob, the entropy and the log-normalizer."""
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
    """Return the logits' gradient [T, B], rounded once to `out_dtype`."""
    dtype = logits_TB.dtype
    g_T, h_T, temperature_T = (x.to(dtype) for x in (grad_logprob_T, grad_entropy_T, temperature_T))
    log_softmax_TB = logits_TB.div_(temperature_T[:, None]).sub_(log_normalizer_T[:, None])
    softmax_TB = log_softmax_TB.exp()
    # −p (g + h (log p + H)) in place, then g added at a target inside this block.
    grad_TB = log_softmax_TB.add_(entropy_T[:, None]).mul_(h_T[:, None]).add_(g_T[:, None])
    grad_TB = grad_TB.mul_(softmax_TB).neg_()
    column_T, inside_T = _target_columns(target_T, first_column, grad_TB.shape[1])
    grad_TB.scatter_add_(1, column_T, torch.where(inside_T, g_T, 0)[:, None])
    return grad_TB.div_(temperature_T[:, None]).to(out_dtype)


def _target_columns(target_T: Tensor, first_column: int, width: int) -> tuple[Tensor, Tensor]:
    column_T = target_T - first_column
    return column_T.clamp(0, width - 1)[:, None], (column_T >= 0) & (column_T < width)
