"""What happens to a block of logits between the products, in plain torch: the second referee of the Triton kernels.

Blocks arrive before the division by temperature, in float32 (float64 for the referee's tests), and may be written over.

With g_t, h_t the gradients that arrive at logprob_t and entropy_t, p the softmax and H the entropy:
    ∂/∂z_tv = g_t (1[v = target_t] − p_tv) − h_t p_tv (log p_tv + H_t)      and ∂/∂logit_tv is that over temperature_t
"""

import torch
from torch import Tensor


def statistics(logits_CV: Tensor, target_C: Tensor, temperature_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of the target, entropy and log-normalizer of whole rows."""
    logits_CV = logits_CV.div_(temperature_C.to(logits_CV.dtype)[:, None])
    log_normalizer_C = torch.logsumexp(logits_CV, dim=-1)
    logprob_C = logits_CV.gather(1, target_C[:, None]).squeeze(1) - log_normalizer_C
    log_softmax_CV = logits_CV.sub_(log_normalizer_C[:, None])
    return logprob_C, -torch.linalg.vecdot(log_softmax_CV.exp(), log_softmax_CV), log_normalizer_C


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
    g_T, h_T, temperature_T = grad_logprob_T.to(dtype), grad_entropy_T.to(dtype), temperature_T.to(dtype)
    log_softmax_TB = logits_TB.div_(temperature_T[:, None]).sub_(log_normalizer_T[:, None])
    softmax_TB = log_softmax_TB.exp()
    # −p (g + h (log p + H)), written into the log-softmax, then g added at the target where it is in this block.
    grad_TB = log_softmax_TB.add_(entropy_T[:, None]).mul_(h_T[:, None]).add_(g_T[:, None]).mul_(softmax_TB).neg_()
    column_T = target_T - first_column
    inside_T = (column_T >= 0) & (column_T < grad_TB.shape[1])
    grad_TB.scatter_add_(1, column_T.clamp(0, grad_TB.shape[1] - 1)[:, None], torch.where(inside_T, g_T, 0)[:, None])
    return grad_TB.div_(temperature_T[:, None]).to(out_dtype)
