"""Pack samples into micro-batches ("bins"), one per rank and micro-step.

- Including padding, a micro-batch has at most `max_tokens`, rounded up to `multiple`.
- Ranks have equally many micro-steps.
- Without padding, there are at most 11/9 · minimum + 1 bins, rounded up to whole micro-steps.
- A micro-step waits for its slowest rank, so its micro-batches get similar costs.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from heapq import heappop, heappush, heapreplace
from typing import overload

import numpy as np

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Manifest, Model
from orrery.wire.columns import Columns, MicroBatch

Plan = list[list[np.ndarray]]


def pack_for(manifest: Manifest, lengths: np.ndarray) -> Plan:
    model, trainer = manifest.model, manifest.trainer
    limit = trainer.memory.max_tokens_per_micro_batch
    return pack(
        lengths,
        trainer.mesh.num_data_ranks,
        limit,
        quadratic_cost(model),
        is_padded(model),
        attention_cost(model, lengths) if model.mla and model.mla.indexer else None,
        trainer.mesh.sample_multiple,
    )


def pack(
    lengths: np.ndarray,
    num_ranks: int,
    max_tokens: int,
    quadratic: float = 0.0,
    padded: bool = False,
    attention: np.ndarray | None = None,
    multiple: int = 1,
) -> Plan:
    """Return the sample indices of micro-batch `[rank][micro_step]`, int64, ascending or empty.

    - `lengths`: tokens per sample, int64 [num_samples].
    - `quadratic`: a sample of n tokens costs n + quadratic · n².
    - `attention`: replaces quadratic · n², float64 [num_samples].
    - `padded`: the model pads samples to the longest of the micro-batch.
    - `multiple`: ranks that share a sample pad its length to a multiple of this.

    Raise OrreryError if a sample is empty or exceeds `max_tokens`.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if num_ranks < 1:
        raise OrreryError(f"packing: num_ranks {num_ranks} must be at least 1")
    if len(lengths) == 0:
        return [[] for _ in range(num_ranks)]
    if lengths.min() < 1:
        raise OrreryError(
            f"packing: sample {int(lengths.argmin())} has {int(lengths.min())} tokens; "
            "every sample needs at least one"
        )
    longest = int(lengths.max())
    if longest > max_tokens:
        raise OrreryError(
            f"packing: sample {int(lengths.argmax())} has {longest} tokens, but a micro-batch at "
            f"most {max_tokens}. "
            f"Raise trainer.memory.max_tokens_per_micro_batch to at least {longest}"
        )
    lengths = -(-lengths // multiple) * multiple
    max_tokens = -(-max_tokens // multiple) * multiple
    if attention is None:
        attention = quadratic * lengths.astype(np.float64) ** 2
    costs = lengths + attention
    order = np.argsort(-lengths, kind="stable")
    fill = _rows_of_like_length if padded else _best_fit_decreasing
    full = fill(lengths, order, max_tokens)
    num_bins = -(-(int(full.max()) + 1) // num_ranks) * num_ranks
    candidates = [full]
    if not padded:
        even = _spread(lengths, costs, order, max_tokens, num_bins)
        candidates += [] if even is None else [even]
    plans = [_lock_step(bins, costs, num_bins, num_ranks) for bins in candidates]
    _, bins_in_order, bins = min(plans, key=lambda plan: plan[0])
    ends = np.cumsum(np.bincount(bins, minlength=num_bins))[:-1]
    members = np.split(np.argsort(bins, kind="stable"), ends)
    return [[members[each] for each in bins_in_order[rank::num_ranks]] for rank in range(num_ranks)]


def _rows_of_like_length(lengths: np.ndarray, order: np.ndarray, max_tokens: int) -> np.ndarray:
    bins = np.empty(len(lengths), dtype=np.int64)
    begin = bin_index = 0
    while begin < len(order):
        end = begin + max_tokens // int(lengths[order[begin]])
        bins[order[begin:end]] = bin_index
        begin, bin_index = end, bin_index + 1
    return bins


def _best_fit_decreasing(lengths: np.ndarray, order: np.ndarray, max_tokens: int) -> np.ndarray:
    bins = np.empty(len(lengths), dtype=np.int64)
    rooms: list[int] = []
    stride = len(lengths)
    num_bins = 0
    chosen = []
    for length in lengths[order].tolist():
        at = bisect_left(rooms, length * stride)
        if at < len(rooms):
            room, bin_index = divmod(rooms.pop(at), stride)
        else:
            room, bin_index = max_tokens, num_bins
            num_bins += 1
        chosen.append(bin_index)
        if room > length:
            insort(rooms, (room - length) * stride + bin_index)
    bins[order] = chosen
    return bins


def _spread(
    lengths: np.ndarray, costs: np.ndarray, order: np.ndarray, max_tokens: int, num_bins: int
) -> np.ndarray | None:
    bins = np.empty(len(lengths), dtype=np.int64)
    rooms = [max_tokens] * num_bins
    heap = [(0.0, bin_index) for bin_index in range(num_bins)]
    looks_left = 4 * len(lengths) + 1000
    chosen = []
    for length, cost in zip(lengths[order].tolist(), costs[order].tolist(), strict=True):
        too_full = []
        while heap and rooms[heap[0][1]] < length and looks_left > 0:
            too_full.append(heappop(heap))
            looks_left -= 1
        if not heap or rooms[heap[0][1]] < length:
            return None
        load, bin_index = heap[0]
        rooms[bin_index] -= length
        chosen.append(bin_index)
        heapreplace(heap, (load + cost, bin_index))
        for full in too_full:
            heappush(heap, full)
    bins[order] = chosen
    return bins


def _lock_step(
    bins: np.ndarray, costs: np.ndarray, num_bins: int, num_ranks: int
) -> tuple[float, np.ndarray, np.ndarray]:
    """Sort bins by falling cost, so that memory peaks early."""
    loads = np.bincount(bins, weights=costs, minlength=num_bins)
    in_order = np.argsort(-loads, kind="stable")
    return float(loads[in_order].reshape(-1, num_ranks)[:, 0].sum()), in_order, bins


def is_padded(model: Model) -> bool:
    return model.family == "hugging_face"


def quadratic_cost(model: Model) -> float:
    """Return attention FLOPs per squared sample length, divided by matrix FLOPs per token."""
    return model.num_layers * model.num_heads * model.head_dim / _active_matrices(model)


def _active_matrices(model: Model) -> int:
    heads = model.num_heads * model.head_dim
    attention = model.hidden_size * (2 * heads + 2 * model.num_kv_heads * model.head_dim)
    if (mla := model.mla) is not None:
        attention = mla.q_lora_rank * (model.hidden_size + heads)
        attention += model.hidden_size * (mla.kv_lora_rank + mla.rope_head_dim)
        up = mla.kv_lora_rank * (mla.nope_head_dim + mla.value_head_dim)
        attention += model.num_heads * (up + mla.value_head_dim * model.hidden_size)
    width = model.intermediate_size
    if model.moe is not None:
        width = model.moe.num_experts_per_token * model.moe.expert_intermediate_size
    layer = attention + 3 * model.hidden_size * width
    return model.num_layers * layer + model.vocab_size * model.hidden_size


def attention_cost(model: Model, lengths: np.ndarray) -> np.ndarray:
    """Return each sample's sparse attention FLOPs, divided by matrix FLOPs per token.

    Indexers score all earlier tokens, without a backward pass. Attention reads at most `top_k`
    tokens.
    """
    mla, n = model.latent, lengths.astype(np.float64)
    indexer = mla.indexer
    assert indexer is not None
    num_indexers = (indexer.types or ["full"] * model.num_layers).count("full")
    scores = num_indexers * indexer.num_heads * indexer.head_dim * n**2 / 2
    most = np.minimum(n, indexer.top_k)
    keys = most**2 / 2 + (n - most) * most
    width = 2 * mla.kv_lora_rank + mla.rope_head_dim
    core = 3 * model.num_layers * model.num_heads * width * keys
    return (scores + core) / (3 * _active_matrices(model))


class LazyMicroBatches(Sequence[MicroBatch]):
    """Micro-batches made at each access, to save memory. `make` must be deterministic."""

    def __init__(self, length: int, make: Callable[[int], MicroBatch]) -> None:
        self._length = length
        self._make = make

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, index: slice) -> "LazyMicroBatches": ...
    def __getitem__(self, index: "int | slice") -> "MicroBatch | LazyMicroBatches":
        if isinstance(index, slice):
            chosen = range(self._length)[index]
            return LazyMicroBatches(len(chosen), lambda at: self._make(chosen[at]))
        if not 0 <= index < self._length:
            raise IndexError(f"micro-batch {index} of {self._length}")
        return self._make(index)


def micro_batches(documents: Sequence[Columns], plan: Plan) -> list[LazyMicroBatches]:
    """Return micro-batches `[rank][micro_step]`, each a list of documents."""
    empty = [documents[0].select([])] if len(documents) else []

    def of_rank(steps: list[np.ndarray]) -> LazyMicroBatches:
        def make(at: int) -> list[Columns]:
            return [documents[i] for i in steps[at].tolist()] or empty

        return LazyMicroBatches(len(steps), make)

    return [of_rank(steps) for steps in plan]
