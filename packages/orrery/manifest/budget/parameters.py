"""Count parameters and FLOPs of Orrery's own networks.

`model_flops` counts 6 FLOPs per token and active weight, or 4 if weights are frozen. Attention adds
12 · L · H · K · n² / 2 per document of n tokens, with L layers and H query heads of size K (PaLM,
arXiv 2204.02311, app. B). Sparse attention adds 6 · L · H · (2C + R) per query and chosen key, with
latent width C and rotary width R of keys.

FLOPs of adapters are not counted.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Lora, Model, Trainer

Part = Literal["norm", "attention", "indexer", "feed_forward", "router", "experts"]


@dataclass(frozen=True)
class BlockWeight:
    """A block's weight. `shape`: (rows, columns), (experts, rows, columns) or (size,).

    `num_matrices`: matrices stacked along rows, such as 2 for gate and up.
    `has_fp8`: products may run in FP8.
    """

    part: Part
    shape: tuple[int, ...]
    num_matrices: int = 1
    has_fp8: bool = True

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class UnitParameters:
    """Parameter counts of an unsharded FSDP unit, such as a block.

    `trained` and `frozen` include experts. `adapted`: frozen parameters with adapters.
    """

    trained: int = 0
    frozen: int = 0
    trained_experts: int = 0
    frozen_experts: int = 0
    adapted: int = 0

    @property
    def total(self) -> int:
        return self.trained + self.frozen

    def gathered(self, ep: int) -> int:
        """Return the parameters that a rank gathers, with 1/ep of the experts."""
        experts = self.trained_experts + self.frozen_experts
        return self.total - experts + experts // ep

    def gathered_trained(self, ep: int) -> int:
        return self.trained - self.trained_experts + self.trained_experts // ep


@dataclass(frozen=True)
class ParameterCounts:
    """Parameter counts of all FSDP units, in forward order.

    `before`: embedding. `after`: last norm, LM head. `root`: tied embedding and last norm.
    `largest_in_a_layer`: size of the largest trained weight of a block.
    """

    before: UnitParameters
    layers: tuple[UnitParameters, ...]
    after: UnitParameters
    root: UnitParameters
    largest_in_a_layer: int

    @property
    def units(self) -> tuple[UnitParameters, ...]:
        return self.before, *self.layers, self.after, self.root

    @property
    def total(self) -> int:
        return sum(unit.total for unit in self.units)

    @property
    def experts(self) -> int:
        return sum(unit.trained_experts + unit.frozen_experts for unit in self.units)


def keys_per_query(model: Model, cp: int) -> float:
    """Return a rank's ratio of keys to queries in latent attention.

    A rank has the queries of pieces i and 2·cp + 1 − i of a document's 2·cp pieces. With indexers,
    it gathers all keys. Without indexers, piece i needs the keys of i pieces, so both pieces
    together need 2·cp + 1.
    """
    if cp == 1 or model.mla is None:
        return 1.0
    return cp if model.mla.indexer is not None else cp + 0.5


def is_sparse(model: Model, layer: int) -> bool:
    return model.moe is not None and layer >= model.moe.num_dense_layers


def block_weights(model: Model, layer: int) -> Iterator[BlockWeight]:
    if model.family == "hugging_face":
        raise OrreryError(
            "model.family 'hugging_face': the manifest does not say what its weights are"
        )
    hidden = model.hidden_size
    yield BlockWeight("norm", (hidden,))
    yield BlockWeight("norm", (hidden,))
    yield from _attention(model, layer)
    if not is_sparse(model, layer):
        yield from _feed_forward(hidden, model.intermediate_size)
        return
    moe = model.mixture
    width = moe.expert_intermediate_size
    yield BlockWeight("router", (moe.num_experts, hidden))
    yield BlockWeight("experts", (moe.num_experts, 2 * width, hidden), num_matrices=2)
    yield BlockWeight("experts", (moe.num_experts, hidden, width))
    yield from _feed_forward(hidden, moe.num_shared_experts * width)


def _attention(model: Model, layer: int) -> Iterator[BlockWeight]:
    hidden, heads, groups = model.hidden_size, model.num_heads, model.num_kv_heads
    if (mla := model.mla) is None:
        for rows in (heads * model.head_dim, *2 * (groups * model.head_dim,)):
            yield BlockWeight("attention", (rows, hidden))
            if model.attention_bias:
                yield BlockWeight("norm", (rows,))
        yield BlockWeight("attention", (hidden, heads * model.head_dim))
        if model.qk_norm:
            yield from (
                BlockWeight("norm", (model.head_dim,)),
                BlockWeight("norm", (model.head_dim,)),
            )
        return
    queries, latent = mla.q_lora_rank, mla.kv_lora_rank
    yield BlockWeight("attention", (queries, hidden), has_fp8=False)
    yield BlockWeight("norm", (queries,))
    yield BlockWeight("attention", (heads * model.head_dim, queries))
    yield BlockWeight("attention", (latent + mla.rope_head_dim, hidden), has_fp8=False)
    yield BlockWeight("norm", (latent,))
    up = heads * (mla.nope_head_dim + mla.value_head_dim)
    yield BlockWeight("attention", (up, latent), has_fp8=False)
    yield BlockWeight("attention", (hidden, heads * mla.value_head_dim))
    indexer = mla.indexer
    if indexer is not None and (indexer.types is None or indexer.types[layer] == "full"):
        width = indexer.head_dim
        yield BlockWeight("indexer", (indexer.num_heads * width, queries))
        yield BlockWeight("indexer", (width, hidden))
        yield from (BlockWeight("indexer", (width,)), BlockWeight("indexer", (width,)))
        yield BlockWeight("indexer", (indexer.num_heads, hidden))


def _feed_forward(hidden: int, width: int) -> Iterator[BlockWeight]:
    if width:
        yield from 2 * (BlockWeight("feed_forward", (width, hidden)),)
        yield BlockWeight("feed_forward", (hidden, width))


def count_parameters(model: Model, adapters: Lora | None) -> ParameterCounts:
    """Count indexers as frozen. With `adapters`, count only adapters as trained."""
    kinds: dict[tuple[bool, str], tuple[UnitParameters, int]] = {}
    layers: list[UnitParameters] = []
    largest = 0
    for layer in range(model.num_layers):
        indexer = None if model.mla is None else model.mla.indexer
        types = None if indexer is None else indexer.types
        kind = is_sparse(model, layer), "full" if types is None else types[layer]
        if kind not in kinds:
            kinds[kind] = _count_block(list(block_weights(model, layer)), adapters)
        unit, most = kinds[kind]
        layers.append(replace(unit))  # `trainer_memory` compares units by identity
        largest = max(largest, most)
    embedding, norm = model.vocab_size * model.hidden_size, model.hidden_size

    def outside(size: int) -> UnitParameters:
        return UnitParameters(trained=size) if adapters is None else UnitParameters(frozen=size)

    if model.tie_embeddings:
        ends = outside(0), outside(0), outside(embedding + norm)
    else:
        ends = outside(embedding), outside(norm + embedding), outside(0)
    before, after, root = ends
    return ParameterCounts(before, tuple(layers), after, root, largest)


def _count_block(weights: list[BlockWeight], adapters: Lora | None) -> tuple[UnitParameters, int]:
    found = dict.fromkeys(("trained", "frozen", "trained_experts", "frozen_experts", "adapted"), 0)
    largest = 0

    def add(size: int, is_trained: bool, is_expert: bool) -> None:
        nonlocal largest
        kind = "trained" if is_trained else "frozen"
        found[kind] += size
        found[f"{kind}_experts"] += size if is_expert else 0
        largest = max(largest, size if is_trained else 0)

    for weight in weights:
        is_expert = weight.part == "experts"
        add(weight.size, adapters is None and weight.part != "indexer", is_expert)
        if adapters is None or weight.part not in adapters.targets:
            continue
        found["adapted"] += weight.size
        *stack, rows, columns = weight.shape
        for width in (rows, columns):
            add(math.prod(stack) * adapters.rank * width, True, is_expert)
    return UnitParameters(**found), largest


@dataclass(frozen=True)
class Flops:
    projections: float  # attention, dense feed-forwards, routers, shared experts
    experts: float  # routed experts
    attention: float  # scores, and products of scores with values
    lm_head: float

    @property
    def total(self) -> float:
        return self.projections + self.experts + self.attention + self.lm_head


def is_counted(model: Model) -> bool:
    return model.family != "hugging_face"


def active_parameters(model: Model) -> Flops:
    """Return the numbers of parameters that multiply each token.

    Raise OrreryError unless `is_counted(model)`.
    """
    if not is_counted(model):
        raise OrreryError(f"model.family {model.family!r}: its operations are not counted")
    projections, experts = 0, 0
    kinds = [is_sparse(model, layer) for layer in range(model.num_layers)]
    for kind in set(kinds):  # blocks of a kind differ only in indexers
        for weight in block_weights(model, kinds.index(kind)):
            if weight.part == "experts":
                moe = model.mixture
                size = weight.size // moe.num_experts * moe.num_experts_per_token
                experts += kinds.count(kind) * size
            elif weight.part in ("attention", "router", "feed_forward"):
                projections += kinds.count(kind) * weight.size
    return Flops(projections, experts, 0, model.vocab_size * model.hidden_size)


def model_flops(model: Model, lengths: Sequence[int], frozen: bool = False) -> Flops:
    """Return the FLOPs of a forward and backward pass over documents of `lengths` tokens."""
    each = (4 if frozen else 6) * sum(lengths)
    active = active_parameters(model)
    attention = 3 * attention_forward(model, lengths) + indexers(model, lengths)
    return Flops(active.projections * each, active.experts * each, attention, active.lm_head * each)


def hardware_flops(model: Model, trainer: Trainer, lengths: Sequence[int]) -> Flops:
    """Return `model_flops` plus work that a context-parallel group recomputes or repeats."""
    base = model_flops(model, lengths, trainer.lora is not None)
    active, forward = active_parameters(model), 2 * sum(lengths)
    recomputed: set[str] = set()
    if trainer.memory.recomputes_blocks:
        recomputed = {"projections", "experts", "attention"} - set(trainer.kept)
    share = -(-model.num_layers // trainer.memory.activation_checkpointing_every) / model.num_layers
    each = (4 if trainer.lora is not None else 6) * sum(lengths)
    repeated = _repeated_parameters(model, trainer.mesh.cp)
    again = share * ("projections" in recomputed) * (active.projections + repeated) * forward
    layers = range(model.num_layers)
    again += sum(_recomputed_parameters(model, trainer, layer) for layer in layers) * forward
    core = attention_forward(model, lengths, trainer.mesh.cp)
    return Flops(
        base.projections + repeated * each + again,
        base.experts + share * ("experts" in recomputed) * active.experts * forward,
        # Attention has 2 forward products (`core`) and 5 backward products.
        3.5 * core + share * ("attention" in recomputed) * core + indexers(model, lengths),
        base.lm_head + (not trainer.memory.lm_head_keeps_logits) * active.lm_head * forward,
    )


def _is_sparse(model: Model, lengths: Sequence[int]) -> bool:
    indexer = None if model.mla is None else model.mla.indexer
    return indexer is not None and max(lengths, default=0) > indexer.top_k


def attends_sparsely(model: Model, lengths: Sequence[int], cp: int) -> bool:
    """Return whether attention reads only chosen keys.

    With indexers, it does if `cp` > 1 or a document exceeds `top_k` tokens.
    """
    has_indexer = model.mla is not None and model.mla.indexer is not None
    return has_indexer and (cp > 1 or _is_sparse(model, lengths))


def _recomputed_parameters(model: Model, trainer: Trainer, layer: int) -> float:
    names, heads, total = trainer.memory.recomputed_modules(layer), model.num_heads, 0.0
    if "attention_projections" in names:
        if (mla := model.mla) is None:
            total += model.hidden_size * (heads + 2 * model.num_kv_heads) * model.head_dim
        else:
            expanded = heads * (mla.nope_head_dim + mla.value_head_dim) * mla.kv_lora_rank
            total += heads * model.head_dim * mla.q_lora_rank + expanded
            total += _repeated_parameters(model, trainer.mesh.cp) / model.num_layers
    if "router" in names and is_sparse(model, layer):
        total += model.mixture.num_experts * model.hidden_size
    return total


def _repeated_parameters(model: Model, cp: int) -> float:
    mla = model.mla
    if mla is None or mla.indexer is not None:
        return 0.0
    expanded = model.num_heads * (mla.nope_head_dim + mla.value_head_dim) * mla.kv_lora_rank
    return model.num_layers * expanded * (keys_per_query(model, cp) - 1)


def attention_forward(model: Model, lengths: Sequence[int], cp: int = 1) -> float:
    """Return attention's forward FLOPs in all layers, without projections."""
    width, most = 2 * model.head_dim, max(lengths, default=0)
    if (mla := model.mla) is not None:
        width = model.head_dim + mla.value_head_dim
        if mla.indexer is not None and attends_sparsely(model, lengths, cp):
            width, most = 2 * mla.kv_lora_rank + mla.rope_head_dim, mla.indexer.top_k
    keys = sum(attended_keys(length, most) for length in lengths)
    return 2 * model.num_layers * model.num_heads * width * keys


def indexers(model: Model, lengths: Sequence[int]) -> float:
    """Return the indexers' forward FLOPs, or 0 if no document exceeds `top_k`."""
    mla = model.mla
    if mla is None or (indexer := mla.indexer) is None or not _is_sparse(model, lengths):
        return 0.0
    width = indexer.num_heads * indexer.head_dim
    weights = mla.q_lora_rank * width + model.hidden_size * (indexer.head_dim + indexer.num_heads)
    keys = sum(attended_keys(length, length) for length in lengths)
    return 2.0 * model.num_indexers * (weights * sum(lengths) + width * keys)


def attended_keys(length: int, most: int) -> float:
    """Count (query, key) pairs of causal attention with at most `most` keys per query."""
    most = min(length, most)
    return most * most / 2 + (length - most) * most
