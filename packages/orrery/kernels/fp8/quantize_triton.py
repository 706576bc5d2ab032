"""Triton kernels of FP8 quantization. Each program quantizes a part of a 128 × 128 tile.

As in vLLM, activation rows are divided by their scales with correct rounding (Markstein 1990,
theorem 8.3), and weights are multiplied by approximate reciprocals.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
DTYPE = torch.float8_e4m3fn
# (rows or columns, warps) per program
ROWS, COLUMNS = (32, 4), (64, 4)


def quantize(
    x: Tensor, groups, has_rows: bool, has_columns: bool, token_M=None, score_M=None
) -> tuple[Tensor, ...]:
    num_rows, width = x.shape
    if token_M is not None:
        num_rows = token_M.shape[0]
    if score_M is not None:
        width //= 2
    num_tiles, num_blocks = triton.cdiv(num_rows, BLOCK), width // BLOCK
    options = {"device": x.device}
    rows_stride = triton.cdiv(num_rows, 4) * 4  # DeepGEMM needs strides of multiples of 16 bytes
    of_rows, of_columns = int(has_rows), int(has_columns)
    value = torch.empty(of_rows * num_rows, width, dtype=DTYPE, **options)
    scale = torch.empty(of_rows * num_blocks, rows_stride, dtype=torch.float32, **options)
    shape = (width, num_tiles * BLOCK) if groups is None else (width * num_tiles * BLOCK,)
    value_t = torch.empty(shape if has_columns else 0, dtype=DTYPE, **options)
    scale_t = torch.empty(of_columns * num_tiles, width, dtype=torch.float32, **options)
    tiles = None if groups is None else _tiles(groups, num_tiles)
    # One launch for both would be slower, and ptxas 12.8 miscompiles it.
    wanted = [flag for flag in (True, False) if (has_rows if flag else has_columns)]
    for with_rows in wanted if num_rows and width else ():
        side, num_warps = ROWS if with_rows else COLUMNS
        if not with_rows and score_M is None:
            num_warps //= 2
        _quantize[(num_tiles, num_blocks * (BLOCK // side))](
            x,
            value,
            scale,
            value_t,
            scale_t,
            tiles,
            token_M,
            score_M,
            num_rows,
            width,
            rows_stride,
            num_tiles * BLOCK,
            HAS_TOKENS=token_M is not None,
            HAS_SCORES=score_M is not None,
            IS_GROUPED=groups is not None,
            HAS_ROWS=with_rows,
            HAS_COLUMNS=not with_rows,
            SIDE=side,
            num_warps=num_warps,
        )
    return value, scale.T[:num_rows], value_t, scale_t


def _tiles(groups, num_tiles: int) -> Tensor:
    """Return i32 [tiles, 3]: the tile's real rows, its group's first row, its group's padded rows.

    Tiles after the last group have −1 real rows.
    """
    first_T = torch.arange(num_tiles, device=groups.ends_E.device, dtype=torch.int32) * BLOCK
    group_T = torch.searchsorted(groups.ends_E, first_T, right=True)
    last = groups.ends_E.shape[0] - 1
    inside_T = group_T <= last
    group_T = group_T.clamp(max=last)
    start_T = F.pad(groups.ends_E[:-1], (1, 0))[group_T]
    real_T = (start_T + groups.counts_E[group_T] - first_T).clamp(0, BLOCK)
    real_T = torch.where(inside_T, real_T, -1)
    return torch.stack((real_T, start_T, groups.ends_E[group_T] - start_T), 1).int().contiguous()


@triton.jit
def _quantize(
    x,
    value,
    scale,
    value_t,
    scale_t,
    tiles,
    token,
    score,
    num_rows,
    width,
    rows_stride,
    length,
    HAS_TOKENS: tl.constexpr,
    HAS_SCORES: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    SIDE: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    block = (tl.program_id(1) // (128 // SIDE)).to(tl.int64)
    some = tl.program_id(1) % (128 // SIDE) * SIDE + tl.arange(0, SIDE)
    here = tl.arange(0, 128)
    start = tile * 0
    if IS_GROUPED:
        num_real = tl.load(tiles + tile * 3)
        start += tl.multiple_of(tl.load(tiles + tile * 3 + 1), 128)
        length = tl.multiple_of(tl.load(tiles + tile * 3 + 2), 128)
    else:
        num_real = tl.minimum(num_rows - tile * 128, 128).to(tl.int32)
    if num_real >= 0:
        if HAS_ROWS:
            loaded = _tile(
                x, token, score, tile, block, some, here, num_real, width, HAS_TOKENS, HAS_SCORES
            )
            number = loaded.to(tl.float32)
            top = tl.maximum(tl.max(tl.abs(number), axis=1), 1e-10)
            unit = tl.div_rn(top, tl.full([SIDE], 448.0, tl.float32))
            inverse = tl.broadcast_to(_inverse(unit, SIDE)[:, None], (SIDE, 128))
            divisor = tl.broadcast_to(unit[:, None], (SIDE, 128))
            ratio = number * inverse
            ratio = tl.fma(tl.fma(-divisor, ratio, number), inverse, ratio)
            is_row = some < num_rows - tile * 128
            first = tile * 128 * width + block * 128
            offset = some[:, None] * width + here[None, :]
            rounded = ratio.to(value.dtype.element_ty)
            tl.store(value + first + offset, rounded, mask=is_row[:, None])
            tl.store(scale + block * rows_stride + tile * 128 + some, unit, mask=is_row)
        if HAS_COLUMNS:
            loaded = _tile(
                x, token, score, tile, block, here, some, num_real, width, HAS_TOKENS, HAS_SCORES
            )
            number = tl.trans(loaded).to(tl.float32)
            top = tl.maximum(tl.max(tl.abs(number), axis=1), 1e-10)
            unit = top * 0.002232142857142857
            ratio = number * tl.broadcast_to(_inverse(unit, SIDE)[:, None], (SIDE, 128))
            first_t = start * width + block * 128 * length + tile * 128 - start
            offset_t = some[:, None] * length + here[None, :]
            tl.store(value_t + first_t + offset_t, ratio.to(value_t.dtype.element_ty))
            tl.store(scale_t + tile * width + block * 128 + some, unit)


@triton.jit
def _tile(
    x,
    token,
    score,
    tile,
    block,
    row,
    column,
    num_real,
    width,
    HAS_TOKENS: tl.constexpr,
    HAS_SCORES: tl.constexpr,
):
    """Load a tile of x, x[token] or swiglu_rows(x, score). Padding rows are zero."""
    # Tile offsets need 64 bits. 32-bit offsets inside a tile save registers.
    is_real = row < num_real
    if HAS_TOKENS:
        token_row = tl.load(token + tile * 128 + row, mask=is_real, other=0).to(tl.int64)
        source = x + block * 128 + token_row[:, None] * width + column[None, :]
        return tl.load(source, mask=is_real[:, None], other=0.0)
    elif HAS_SCORES:
        source = x + tile * 256 * width + block * 128 + row[:, None] * 2 * width + column[None, :]
        gate = tl.load(source, mask=is_real[:, None], other=0.0).to(tl.float32)
        up = tl.load(source + width, mask=is_real[:, None], other=0.0).to(tl.float32)
        weight = tl.load(score + tile * 128 + row, mask=is_real, other=0.0).to(tl.float32)
        # Round to x's dtype, as `swiglu_rows` does.
        return (gate * tl.sigmoid(gate) * up * weight[:, None]).to(x.dtype.element_ty)
    else:
        source = x + tile * 128 * width + block * 128 + (row[:, None] * width + column[None, :])
        return tl.load(source, mask=is_real[:, None], other=0.0)


@triton.jit
def _inverse(unit, SIDE: tl.constexpr):
    return tl.div_rn(tl.full([SIDE], 1.0, tl.float32), unit)


def quantize_weight(weight_NK: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *stack, n, k = weight_NK.shape
    value = torch.empty_like(weight_NK, dtype=DTYPE)
    scale = weight_NK.new_empty(*stack, n // BLOCK, k // BLOCK, dtype=torch.float32)
    value_t = weight_NK.new_empty(*stack, k, n, dtype=DTYPE)
    scale_t = weight_NK.new_empty(*stack, k // BLOCK, n // BLOCK, dtype=torch.float32)
    grid = (n // BLOCK, k // BLOCK, weight_NK.numel() // (n * k))
    if weight_NK.numel():
        _quantize_weight[grid](weight_NK, value, scale, value_t, scale_t, n, k, num_warps=8)
    return value, scale, value_t, scale_t


@triton.jit
def _quantize_weight(weight, value, scale, value_t, scale_t, n, k):
    row_block, column_block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    stack = tl.program_id(2).to(tl.int64) * n * k
    here = tl.arange(0, 128)
    first = stack + row_block * 128 * k + column_block * 128
    offset = here[:, None] * k + here[None, :]
    loaded = tl.load(weight + first + offset)
    number = loaded.to(tl.float32)
    top = tl.maximum(tl.max(tl.max(tl.abs(number), axis=1), axis=0), 1e-4)
    unit = top * 0.002232142857142857
    inverse = 1.0 / unit
    tl.store(value + first + offset, (number * inverse).to(value.dtype.element_ty))
    # Transpose before rounding, because ptxas 12.8 reads unwritten registers if a rounded tile is
    # stored both plain and transposed (tests/kernels/test_kernels_compiled.py).
    turned = tl.trans(loaded).to(tl.float32) * inverse
    first_t = stack + column_block * 128 * n + row_block * 128
    offset_t = here[:, None] * n + here[None, :]
    tl.store(value_t + first_t + offset_t, turned.to(value_t.dtype.element_ty))
    blocks = stack // 16384
    tl.store(scale + blocks + row_block * (k // 128) + column_block, unit)
    tl.store(scale_t + blocks + column_block * (n // 128) + row_block, unit)
