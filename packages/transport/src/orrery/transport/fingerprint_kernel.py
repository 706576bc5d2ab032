"""Fingerprints of many slices of a buffer in one pass on a GPU (Triton). `fingerprint.array_fingerprint` is the referee.

A slice is rows of a tensor's row-major order: `num_columns` elements that follow one another, then `row_stride` positions further the next.
Each program takes BLOCK elements of one slice and adds its sum to the slice's share; sums are mod 2^64, so their order does not matter.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from orrery.transport.fingerprint import FIRST, GOLDEN, SECOND

BLOCK = 4096
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Rows(NamedTuple):
    """A slice, in elements: where it begins in the buffer, how many there are, and where they stand in the whole tensor."""

    begin: int
    num_elements: int
    num_columns: int
    row_stride: int
    origin: int


@triton.jit
def _shares(
    buffer, slice_of, first_of, begin, num_elements, num_columns, row_stride, origin, out,
    GOLDEN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    which = tl.load(slice_of + program)
    local = tl.load(first_of + program) + tl.arange(0, BLOCK)
    here = local < tl.load(num_elements + which)
    bits = tl.load(buffer + tl.load(begin + which) + local, mask=here, other=0).to(tl.int64)
    columns = tl.load(num_columns + which)
    row = local // columns
    index = tl.load(origin + which) + row.to(tl.int64) * tl.load(row_stride + which) + (local - row * columns)
    value = (index + 1).to(tl.uint64) * GOLDEN
    value = (value ^ (value >> 30)) * FIRST
    value = (value ^ (value >> 27)) * SECOND
    value = (value ^ (value >> 31)) | 1
    term = ((bits + 1).to(tl.uint64) * value).to(tl.int64)
    tl.atomic_add(out + which, tl.sum(tl.where(here, term, 0)))


class RowFingerprints:
    """Made once for rows of elements of one size."""

    def __init__(self, rows: Sequence[Rows], itemsize: int, device: torch.device) -> None:
        self._integers, self._num = INTEGERS[itemsize], len(rows)
        blocks = [(index, first) for index, each in enumerate(rows) for first in range(0, each.num_elements, BLOCK)]
        self._slice_of = torch.tensor([index for index, _ in blocks], dtype=torch.int32, device=device)
        self._first_of = torch.tensor([first for _, first in blocks], dtype=torch.int32, device=device)
        dtypes = (torch.int64, torch.int32, torch.int32, torch.int64, torch.int64)
        fields = zip(*rows, strict=True)
        self._columns = [torch.tensor(values, dtype=dtype, device=device) for values, dtype in zip(fields, dtypes, strict=True)]

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """i64 [rows]: the shares; `buffer` is u8."""
        out = torch.zeros(self._num, dtype=torch.int64, device=buffer.device)
        if len(self._slice_of):
            whole = buffer[: buffer.numel() // self._integers.itemsize * self._integers.itemsize].view(self._integers)
            _shares[(len(self._slice_of),)](
                whole, self._slice_of, self._first_of, *self._columns, out,
                GOLDEN=GOLDEN, FIRST=FIRST, SECOND=SECOND, BLOCK=BLOCK,
            )  # fmt: skip
        return out
