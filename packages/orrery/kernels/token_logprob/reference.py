"""Reference: all logits, `log_softmax`, plain autograd."""

import torch
from torch import Tensor


def token_logprob(
    hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor, temperature_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log-prob and entropy of each token, float32 [T] (float64 for float64 inputs)."""
    dtype = torch.float64 if hidden_TD.dtype == torch.float64 else torch.float32
    logits_TV = hidden_TD.to(dtype) @ weight_VD.to(dtype).T / temperature_T.to(dtype)[:, None]
    log_softmax_TV = torch.log_softmax(logits_TV, dim=-1)
    logprob_T = log_softmax_TV.gather(1, target_T[:, None]).squeeze(1)
    entropy_T = -(log_softmax_TV.exp() * log_softmax_TV).sum(dim=-1)
    return logprob_T, entropy_T
