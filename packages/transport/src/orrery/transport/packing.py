"""Packing: which samples make one micro-batch, on which rank, at which micro-step.

- In: token lengths of all samples of a batch.
- Out: `[rank][micro_step]` sample indices; documents stay apart (a micro-batch is a list of documents, not a stream).
- Always: every sample exactly once; no micro-batch over `max_tokens`, padding counted where a model pads; every rank has the same number
  of micro-steps. Where none pads they are the fewest that best-fit decreasing finds (at most 11/9 of the optimum plus one, rounded up to
  whole micro-steps).
- Why by cost: collectives run in lock-step, so micro-step m lasts as long as its costliest rank. Micro-batches of like
  cost are put at the same micro-step, and samples are spread so that all micro-batches cost about the same.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from heapq import heappop, heappush, heapreplace
from typing import overload

import numpy as np

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Manifest, Model
from orrery.transport.column_bytes import MicroBatch
from orrery.transport.columns import Columns

Plan = list[list[np.ndarray]]


def pack_for(manifest: Manifest, lengths: np.ndarray) -> Plan:
    """`pack` as this run's trainer takes its micro-batches."""
    model, trainer = manifest.model, manifest.trainer
    limit = trainer.memory.max_tokens_per_micro_batch
    return pack(
        lengths, trainer.mesh.num_data_ranks, limit, quadratic_cost(model), is_padded(model)
    )


def pack(
    lengths: np.ndarray,
    num_ranks: int,
    max_tokens: int,
    quadratic: float = 0.0,
    padded: bool = False,
) -> Plan:
    """Sample indices (int64, ascending) as `[rank][micro_step]`; an empty array is a dummy step.

    `lengths` int64 [num_samples], tokens. The cost of a sample of n tokens is n + quadratic · n²; `quadratic_cost` gives
    the factor for a model. `padded`: the model computes samples as rows of the longest, and those stay within `max_tokens`.
    Raises `OrreryError` for a sample that no micro-batch can hold.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if num_ranks < 1:
        raise OrreryError(f"packing: num_ranks {num_ranks} must be at least 1")
    if len(lengths) == 0:
        return [[] for _ in range(num_ranks)]
    if lengths.min() < 1:
        raise OrreryError(
            f"packing: sample {int(lengths.argmin())} has {int(lengths.min())} tokens; every sample needs at least one"
        )
    if lengths.max() > max_tokens:
        raise OrreryError(
            f"packing: sample {int(lengths.argmax())} has {int(lengths.max())} tokens, more than the {max_tokens} of one micro-batch; "
            f"raise trainer.memory.max_tokens_per_micro_batch to at least {int(lengths.max())}"
        )
    costs = lengths + quadratic * lengths.astype(np.float64) ** 2
    order = np.argsort(-lengths, kind="stable")
    full = (
        _rows_of_like_length(lengths, order, max_tokens)
        if padded
        else _best_fit_decreasing(lengths, order, max_tokens)
    )
    num_bins = -(-(int(full.max()) + 1) // num_ranks) * num_ranks
    even = None if padded else _spread(lengths, costs, order, max_tokens, num_bins)
    plans = [
        _lock_step(bins, costs, num_bins, num_ranks) for bins in (full, even) if bins is not None
    ]
    _, bins_in_order, bins = min(plans, key=lambda plan: plan[0])
    members = np.split(
        np.argsort(bins, kind="stable"), np.cumsum(np.bincount(bins, minlength=num_bins))[:-1]
    )
    return [
        [members[bin_index] for bin_index in bins_in_order[rank::num_ranks]]
        for rank in range(num_ranks)
    ]


def _rows_of_like_length(lengths: np.ndarray, order: np.ndarray, max_tokens: int) -> np.ndarray:
    """Bin of every sample, int64 [num_samples]: longest first, as many into a bin as rows of its first one's length fit."""
    bins = np.empty(len(lengths), dtype=np.int64)
    begin = bin_index = 0
    while begin < len(order):
        end = begin + max_tokens // int(lengths[order[begin]])
        bins[order[begin:end]] = bin_index
        begin, bin_index = end, bin_index + 1
    return bins


def _best_fit_decreasing(lengths: np.ndarray, order: np.ndarray, max_tokens: int) -> np.ndarray:
    """Bin of every sample, int64 [num_samples]: each, longest first, into the fullest bin that still holds it."""
    bins = np.empty(len(lengths), dtype=np.int64)
    rooms: list[
        int
    ] = []  # sorted; room · stride + bin, so that one bisection finds the tightest bin
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
    """Bin of every sample: each, costliest first, into the cheapest bin that holds it; None where none is found.

    The search looks past at most a few full bins a sample on average, so that a batch that fills its bins to the brim
    costs no more than best fit, which then stands.
    """
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
    """(Σ over micro-steps of the costliest rank, bins in the order of their cost, bins): costliest first, so memory peaks early."""
    loads = np.bincount(bins, weights=costs, minlength=num_bins)
    in_order = np.argsort(-loads, kind="stable")
    return float(loads[in_order].reshape(-1, num_ranks)[:, 0].sum()), in_order, bins


def is_padded(model: Model) -> bool:
    """Whether the model computes a micro-batch as rows of its longest sample."""
    return model.family == "hugging_face"


def quadratic_cost(model: Model) -> float:
    """Attention FLOPs a squared token over matrix FLOPs a token, for `pack`: layers · heads · head_dim / active matrix parameters."""
    heads = model.num_heads * model.head_dim
    attention = model.hidden_size * (2 * heads + 2 * model.num_kv_heads * model.head_dim)
    width = (
        model.intermediate_size
        if model.moe is None
        else model.moe.num_experts_per_token * model.moe.expert_intermediate_size
    )
    matrices = (
        model.num_layers * (attention + 3 * model.hidden_size * width)
        + model.vocab_size * model.hidden_size
    )
    return model.num_layers * heads / matrices


class LazyMicroBatches(Sequence[MicroBatch]):
    """`length` micro-batches, each made by `make(index)` when it is asked for, so that a batch is never held whole.

    `make` is called again when a receiver asks again, and must then give the same micro-batch.
    """

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
    """The plan's micro-batches, `[rank][micro_step]`, as parts: nothing is copied until the wire gathers them.

    `documents[i]` holds the one sample that the plan calls i. A dummy step has the same columns, of length 0.
    """
    nothing = [documents[0].select([])] if len(documents) else []

    def of_rank(rank: int) -> LazyMicroBatches:
        return LazyMicroBatches(
            len(plan[rank]), lambda at: [documents[i] for i in plan[rank][at].tolist()] or nothing
        )

    return [of_rank(rank) for rank in range(len(plan))]
