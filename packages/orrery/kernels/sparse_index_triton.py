"""Triton kernels of the indexer: score a chunk of queries, then choose each query's best keys.

C queries of a chunk, K chosen keys. `sparse_index` defines other letters. `_choose` cuts each
query's buffer of keys to the K best whenever it is full.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class IndexTiles(NamedTuple):
    rows: int = 256  # queries × heads in a score tile
    keys: int = 64  # keys in a score tile
    span: int = 4096  # keys per program of `_score`
    warps: int = 8  # for `_score`
    stages: int = 2  # for `_score`
    block: int = 4096  # scores that `_choose` reads at once
    buffer: int = 8192  # minimum entries of a query's buffer
    choose_warps: int = 8
    choose_registers: int | None = None  # maximum registers per thread of `_choose`
    chunk_elements: int = 2**26  # scores per chunk, C·S: 256 MiB in float32


TILES = IndexTiles()
QUANTIZED_ROWS = 32  # rows per program of `_quantize`


def supports(q_THD: Tensor) -> bool:
    _, num_heads, width = q_THD.shape
    sizes = (num_heads, width)
    return width >= 16 and num_heads <= 128 and all(n & (n - 1) == 0 for n in sizes)


def select_keys(
    q_THD: Tensor,
    k_SD: Tensor,
    weights_TH: Tensor,
    first_T: Tensor,
    last_T: Tensor,
    top_k: int,
    tiles: IndexTiles = TILES,
) -> Tensor:
    """Return the keys of `sparse_index.select_keys` in ascending order."""
    num_queries, num_keys = q_THD.shape[0], k_SD.shape[0]
    indices_TK = q_THD.new_full((num_queries, top_k), -1, dtype=torch.int32)
    step = max(1, tiles.chunk_elements // max(1, num_keys))
    for start in range(0, num_queries if num_keys and top_k else 0, step):
        rows = slice(start, start + step)
        ends = (first_T[rows].clamp(min=0).int(), last_T[rows].clamp(max=num_keys - 1).int())
        score_CS = score(q_THD[rows], k_SD, weights_TH[rows], *ends, tiles)
        choose(score_CS, *ends, indices_TK[rows], tiles)
        del score_CS
    return indices_TK


def score(
    q_CHD: Tensor,
    k_SD: Tensor,
    weights_CH: Tensor,
    first_C: Tensor,
    last_C: Tensor,
    tiles: IndexTiles,
) -> Tensor:
    """Return scores f32 [C, S]. Keys outside first_c to last_c have undefined scores."""
    (num_queries, num_heads, width), num_keys = q_CHD.shape, k_SD.shape[0]
    score_CS = torch.empty(num_queries, num_keys, dtype=torch.float32, device=q_CHD.device)
    queries = max(1, tiles.rows // num_heads)
    span = max(tiles.span, tiles.keys)
    _score[(triton.cdiv(num_queries, queries), triton.cdiv(num_keys, span))](
        q_CHD, k_SD, weights_CH, first_C, last_C, score_CS, num_queries, num_keys,
        H=num_heads, D=width, QUERIES=queries, KEYS=tiles.keys, SPAN=span,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return score_CS


def choose(
    score_CS: Tensor, first_C: Tensor, last_C: Tensor, indices_CK: Tensor, tiles: IndexTiles
) -> None:
    """Write each query's K best keys in [first_c, last_c] to `indices_CK`, sorted by index.

    With fewer than K keys, the rest of the row is unchanged.
    """
    num_queries, top_k = indices_CK.shape
    size = max(tiles.buffer, triton.next_power_of_2(top_k + tiles.block))
    buffer = torch.empty(num_queries, 2, size, dtype=torch.int32, device=score_CS.device)
    _choose[(num_queries,)](
        score_CS, first_C, last_C, buffer, indices_CK, score_CS.stride(0),
        K=top_k, BLOCK=tiles.block, SIZE=size, num_warps=tiles.choose_warps, num_stages=2,
        maxnreg=tiles.choose_registers,
    )  # fmt: skip


def quantize_index(
    x_THD: Tensor, cos_T1R: Tensor, sin_T1R: Tensor, turns_pairs: bool
) -> tuple[Tensor, Tensor]:
    """Return the result of `sparse_index_fp8.quantize_index`."""
    num_tokens, num_heads, width = x_THD.shape
    value_THD = torch.empty_like(x_THD, dtype=torch.float8_e4m3fn)
    scale_TH = x_THD.new_empty(num_tokens, num_heads, dtype=torch.float32)
    num_rows, turned = scale_TH.numel(), cos_T1R.shape[-1]
    if num_rows:
        # Separate products and sums, as in the plain form: fused ones would round once less.
        _quantize[(triton.cdiv(num_rows, QUANTIZED_ROWS),)](
            x_THD, cos_T1R, sin_T1R, value_THD, scale_TH, num_rows,
            H=num_heads, D=width, R=turned, PAIRS=turns_pairs, ROWS=QUANTIZED_ROWS,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return value_THD, scale_TH


@triton.jit
def _quantize(
    x, cos, sin, value, scale, num_rows,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    known = (row < num_rows)[:, None]
    i = tl.arange(0, R // 2)
    first = row[:, None] * D + (2 * i if PAIRS else i)[None, :]
    second = first + (1 if PAIRS else R // 2)
    rest = row[:, None] * D + R + tl.arange(0, D - R)[None, :]
    angle = (row // H)[:, None] * R + i[None, :]
    c = tl.load(cos + angle, mask=known, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=known, other=0.0).to(tl.float32)
    a = tl.load(x + first, mask=known, other=0.0).to(tl.float32)
    b = tl.load(x + second, mask=known, other=0.0).to(tl.float32)
    still = tl.load(x + rest, mask=known, other=0.0).to(tl.float32)
    a, b = a * c - b * s, b * c + a * s
    amax = tl.maximum(tl.max(tl.abs(a), axis=1), tl.max(tl.abs(b), axis=1))
    amax = tl.maximum(tl.maximum(amax, tl.max(tl.abs(still), axis=1)), 1e-4)
    power = tl.exp2(tl.ceil(tl.log2(tl.div_rn(amax, 448.0))))
    tl.store(scale + row, power, mask=row < num_rows)
    number = value.dtype.element_ty
    tl.store(value + first, tl.div_rn(a, power[:, None]).to(number), mask=known)
    tl.store(value + second, tl.div_rn(b, power[:, None]).to(number), mask=known)
    tl.store(value + rest, tl.div_rn(still, power[:, None]).to(number), mask=known)


@triton.jit
def _score(
    q, k, weights, first, last, score, num_queries, num_keys,
    H: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    known = t < num_queries
    begin = tl.min(tl.load(first + t, mask=known, other=num_keys), axis=0)
    end = tl.max(tl.load(last + t, mask=known, other=-1), axis=0) + 1
    begin = tl.maximum(begin, tl.program_id(1) * SPAN) // KEYS * KEYS
    end = tl.minimum(end, (tl.program_id(1) + 1) * SPAN)
    if begin < end:
        column = tl.arange(0, D)
        row = tl.program_id(0) * QUERIES * H + tl.arange(0, QUERIES * H)
        row = tl.minimum(row, num_queries * H - 1).to(tl.int64)
        q_tile = tl.trans(tl.load(q + row[:, None] * D + column[None, :]))
        weight = tl.load(weights + row).to(tl.float32)
        to = score + t.to(tl.int64)[None, :] * num_keys
        for start in range(begin, end, KEYS):
            s = start + tl.arange(0, KEYS)
            key_row = tl.minimum(s, num_keys - 1).to(tl.int64)
            key = tl.load(k + key_row[:, None] * D + column[None, :])
            product = tl.maximum(tl.dot(key, q_tile, input_precision="ieee"), 0.0)
            product = tl.reshape(product * weight[None, :], (KEYS, QUERIES, H))
            inside = (s < num_keys)[:, None] & known[None, :]
            tl.store(to + s[:, None], tl.sum(product, axis=2), mask=inside)


@triton.jit
def _choose(
    score, first, last, buffer, indices, stride,
    K: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    ranks, places = buffer + 2 * t * SIZE, buffer + (2 * t + 1) * SIZE
    begin, end = tl.load(first + t), tl.load(last + t) + 1
    threshold = tl.full([], 0, tl.uint32)
    count = tl.full([], 0, tl.int32)
    origin = begin // BLOCK * BLOCK
    s = origin + tl.arange(0, BLOCK)
    value = tl.load(score + t * stride + s, mask=(s >= begin) & (s < end), other=0.0)
    for start in range(origin, end, BLOCK):
        s = start + tl.arange(0, BLOCK)
        inside = (s >= begin) & (s < end)
        rank = _rank(value)
        following = s + BLOCK  # prefetch the next block
        value = tl.load(score + t * stride + following, mask=following < end, other=0.0)
        taken = inside & (rank > threshold)
        at = count + tl.cumsum(taken.to(tl.int32), axis=0) - 1
        tl.store(ranks + at, rank.to(tl.int32, bitcast=True), mask=taken)
        tl.store(places + at, s, mask=taken)
        count += tl.sum(taken.to(tl.int32), axis=0)
        if count > SIZE - BLOCK:
            threshold = _keep_best(ranks, places, count, K, SIZE)
            count = tl.full([], K, tl.int32)
    if count > K:
        _keep_best(ranks, places, count, K, SIZE)
        count = tl.full([], K, tl.int32)
    tl.debug_barrier()
    at = tl.arange(0, SIZE)
    tl.store(indices + t * K + at, tl.load(places + at, mask=at < count, other=-1), mask=at < count)


@triton.jit
def _rank(value):
    """Map f32 scores to uint32 ranks above 0 in the same order. −0 and 0 rank equally."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _keep_best(ranks, places, count, K: tl.constexpr, SIZE: tl.constexpr):
    """Keep the K best of `count` ranks and keys. Return the K-th best rank."""
    tl.debug_barrier()
    at = tl.arange(0, SIZE)
    known = at < count
    rank = tl.load(ranks + at, mask=known, other=0).to(tl.uint32, bitcast=True)
    least = tl.full([], 0, tl.uint32)
    bit = tl.full([], 0x40000000, tl.uint32)
    for _ in range(16):  # each step finds two bits of `least`, from three 20-bit counts in `counts`
        low, middle, high = least + bit, least + 2 * bit, least + 3 * bit
        counts = (rank >= low).to(tl.int64) + ((rank >= middle).to(tl.int64) << 20)
        counts = tl.sum(counts + ((rank >= high).to(tl.int64) << 40), axis=0)
        least = tl.where((counts & 0xFFFFF) >= K, low, least)
        least = tl.where(((counts >> 20) & 0xFFFFF) >= K, middle, least)
        least = tl.where((counts >> 40) >= K, high, least)
        bit = bit >> 2
    above, equal = rank > least, rank == least
    spare = K - tl.sum(above.to(tl.int32), axis=0)
    taken = above | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= spare))
    to = tl.cumsum(taken.to(tl.int32), axis=0) - 1
    place = tl.load(places + at, mask=taken, other=0)
    tl.debug_barrier()
    tl.store(ranks + to, rank.to(tl.int32, bitcast=True), mask=taken)
    tl.store(places + to, place, mask=taken)
    tl.debug_barrier()
    return least
