"""Log-probability of given tokens, and the entropy of their distributions, from hidden states and the LM head.

    z_tv = (hidden_t · weight_v) / temperature_t        in float32 (float64 for float64 inputs)
    logprob_t = z_t[target_t] − log Σ_v exp z_tv        entropy_t = log Σ_v exp z_tv − Σ_v softmax(z_t)_v z_tv

- `reference.py` holds all logits and lets autograd do the rest: the referee.
- `chunked.py` never holds more than `chunk_tokens` × V of them, in the forward or in the backward: the products, block by block.
- `logits.py` is what happens to a block of logits between the products, in plain torch; `triton.py` the same in one pass on a GPU.
"""

from orrery.kernels.token_logprob.chunked import ChunkTokens, token_logprob
from orrery.kernels.token_logprob.reference import token_logprob as reference_token_logprob

__all__ = ["ChunkTokens", "reference_token_logprob", "token_logprob"]
