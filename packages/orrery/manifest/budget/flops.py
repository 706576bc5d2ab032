"""Count floating-point operations (FLOPs) of training, with and without recomputation.

L layers · H query heads · K head size · C latent width of keys · R rotary width of keys
- `model_flops`: 6 per token and weight that multiplies it (4 if frozen), and for attention
  12 · L · H · K · n² / 2 per document of n tokens (PaLM, arXiv 2204.02311, appendix B).
- Sparse attention: 6 · L · H · (2C + R) per pair of a query and a chosen key, and the forward pass
  of indexers, if a document is longer than the indexer's `top_k`.
- `hardware_flops` adds recomputed blocks, logits and attention scores (5 backward products, not 4),
  and costs of context parallelism (cp): latent keys that several ranks up-project, and, with
  indexers, attention to latent keys directly.
- Adapters and family `hugging_face` are not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from orrery.manifest.budget.parameters import block_weights, is_sparse, keys_per_query
from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Model, Trainer


@dataclass(frozen=True)
class Flops:
    projections: float  # attention, dense feed-forwards, routers, shared experts
    experts: float  # grouped products of routed experts
    attention: float  # scores and their products with values
    lm_head: float

    @property
    def total(self) -> float:
        return self.projections + self.experts + self.attention + self.lm_head


def is_counted(model: Model) -> bool:
    return model.family != "hugging_face"


def active_parameters(model: Model) -> Flops:
    """Return how many parameters multiply one token, in the fields of `Flops`.

    Raise OrreryError unless `is_counted`.
    """
    if not is_counted(model):
        raise OrreryError(f"model.family {model.family!r}: its operations are not counted")
    projections, experts = 0, 0
    kinds = [is_sparse(model, layer) for layer in range(model.num_layers)]
    for kind in set(kinds):  # blocks of a kind differ only in indexers, not counted here
        for weight in block_weights(model, kinds.index(kind)):
            if weight.part == "experts":
                moe = model.mixture
                size = weight.size // moe.num_experts * moe.num_experts_per_token
                experts += kinds.count(kind) * size
            elif weight.part in ("attention", "router", "feed_forward"):
                projections += kinds.count(kind) * weight.size
    return Flops(projections, experts, 0, model.vocab_size * model.hidden_size)


def model_flops(model: Model, lengths: Sequence[int], frozen: bool = False) -> Flops:
    """Return the FLOPs of a forward and backward pass over documents of `lengths` tokens.

    The LM head scores every token. `frozen`: weights get no gradients (LoRA), else all get one.
    """
    each = (4 if frozen else 6) * sum(lengths)
    active = active_parameters(model)
    attention = 3 * _attention_forward(model, lengths) + _indexers(model, lengths)
    return Flops(active.projections * each, active.experts * each, attention, active.lm_head * each)


def hardware_flops(model: Model, trainer: Trainer, lengths: Sequence[int]) -> Flops:
    """Return `model_flops`, plus recomputed or repeated work, summed over a cp group."""
    base = model_flops(model, lengths, trainer.lora is not None)
    active, forward = active_parameters(model), 2 * sum(lengths)
    recomputed: set[str] = set()
    if trainer.memory.activation_checkpointing.kind != "none":
        recomputed = {"projections", "experts", "attention"} - set(trainer.kept)
    each = (4 if trainer.lora is not None else 6) * sum(lengths)
    repeated = _repeated_parameters(model, trainer.mesh.cp)
    again = ("projections" in recomputed) * (active.projections + repeated) * forward
    core = _attention_forward(model, lengths, trainer.mesh.cp)
    return Flops(
        base.projections + repeated * each + again,
        base.experts + ("experts" in recomputed) * active.experts * forward,
        # `core` is 2 products forward. With 5 products backward that is 3.5 times `core`.
        3.5 * core + ("attention" in recomputed) * core + _indexers(model, lengths),
        base.lm_head + (not trainer.memory.lm_head_keeps_logits) * active.lm_head * forward,
    )


def _is_sparse(model: Model, lengths: Sequence[int]) -> bool:
    indexer = None if model.mla is None else model.mla.indexer
    return indexer is not None and max(lengths, default=0) > indexer.top_k


def _repeated_parameters(model: Model, cp: int) -> float:
    """Return the parameters of all `kv_b_proj`, times the repeats of a latent key.

    Return 0 for networks with indexers.
    """
    mla = model.mla
    if mla is None or mla.indexer is not None:
        return 0.0
    expanded = model.num_heads * (mla.nope_head_dim + mla.value_head_dim) * mla.kv_lora_rank
    return model.num_layers * expanded * (keys_per_query(model, cp) - 1)


def _attention_forward(model: Model, lengths: Sequence[int], cp: int = 1) -> float:
    width, most = 2 * model.head_dim, max(lengths, default=0)
    if (mla := model.mla) is not None:
        width = model.head_dim + mla.value_head_dim
        if mla.indexer is not None and (cp > 1 or _is_sparse(model, lengths)):
            width, most = 2 * mla.kv_lora_rank + mla.rope_head_dim, mla.indexer.top_k
    keys = sum(attended_keys(length, most) for length in lengths)
    return 2 * model.num_layers * model.num_heads * width * keys


def _indexers(model: Model, lengths: Sequence[int]) -> float:
    """Return the forward operations of all indexers, or 0 while attention is dense."""
    mla = model.mla
    if mla is None or (indexer := mla.indexer) is None or not _is_sparse(model, lengths):
        return 0.0
    width = indexer.num_heads * indexer.head_dim
    weights = mla.q_lora_rank * width + model.hidden_size * (indexer.head_dim + indexer.num_heads)
    keys = sum(attended_keys(length, length) for length in lengths)
    return 2.0 * model.num_indexers * (weights * sum(lengths) + width * keys)


def attended_keys(length: int, most: int) -> float:
    """Return the number of (query, key) pairs in causal attention, at most `most` keys a query.

    1 + … + n is taken as n² / 2.
    """
    most = min(length, most)
    return most * most / 2 + (length - most) * most
