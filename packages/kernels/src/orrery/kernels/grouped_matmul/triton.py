"""Rows that belong to no group are cleared: programs before the last group's end return at once, so only those rows are written."""

# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl
from torch import Tensor

ROWS, MAX_BLOCK = 16, 1024


def clear_rest(out_MN: Tensor, ends_E: Tensor) -> None:
    """Zeros in the rows of out [M, N], contiguous, from ends[-1] on."""
    num_rows, width = out_MN.shape
    if out_MN.numel():
        block = min(triton.next_power_of_2(width), MAX_BLOCK)
        _clear_rest[(triton.cdiv(num_rows, ROWS),)](out_MN, ends_E[-1:], num_rows, width, ROWS=ROWS, BLOCK=block)


@triton.jit
def _clear_rest(out, end, num_rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.load(end)
    if (tl.program_id(0) + 1) * ROWS > first:
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = ((row >= first) & (row < num_rows))[:, None] & (column < width)[None, :]
            zeros = tl.zeros([ROWS, BLOCK], out.dtype.element_ty)
            tl.store(out + row[:, None] * width + column[None, :], zeros, mask=inside)
