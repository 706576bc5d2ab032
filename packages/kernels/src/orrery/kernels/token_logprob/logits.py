"""What happens to a block of logits between the products, in plain torch: the second referee of the Triton kernels.

Blocks [T, B] are some columns of all logits, before the division by temperature, in float32 (float64 for the referee's tests); they may be
written over.

Forward, an online softmax: with m the greatest z seen and d = z − m, a state carries m, s = Σ exp d, w = Σ d exp d and the target's z from
block to block. When m rises by δ, w becomes exp(−δ)(w − δ s) and s becomes exp(−δ) s. In the end the log-normalizer is m + log s and the
entropy log s − w / s: differences to the maximum, so nothing large cancels.

With g_t, h_t the gradients that arrive at logprob_t and entropy_t, p the softmax and H the entropy:
    ∂/∂z_tv = g_t (1[v = target_t] − p_tv) − h_t p_tv (log p_tv + H_t)      and ∂/∂logit_tv is that over temperature_t
"""

import torch
from torch import Tensor


def nothing_seen(num_tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """State [4, T] before the first block: m, s, w and the target's z, as rows."""
    state_4T = torch.zeros(4, num_tokens, dtype=dtype, device=device)
    state_4T[0] = -1e38  # finite: the first rise must not make 0 · ∞
    return state_4T


def absorb(
    state_4T: Tensor, logits_TB: Tensor, target_T: Tensor, temperature_T: Tensor, first_column: int
) -> None:
    """Take the logits of columns `first_column` and on into the state."""
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


def finish(state_4T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of the target, entropy and log-normalizer, once every column was absorbed."""
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
    """Gradient [T, B] of the logits in columns `first_column` and on, rounded once to `out_dtype`."""
    dtype = logits_TB.dtype
    g_T, h_T, temperature_T = (
        grad_logprob_T.to(dtype),
        grad_entropy_T.to(dtype),
        temperature_T.to(dtype),
    )
    log_softmax_TB = logits_TB.div_(temperature_T[:, None]).sub_(log_normalizer_T[:, None])
    softmax_TB = log_softmax_TB.exp()
    # −p (g + h (log p + H)), written into the log-softmax, then g added at the target where it is in this block.
    grad_TB = (
        log_softmax_TB.add_(entropy_T[:, None])
        .mul_(h_T[:, None])
        .add_(g_T[:, None])
        .mul_(softmax_TB)
        .neg_()
    )
    column_T, inside_T = _target_columns(target_T, first_column, grad_TB.shape[1])
    grad_TB.scatter_add_(1, column_T, torch.where(inside_T, g_T, 0)[:, None])
    return grad_TB.div_(temperature_T[:, None]).to(out_dtype)


def _target_columns(target_T: Tensor, first_column: int, width: int) -> tuple[Tensor, Tensor]:
    """Columns [T, 1] of the targets in a block, and whether they are in it at all."""
    column_T = target_T - first_column
    return column_T.clamp(0, width - 1)[:, None], (column_T >= 0) & (column_T < width)
