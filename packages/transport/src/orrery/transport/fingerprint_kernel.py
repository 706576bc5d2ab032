"""Fingerprints of many slices of a buffer in one pass on a GPU (Triton). `fingerprint.array_fingerprint` is the referee.

A slice is rows of a tensor's row-major order: `num_columns` elements that follow one another, then `row_stride` positions further the next.
Each program takes BLOCK elements of one slice and adds its sum to the slice's share; sums are mod 2^64, so their order does not matter.

Where a slice's rows are whole groups of the formula (all but odd shapes), a group's position and its m are worked out once, and bytes are
loaded 16 at a time: 18 instructions a bfloat16 element, by the disassembly for compute capability 9.0; half of what the bytes allow is
measured (`benchmarks/transport/fingerprint_gpu.json`).
Element by element they are 80.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from orrery.transport.fingerprint import FACTORS, FIRST, GOLDEN, GROUP, SECOND

BLOCK = 8192
LOAD_BYTES = 16
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Rows(NamedTuple):
    """A slice, in elements: where it begins in the buffer, how many there are, and where they stand in the whole tensor."""

    begin: int
    num_elements: int
    num_columns: int
    row_stride: int
    origin: int

    def has_whole_groups(self, itemsize: int) -> bool:
        return (self.num_columns | self.row_stride | self.origin) % GROUP == 0 and self.begin * itemsize % LOAD_BYTES == 0


@triton.jit
def _mix(index, GOLDEN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    value = (index + 1).to(tl.uint64) * GOLDEN
    value = (value ^ (value >> 30)) * FIRST
    value = (value ^ (value >> 27)) * SECOND
    return (value ^ (value >> 31)) | 1


@triton.jit
def _shares(
    buffer, factors, slice_of, first_of, begin, num_elements, num_columns, row_stride, origin, out,
    RUN: tl.constexpr, BEGINS_AT: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    GOLDEN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """In runs of RUN elements, each in one group: `first_of` and a slice's numbers. But `begin` is in elements, a multiple of BEGINS_AT."""
    RUNS: tl.constexpr = BLOCK // RUN
    RUNS_A_GROUP: tl.constexpr = GROUP // RUN
    program = tl.program_id(0)
    which = tl.load(slice_of + program)
    run = tl.load(first_of + program) + tl.arange(0, RUNS)
    here = run < tl.load(num_elements + which)
    columns = tl.load(num_columns + which)
    row = run // columns
    index = tl.load(origin + which) + row.to(tl.int64) * tl.load(row_stride + which) + (run - row * columns)
    element = tl.arange(0, RUN)
    at = tl.multiple_of(tl.load(begin + which), BEGINS_AT) + (run * RUN)[:, None] + element[None, :]
    bits = tl.load(buffer + at, mask=here[:, None], other=0).to(tl.int64)
    factor = tl.load(factors + (index % RUNS_A_GROUP)[:, None] * RUN + element[None, :])
    sums = tl.sum((bits + 1) * factor, axis=1).to(tl.uint64)
    term = (sums * _mix(index // RUNS_A_GROUP, GOLDEN, FIRST, SECOND)).to(tl.int64)
    tl.atomic_add(out + which, tl.sum(tl.where(here, term, 0)))


class RowFingerprints:
    """Made once for rows of elements of one size."""

    def __init__(self, rows: Sequence[Rows], itemsize: int, device: torch.device) -> None:
        self._integers, self._num = INTEGERS[itemsize], len(rows)
        self._factors = torch.from_numpy(FACTORS.view(np.int64)).to(device)
        self._passes = []
        for run in (GROUP, 1):
            chosen = [which for which, each in enumerate(rows) if each.num_elements and each.has_whole_groups(itemsize) == (run == GROUP)]
            if chosen:
                begins_at = LOAD_BYTES // itemsize if run == GROUP else 1
                self._passes.append((run, begins_at, *_tables(rows, chosen, run, device)))

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """i64 [rows]: the shares; `buffer` is u8."""
        out = torch.zeros(self._num, dtype=torch.int64, device=buffer.device)
        whole = buffer[: buffer.numel() // self._integers.itemsize * self._integers.itemsize].view(self._integers)
        for run, begins_at, slice_of, first_of, columns in self._passes:
            _shares[(len(slice_of),)](
                whole, self._factors, slice_of, first_of, *columns, out,
                RUN=run, BEGINS_AT=begins_at, GROUP=GROUP, BLOCK=BLOCK, GOLDEN=GOLDEN, FIRST=FIRST, SECOND=SECOND,
            )  # fmt: skip
        return out


def _tables(
    rows: Sequence[Rows], chosen: list[int], run: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """What `_shares` looks up: of every program its slice and the first run; of every slice its rows."""
    blocks = [(which, first) for which in chosen for first in range(0, rows[which].num_elements // run, BLOCK // run)]
    slice_of = torch.tensor([which for which, _ in blocks], dtype=torch.int32, device=device)
    first_of = torch.tensor([first for _, first in blocks], dtype=torch.int32, device=device)
    dtypes = (torch.int64, torch.int32, torch.int32, torch.int64, torch.int64)
    begin, *others = zip(*rows, strict=True)
    counts = [begin, *(tuple(value // run for value in values) for values in others)]
    return slice_of, first_of, [torch.tensor(values, dtype=dtype, device=device) for values, dtype in zip(counts, dtypes, strict=True)]
