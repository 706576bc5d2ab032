"""Log-probability and entropy of given tokens, from hidden states and the LM head.

    z_tv = (hidden_t · weight_v) / temperature_t        in float32 (float64 for float64 inputs)
    logprob_t = z_t[target_t] − log Σ_v exp z_tv
    entropy_t = log Σ_v exp z_tv − Σ_v softmax(z_t)_v z_tv

`chunked.py` computes tiles of logits. `plain.py` and `triton.py` are its backends.
"""

from orrery.kernels.token_logprob.chunked import ChunkTokens, token_logprob
from orrery.kernels.token_logprob.reference import token_logprob as reference_token_logprob

__all__ = ["ChunkTokens", "reference_token_logprob", "token_logprob"]
