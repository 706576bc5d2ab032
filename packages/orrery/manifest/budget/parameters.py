"""Count the parameters of this project's networks from the manifest, without building them.

For family `hugging_face`, `orrery.models.families` counts the built network.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Lora, Model

Part = Literal["norm", "attention", "indexer", "feed_forward", "router", "experts"]


@dataclass(frozen=True)
class BlockWeight:
    """A weight of a transformer block.

    - `shape`: (rows, columns), (experts, rows, columns), or (size,) of a vector.
    - `num_matrices`: matrices stacked along the rows, such as 2 for an expert's gate and up.
    - `has_fp8`: whether the product runs in FP8 if `model.fp8` names `part`.
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
    """Parameter counts of a whole FSDP unit, such as a block: weights gathered together.

    `trained` and `frozen` include experts. `adapted`: frozen parameters of layers with adapters.
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
        """Return the parameters that one rank gathers: 1/ep of the experts, all other weights."""
        experts = self.trained_experts + self.frozen_experts
        return self.total - experts + experts // ep

    def gathered_trained(self, ep: int) -> int:
        return self.trained - self.trained_experts + self.trained_experts // ep


@dataclass(frozen=True)
class ParameterCounts:
    """Counts of FSDP units in forward order.

    `before`: embedding. `after`: last norm and LM head. Tied embeddings count in `root` instead.
    `largest_in_a_layer`: parameters of a block's largest trained weight, such as stacked experts.
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


def keys_per_query(model: Model, cp: int) -> float:
    """Return the ratio of keys to queries in a rank's latent attention, 1 without cp.

    A document is cut into 2·cp pieces, and a rank has the queries of pieces i and 2·cp − 1 − i
    (zig-zag). With indexers it reads all 2·cp pieces of keys. Without, it expands the keys up to
    each of its pieces: i + 1 and 2·cp − i, together 2·cp + 1 pieces.
    """
    if cp == 1 or model.mla is None:
        return 1.0
    return cp if model.mla.indexer is not None else cp + 0.5


def is_sparse(model: Model, layer: int) -> bool:
    return model.moe is not None and layer >= model.moe.num_dense_layers


def block_weights(model: Model, layer: int) -> Iterator[BlockWeight]:
    """Yield the weights of a block. Raise OrreryError for family `hugging_face`."""
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
    """Return the counts of all units. Raise OrreryError for family `hugging_face`.

    Indexers are frozen. With `adapters`, only these are trained.
    """
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
        layers.append(replace(unit))  # copies, because `trainer_memory` compares by identity
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
