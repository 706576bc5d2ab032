"""Made-up batches: random tokens in documents of fixed or of drawn lengths, with the columns that a loss reads.

- `fixed`: micro-batches of whole documents. `variable`: lengths between a sixteenth of the longest and the longest, drawn evenly in their
  logarithm, until the micro-batch is full; the last is cut. Every micro-batch is full either way, with the padding of a model that pads.
- `sft`: every token but a document's first is trained with weight 1 of cross-entropy. `rl`: the same tokens carry all three components.
- `balanced`: every expert of a layer gets as many tokens as the next, in rounds over neighbours; `natural`: the router chooses.
- Ranks of one context-parallel group ask with the same `data_rank`, and so get the same documents.
"""

import numpy as np

from orrery.manifest.schema import Model
from orrery.trainer.bench.request import Request
from orrery.transport.columns import Columns
from orrery.transport.packing import is_padded
from orrery.transport.routed_experts import route_shape


def micro_batches(request: Request, step: int, data_rank: int) -> list[Columns]:
    """One step's micro-batches of one data rank; the same for the same arguments."""
    rng = np.random.default_rng([request.seed, step, data_rank])
    return [
        _columns(request, document_lengths(request, rng), rng) for _ in range(request.micro_batches)
    ]


def document_lengths(request: Request, rng: np.random.Generator) -> np.ndarray:
    """Of the documents of one micro-batch; their sum is `tokens_per_micro_batch`, less where a model pads."""
    longest, left = request.document_tokens, request.tokens_per_micro_batch
    lengths: list[int] = []
    while left:
        length = (
            longest
            if request.lengths == "fixed"
            else round(
                float(
                    np.exp(rng.uniform(np.log(min(max(longest / 16, 2), longest)), np.log(longest)))
                )
            )
        )
        length = min(length, left)
        if (
            is_padded(request.model)
            and (len(lengths) + 1) * max([*lengths, length]) > request.tokens_per_micro_batch
        ):
            break
        lengths.append(length)
        left -= length
    return np.array(lengths, dtype=np.int64)


def _columns(request: Request, lengths: np.ndarray, rng: np.random.Generator) -> Columns:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(offsets[-1])
    trained = np.ones(total, dtype=bool)
    trained[offsets[:-1]] = False
    one = np.ones(total, dtype=np.float32)
    token = {
        "token_id": rng.integers(0, request.model.vocab_size, total, dtype=np.int32),
        "trained": trained,
        "rl_weight": one if request.loss == "rl" else 0 * one,
        "cross_entropy_weight": one,
    }
    if request.loss == "rl":
        # Near what a fresh network gives every token, so that ratios stay finite.
        uniform = -np.log(request.model.vocab_size)
        token |= {
            "logprob": rng.normal(uniform, 0.1, total).astype(np.float32),
            "reference_logprob": rng.normal(uniform, 0.1, total).astype(np.float32),
            "advantage": np.repeat(rng.normal(0, 1, len(lengths)), lengths).astype(np.float32),
            "reference_kl_weight": one,
            "version": np.zeros(total, dtype=np.int32),
        }
    if request.routing == "balanced" and request.model.moe is not None:
        token["routed_experts"] = balanced_experts(request.model, total)
    sample = {
        "temperature": np.ones(len(lengths), dtype=np.float32),
        "dispatch_version": np.full(len(lengths), -1, dtype=np.int32),
    }
    return Columns(offsets, token, sample)


def balanced_experts(model: Model, num_tokens: int) -> np.ndarray:
    """Routes [T, L, K]: token t takes the K experts after those of token t − 1, around and around."""
    shape = route_shape(model)
    assert shape is not None
    turn = (np.arange(num_tokens * shape.top_k) % shape.num_experts).reshape(
        num_tokens, 1, shape.top_k
    )
    return np.broadcast_to(turn, (num_tokens, shape.num_layers, shape.top_k)).astype(shape.dtype)
