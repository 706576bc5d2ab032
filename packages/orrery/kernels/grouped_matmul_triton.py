"""Triton kernels for LoRA adapters in grouped products, from x [M, K] to y [M, N].

Sums are in float32. x a[e]ᵀ is rounded to x's dtype before the product with b[e]ᵀ.
"""

# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl
from torch import Tensor

MAX_RANK = 64
# Fastest tile sizes on an H200
ROWS, INNER, OUTER, GRADIENT_WIDTH = 64, 64, 128, 128
LAUNCH = {"num_warps": 4, "num_stages": 3}


def add_low_rank(
    y_MN: Tensor, x_MK: Tensor, a_ERK: Tensor, b_ENR: Tensor, ends_E: Tensor
) -> Tensor:
    """Add (x a[e]ᵀ) b[e]ᵀ to each group's rows of y. Return x a[e]ᵀ [M, R].

    y, x, a and b have one dtype. y and x are contiguous.
    """
    num_rows, inner = x_MK.shape
    num_groups, rank, _ = a_ERK.shape
    narrow_MR = x_MK.new_empty(num_rows, rank)
    if num_rows:
        _grouped_low_rank[(triton.cdiv(num_rows, ROWS) + num_groups,)](
            y_MN, x_MK, a_ERK, b_ENR, narrow_MR, ends_E, num_groups, y_MN.shape[1], inner,
            *a_ERK.stride(), *b_ENR.stride(), R=rank, RANK=_padded(rank),
            GROUPS=triton.next_power_of_2(num_groups),
            ROWS=ROWS, INNER=INNER, OUTER=OUTER, **LAUNCH,
        )  # fmt: skip
    return narrow_MR


def narrow_product(x_MK: Tensor, a_ERK: Tensor, ends_E: Tensor) -> Tensor:
    y_M0, b_E0R = x_MK.new_empty(len(x_MK), 0), a_ERK.new_empty(len(a_ERK), 0, a_ERK.shape[1])
    return add_low_rank(y_M0, x_MK, a_ERK, b_E0R, ends_E)


def thin_gradient(wide_MW: Tensor, narrow_MR: Tensor, ends_E: Tensor, narrow_first: bool) -> Tensor:
    """Return each group's wideᵀ @ narrow [E, W, R], or narrowᵀ @ wide [E, R, W] if `narrow_first`.

    Inputs must be contiguous.
    """
    num_groups, width, rank = ends_E.shape[0], wide_MW.shape[1], narrow_MR.shape[1]
    sides, strides = ((rank, width), (1, width)) if narrow_first else ((width, rank), (rank, 1))
    out = wide_MW.new_empty((num_groups, *sides))
    _grouped_thin_gradient[(triton.cdiv(width, GRADIENT_WIDTH), num_groups)](
        out, wide_MW, narrow_MR, ends_E, width, *strides, R=rank, RANK=_padded(rank),
        ROWS=ROWS, WIDTH=GRADIENT_WIDTH, **LAUNCH,
    )  # fmt: skip
    return out


def _padded(rank: int) -> int:
    return max(16, triton.next_power_of_2(rank))  # tensor cores need at least 16 columns


@triton.jit
def _grouped_low_rank(
    y, x, a, b, narrow, ends, num_groups, width, inner,
    a_group, a_rank, a_inner, b_group, b_width, b_rank,
    R: tl.constexpr, RANK: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr,
):  # fmt: skip
    each = tl.arange(0, GROUPS)
    end = tl.load(ends + each, mask=each < num_groups, other=0)
    begin = tl.load(ends + each - 1, mask=(each > 0) & (each < num_groups), other=0)
    tiles = tl.where(each < num_groups, (end - begin + ROWS - 1) // ROWS, 0)
    tiles_until = tl.cumsum(tiles, 0)
    tile = tl.program_id(0)
    group = tl.sum((tiles_until <= tile).to(tl.int32), 0)
    if group < num_groups:
        mine = each == group
        first = tl.sum(tl.where(mine, begin + (tile - tiles_until + tiles) * ROWS, 0), 0)
        past = tl.sum(tl.where(mine, end, 0), 0)
        row = first + tl.arange(0, ROWS)
        here = (row < past)[:, None]
        row = row.to(tl.int64)[:, None]
        rank = tl.arange(0, RANK)
        a_here = a + group.to(tl.int64) * a_group + rank[None, :] * a_rank
        low = tl.zeros([ROWS, RANK], tl.float32)
        for start in range(0, inner, INNER):
            column = start + tl.arange(0, INNER)
            x_tile = tl.load(
                x + row * inner + column[None, :], mask=here & (column < inner)[None, :], other=0.0
            )
            a_tile = tl.load(
                a_here + column[:, None] * a_inner,
                mask=(column < inner)[:, None] & (rank < R)[None, :],
                other=0.0,
            )
            low = tl.dot(x_tile, a_tile, low)
        low = low.to(x.dtype.element_ty)
        tl.store(narrow + row * R + rank[None, :], low, mask=here & (rank < R)[None, :])
        b_here = b + group.to(tl.int64) * b_group + rank[:, None] * b_rank
        for start in range(0, width, OUTER):
            column = start + tl.arange(0, OUTER)
            inside = here & (column < width)[None, :]
            b_tile = tl.load(
                b_here + column[None, :] * b_width,
                mask=(rank < R)[:, None] & (column < width)[None, :],
                other=0.0,
            )
            place = y + row * width + column[None, :]
            value = tl.dot(low, b_tile, tl.load(place, mask=inside, other=0.0).to(tl.float32))
            tl.store(place, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _grouped_thin_gradient(
    out, wide, narrow, ends, width, wide_stride, narrow_stride,
    R: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    begin = tl.load(ends + group - 1, mask=group > 0, other=0)
    end = tl.load(ends + group)
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    rank = tl.arange(0, RANK)
    total = tl.zeros([WIDTH, RANK], tl.float32)
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        here = (row < end)[:, None]
        row = row.to(tl.int64)[:, None]
        wide_tile = tl.load(
            wide + row * width + column[None, :], mask=here & (column < width)[None, :], other=0.0
        )
        narrow_tile = tl.load(
            narrow + row * R + rank[None, :], mask=here & (rank < R)[None, :], other=0.0
        )
        total = tl.dot(tl.trans(wide_tile), narrow_tile, total)
    place = (
        out
        + group.to(tl.int64) * width * R
        + column[:, None] * wide_stride
        + rank[None, :] * narrow_stride
    )
    tl.store(
        place, total.to(out.dtype.element_ty), mask=(column < width)[:, None] & (rank < R)[None, :]
    )
