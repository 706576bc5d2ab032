"""Compute fingerprint shares of many slices with Triton.

`fingerprint` defines the symbols. A group is GROUP consecutive elements. If a slice's rows are
whole groups, the kernel `_groups` multiplies elements by 32-bit halves of k. With W-bit elements
and u = b + 2^(W−1) ≥ 0:

    Σ_r (b_r + 1) · k(r) = Σ_r u_r · k(r) − (2^(W−1) − 1) · Σ_r k(r)
    u · k = u · low(k) + 2^32 · (u · high(k) mod 2^32)  mod 2^64
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from orrery.wire.fingerprint import FACTORS, FIRST, GOLDEN, GROUP, MASK, SECOND

BLOCK, STEPS = 4096, 8  # elements per block, blocks per program of `_groups`
WARPS, WARPS_BY_ELEMENT = 2, 8  # warps of `_groups` and `_elements`, fastest on an H200
WORD_BYTES, LOAD_BYTES = 4, 16
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Rows(NamedTuple):
    """A slice whose first element is element `begin` of the buffer and `origin` of the tensor.

    In the tensor, rows of `num_columns` elements start `row_stride` elements apart.
    """

    begin: int
    num_elements: int
    num_columns: int
    row_stride: int
    origin: int

    def has_whole_groups(self, itemsize: int) -> bool:
        rows_fit = (self.num_columns | self.row_stride | self.origin) % GROUP == 0
        aligned = rows_fit and self.begin * itemsize % LOAD_BYTES == 0
        return aligned and itemsize <= WORD_BYTES


@triton.jit
def _mix(index, GOLDEN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    value = (index + 1).to(tl.uint64) * GOLDEN
    value = (value ^ (value >> 30)) * FIRST
    value = (value ^ (value >> 27)) * SECOND
    return (value ^ (value >> 31)) | 1


@triton.jit
def _position(run, columns, stride, origin):
    index = origin + run
    if stride:
        row = run // columns
        index = origin + row.to(tl.int64) * stride + (run - row * columns)
    return index


@triton.jit
def _groups(
    words, low_factors, high_factors, slice_of, first_of,
    begin, num_groups, num_columns, row_stride, origin, out,
    BITS: tl.constexpr, SIGNS: tl.constexpr, CORRECTION: tl.constexpr, LOAD: tl.constexpr,
    STEPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    GOLDEN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Add each slice's share to `out`. Rows must be whole groups.

    `begin` counts 32-bit words, a multiple of LOAD. All other sizes count groups.
    """
    PARTS: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = GROUP // PARTS
    GROUPS: tl.constexpr = BLOCK // GROUP
    program = tl.program_id(0)
    which = tl.load(slice_of + program)
    first, num = tl.load(first_of + program), tl.load(num_groups + which)
    start = tl.multiple_of(tl.load(begin + which), LOAD)
    columns, stride, place = (
        tl.load(num_columns + which),
        tl.load(row_stride + which),
        tl.load(origin + which),
    )
    of_load = tl.arange(0, LOAD)[None, :]
    total = tl.zeros((GROUPS,), tl.int64)
    for block in tl.range(first, min(first + STEPS * GROUPS, num), GROUPS):
        group = block + tl.arange(0, GROUPS)
        here = group < num
        at = start + (group * WORDS)[:, None] + of_load
        low = tl.zeros((GROUPS, LOAD), tl.uint64)
        high = tl.zeros((GROUPS, LOAD), tl.uint32)
        for load in tl.static_range(WORDS // LOAD):
            word = (
                tl.load(words + at + load * LOAD, mask=here[:, None], other=0).to(
                    tl.uint32, bitcast=True
                )
                ^ SIGNS
            )
            for part in tl.static_range(PARTS):
                bits = word >> (part * BITS)
                if part < PARTS - 1:
                    bits = bits & ((1 << BITS) - 1)
                factor = part * WORDS + load * LOAD + of_load
                low += bits.to(tl.uint64) * tl.load(low_factors + factor).to(
                    tl.uint32, bitcast=True
                ).to(tl.uint64)
                high += bits * tl.load(high_factors + factor).to(tl.uint32, bitcast=True)
        sums = tl.sum(low, axis=1) + (tl.sum(high, axis=1).to(tl.uint64) << 32) + CORRECTION
        term = (sums * _mix(_position(group, columns, stride, place), GOLDEN, FIRST, SECOND)).to(
            tl.int64
        )
        total += tl.where(here, term, 0)
    tl.atomic_add(out + which, tl.sum(total))


@triton.jit
def _elements(
    buffer, factors, slice_of, first_of,
    begin, num_elements, num_columns, row_stride, origin, out,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
    GOLDEN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    which = tl.load(slice_of + program)
    element = tl.load(first_of + program) + tl.arange(0, BLOCK)
    here = element < tl.load(num_elements + which)
    index = _position(
        element, tl.load(num_columns + which), tl.load(row_stride + which), tl.load(origin + which)
    )
    bits = tl.load(buffer + tl.load(begin + which) + element, mask=here, other=0).to(tl.int64)
    scaled = ((bits + 1) * tl.load(factors + index % GROUP)).to(tl.uint64)
    term = (scaled * _mix(index // GROUP, GOLDEN, FIRST, SECOND)).to(tl.int64)
    tl.atomic_add(out + which, tl.sum(tl.where(here, term, 0)))


class KernelLaunch(NamedTuple):
    kernel: Any
    integers: torch.dtype  # view of the buffer
    factors: list[torch.Tensor]
    slice_of: torch.Tensor  # i32 [programs], slice index
    first_of: torch.Tensor  # i32 [programs], first element or group in the slice
    rows: list[torch.Tensor]  # one tensor [slices] per field of `Rows`
    constants: dict[str, int]


class RowFingerprints:
    def __init__(self, rows: Sequence[Rows], itemsize: int, device: torch.device) -> None:
        self._num = len(rows)
        filled = [which for which, each in enumerate(rows) if each.num_elements]
        groups = [which for which in filled if rows[which].has_whole_groups(itemsize)]
        elements = [which for which in filled if not rows[which].has_whole_groups(itemsize)]
        self._launches = [_of_groups(rows, groups, itemsize, device)] if groups else []
        if elements:
            factors = torch.from_numpy(FACTORS.view(np.int64)).to(device)
            tables = _tables(rows, elements, 1, BLOCK, device)
            warps = {"num_warps": WARPS_BY_ELEMENT}
            launch = KernelLaunch(_elements, INTEGERS[itemsize], [factors], *tables, warps)
            self._launches.append(launch)

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(self._num, dtype=torch.int64, device=buffer.device)
        for each in self._launches:
            size = each.integers.itemsize
            data = buffer[: buffer.numel() // size * size].view(each.integers)
            each.kernel[(len(each.slice_of),)](
                data, *each.factors, each.slice_of, each.first_of, *each.rows, out,
                **each.constants, GROUP=GROUP, BLOCK=BLOCK,
                GOLDEN=GOLDEN, FIRST=FIRST, SECOND=SECOND,
            )  # fmt: skip
        return out


def _of_groups(
    rows: Sequence[Rows], chosen: list[int], itemsize: int, device: torch.device
) -> KernelLaunch:
    bits, parts = 8 * itemsize, WORD_BYTES // itemsize
    slice_of, first_of, (begin, *others) = _tables(rows, chosen, GROUP, STEPS * BLOCK, device)
    factors = FACTORS.reshape(-1, parts).T.reshape(-1)
    halves = [
        (factors >> np.uint64(shift) & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)
        for shift in (0, 32)
    ]
    constants = {
        "BITS": bits,
        "SIGNS": sum(1 << (bits * part + bits - 1) for part in range(parts)),
        "CORRECTION": -((1 << (bits - 1)) - 1) * sum(FACTORS.tolist()) & MASK,
        "LOAD": LOAD_BYTES // WORD_BYTES,
        "STEPS": STEPS,
        "num_warps": WARPS,
    }
    return KernelLaunch(
        _groups,
        torch.int32,
        [torch.from_numpy(half).to(device) for half in halves],
        slice_of,
        first_of,
        [begin * itemsize // WORD_BYTES, *others],
        constants,
    )


def _tables(
    rows: Sequence[Rows], chosen: list[int], run: int, taken: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Divide slices among Triton programs of `taken` elements each.

    All results except `begin` and `slice_of` count runs of `run` elements.
    """
    step = taken // run
    num_programs = -(-np.array([rows[which].num_elements // run for which in chosen]) // step)
    slice_of = np.repeat(chosen, num_programs)
    first_of = (
        np.arange(len(slice_of)) - np.repeat(num_programs.cumsum() - num_programs, num_programs)
    ) * step
    dtypes = (torch.int64, torch.int32, torch.int32, torch.int64, torch.int64)
    begin, *others = zip(*rows, strict=True)
    counts = [begin, *(tuple(value // run for value in values) for values in others)]
    of_slices = [
        torch.tensor(values, dtype=dtype, device=device)
        for values, dtype in zip(counts, dtypes, strict=True)
    ]
    return (
        torch.tensor(slice_of, dtype=torch.int32, device=device),
        torch.tensor(first_of, dtype=torch.int32, device=device),
        of_slices,
    )
