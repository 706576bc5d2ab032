"""Log-probability and entropy of given tokens, from hidden states and the LM head.

    z_tv = (hidden_t · weight_v) / temperature_t        in float32 (float64 for float64 inputs)
    logprob_t = z_t[target_t] − log Σ_v exp z_tv
    entropy_t = log Σ_v exp z_tv − Σ_v softmax(z_t)_v z_tv

- `reference.py` holds all logits, with plain autograd.
- `chunked.py` computes tiles of at most `chunk_tokens` × V logits, forward and backward.
- `plain.py` and `triton.py` are the backends: softmax and gradient of a tile of logits.
"""

from orrery.kernels.token_logprob.chunked import ChunkTokens, token_logprob
from orrery.kernels.token_logprob.reference import token_logprob as reference_token_logprob

__all__ = ["ChunkTokens", "reference_token_logprob", "token_logprob"]
