"""Triton kernels of the indexer: score a chunk of queries, then choose each query's best keys.

C queries per chunk, K chosen keys. `sparse_index` defines other letters. From a sample of a query's
scores, `_guess` estimates a threshold that somewhat more than K keys reach. `_collect` writes these
keys. `_choose` takes the K best of them, or of all keys if the threshold was wrong.
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
    sample: int = 4096  # scores sampled for a row's threshold
    group: int = 8  # adjacent scores per sampled group
    aim: float = 1.8  # expected keys that reach the threshold, divided by K
    guess_warps: int = 4
    parts: int = 4  # programs of `_collect` per row
    room: int = 8192  # maximum keys of a row that reach its threshold, at least 2·K
    found_bytes: int = 9 * 2**24  # memory for these keys, 8 bytes each
    choose_warps: int = 8
    chunk_elements: int = 2**26  # scores per chunk, C·S: 256 MiB in float32


TILES = IndexTiles()
BLOCK = 256  # scores that `_collect` reads at once
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
        choose(score_CS, *ends, torch.zeros_like(ends[0]), indices_TK[rows], tiles)
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
    score_CS: Tensor,
    first_C: Tensor,
    last_C: Tensor,
    key_C: Tensor,
    indices_CK: Tensor,
    tiles: IndexTiles,
) -> None:
    """Write each query's K best keys to `indices_CK`, ascending.

    Column j of `score_CS[c]` is for key `key_C[c]` + j. Columns first_c to last_c may be chosen.
    With fewer than K such columns, the rest of `indices_CK[c]` is unchanged.
    """
    (num_keys, top_k), device = (score_CS.shape[1], indices_CK.shape[1]), score_CS.device
    room = max(tiles.room, triton.next_power_of_2(2 * top_k))
    part_room = min(room, triton.cdiv(num_keys, tiles.parts)) + BLOCK
    step = max(1, tiles.found_bytes // (8 * tiles.parts * part_room))
    for tensors in zip(
        *(x.split(step) for x in (score_CS, first_C, last_C, key_C, indices_CK)), strict=True
    ):
        *given, key, index = tensors
        num_queries, stride = len(index), score_CS.stride(0)
        guess = torch.empty(num_queries, dtype=torch.float32, device=device)
        counts = torch.empty(num_queries, tiles.parts, dtype=torch.int32, device=device)
        found = torch.empty(*counts.shape, part_room, dtype=torch.int64, device=device)
        _guess[(num_queries,)](
            *given, guess, stride, AIM=int(top_k * tiles.aim), SAMPLE=tiles.sample,
            GROUP=tiles.group, num_warps=tiles.guess_warps,
        )  # fmt: skip
        _collect[(num_queries, tiles.parts)](
            *given, guess, counts, found, stride, part_room,
            PARTS=tiles.parts, BLOCK=BLOCK, num_warps=1,
        )  # fmt: skip
        _choose[(num_queries,)](
            *given, guess, counts, found, key, index, stride, part_room,
            K=top_k, PARTS=tiles.parts, ROOM=room, num_warps=tiles.choose_warps,
        )  # fmt: skip


def quantize_index(
    x_THD: Tensor, cos_T1R: Tensor, sin_T1R: Tensor, turns_pairs: bool
) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, width = x_THD.shape
    value_THD = torch.empty_like(x_THD, dtype=torch.float8_e4m3fn)
    scale_TH = x_THD.new_empty(num_tokens, num_heads, dtype=torch.float32)
    num_rows, turned = scale_TH.numel(), cos_T1R.shape[-1]
    if num_rows:
        # Fused multiply-add would round differently from the plain backend.
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
def _guess(
    score, first, last, guesses, stride,
    AIM: tl.constexpr, SAMPLE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write a threshold, estimated from samples, that about AIM keys of the row reach."""
    t = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(first + t), tl.load(last + t) + 1
    num_keys = end - begin
    guess = float("-inf")
    if num_keys > AIM:
        i = tl.arange(0, SAMPLE)
        group = (i // GROUP).to(tl.int64) * num_keys // (SAMPLE // GROUP)
        s = tl.minimum((begin + group) // GROUP * GROUP + i % GROUP, end - 1)
        rank = _rank(tl.load(score + t * stride + tl.maximum(s, begin)))
        least = _kth_best(rank, AIM * SAMPLE // num_keys + 1, 4)
        bits = tl.where((least >> 31) == 1, least & 0x7FFFFFFF, least ^ 0xFFFFFFFF)
        guess = bits.to(tl.float32, bitcast=True)
    tl.store(guesses + t, guess)


@triton.jit
def _collect(
    score, first, last, guesses, counts, found, stride, part_room,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the scores, indices and number of keys that reach the threshold in a part of a row.

    A warp reads 8 scores per thread at once. Byte i of (`before_low`, `before_high`) counts the
    keys taken before the thread's i-th score, so one scan handles all 8.
    """
    t, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, end = tl.load(first + t), tl.load(last + t) + 1
    guess = tl.load(guesses + t)
    length = tl.cdiv(end - begin, PARTS)
    origin = begin + part * length
    stop = tl.minimum(origin + length, end)
    score += t * stride + origin
    found += (t * PARTS + part) * part_room
    left = stop - origin
    i = tl.arange(0, 8)[:, None]
    offset = i * 32 + tl.arange(0, 32)[None, :]
    count = tl.full([], 0, tl.int32)
    value = tl.load(score + offset, mask=offset < left, other=float("nan"))
    for start in range(origin, stop, BLOCK):
        taken = value >= guess
        s = (start + offset).to(tl.uint32)  # extending unsigned integers to 64 bits is free
        pair = (value.to(tl.int32, bitcast=True).to(tl.int64) << 32) | s.to(tl.int64)
        score += BLOCK
        left -= BLOCK
        value = tl.load(score + offset, mask=offset < left, other=float("nan"))
        own = tl.where(taken, 1 << 8 * (i % 4), 0)
        low, high = tl.sum(tl.where(i < 4, own, 0), axis=0), tl.sum(tl.where(i < 4, 0, own), axis=0)
        sum_low, sum_high = tl.sum(low, axis=0), tl.sum(high, axis=0)
        base_low = sum_low * 0x01010100  # byte i is the sum of bytes 0 to i − 1
        num_low = (base_low >> 24) + (sum_low >> 24)
        base_high = sum_high * 0x01010100 + num_low * 0x01010101
        before_low = tl.cumsum(low, axis=0) - low + base_low
        before_high = tl.cumsum(high, axis=0) - high + base_high
        at = (tl.where(i < 4, before_low[None, :], before_high[None, :]) >> 8 * (i % 4)) & 255
        if count <= part_room - BLOCK:
            tl.store(found + at, pair, mask=taken)
        more = ((base_high >> 24) & 255) + (sum_high >> 24)
        count += more
        found += more
    tl.store(counts + t * PARTS + part, count)


@triton.jit
def _choose(
    score, first, last, guesses, counts, found, key, indices, stride, part_room,
    K: tl.constexpr, PARTS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(first + t), tl.load(last + t) + 1
    indices += t * K
    key_of_0 = tl.load(key + t)
    part = tl.arange(0, PARTS)
    count_P = tl.load(counts + t * PARTS + part)
    count = tl.sum(count_P, axis=0)
    if (count >= tl.minimum(K, end - begin)) & (count < ROOM):
        at = tl.arange(0, ROOM)
        source = at + t * PARTS * part_room
        passed = tl.full([], 0, tl.int32)
        for p in tl.static_range(PARTS - 1):
            size = tl.sum(tl.where(part == p, count_P, 0), axis=0)
            passed += size
            source += tl.where(at >= passed, part_room - size, 0)
        taken = at < count
        pair = tl.load(found + source, mask=taken, other=0)
        if count > K:
            rank = _rank((pair >> 32).to(tl.int32).to(tl.float32, bitcast=True))
            rank = tl.where(taken, rank - _rank(tl.load(guesses + t)) + 1, 0)
            least = _kth_best(rank, K, 0)
            taken = rank >= least
            surplus = tl.sum(taken.to(tl.int32), axis=0) - K
            if surplus > 0:
                before, number = _positions(rank == least, ROOM)
                taken = (rank > least) | ((rank == least) & (before < number - surplus))
        to, _ = _positions(taken, ROOM)
        tl.store(indices + to, pair.to(tl.int32) + key_of_0, mask=taken)
    else:
        _choose_slowly(score + t * stride, begin, end, key_of_0, indices, K, ROOM)


@triton.jit
def _choose_slowly(score, begin, end, key_of_0, indices, K: tl.constexpr, BLOCK: tl.constexpr):
    """Choose a row's K best keys. Finding the K-th best rank reads the row once per bit."""
    least = tl.full([], 0, tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        count = tl.full([BLOCK], 0, tl.int32)
        for start in range(begin, end, BLOCK):
            s = start + tl.arange(0, BLOCK)
            rank = _rank(tl.load(score + s, mask=s < end, other=0.0))
            count += ((s < end) & (rank >= least + bit)).to(tl.int32)
        least = tl.where(tl.sum(count, axis=0) >= K, least + bit, least)
        bit = bit >> 1
    count = tl.full([BLOCK], 0, tl.int32)
    for start in range(begin, end, BLOCK):
        s = start + tl.arange(0, BLOCK)
        rank = _rank(tl.load(score + s, mask=s < end, other=0.0))
        count += ((s < end) & (rank > least)).to(tl.int32)
    spare = K - tl.sum(count, axis=0)
    written = tl.full([], 0, tl.int32)
    for start in range(begin, end, BLOCK):
        s = start + tl.arange(0, BLOCK)
        rank = _rank(tl.load(score + s, mask=s < end, other=0.0))
        equal = (s < end) & (rank == least)
        before, number = _positions(equal, BLOCK)
        taken = ((s < end) & (rank > least)) | (equal & (before < spare))
        at, more = _positions(taken, BLOCK)
        tl.store(indices + written + at, s + key_of_0, mask=taken)
        written += more
        spare -= tl.minimum(spare, number)


@triton.jit
def _rank(value):
    """Map f32 scores to ordered uint32 ranks above 0. −0 and 0 have equal ranks."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _positions(taken, SIZE: tl.constexpr):
    """Return the number of taken elements before each element, and in total.

    Each thread first sums 4 neighbours, because Triton's scan is slow.
    """
    group = tl.reshape(taken.to(tl.int32), (SIZE // 4, 4))
    sums = tl.sum(group, axis=1)
    before = tl.cumsum(sums, axis=0) - sums
    at = before[:, None] + tl.cumsum(group, axis=1) - group
    return tl.reshape(at, (SIZE,)), tl.sum(sums, axis=0)


@triton.jit
def _kth_best(rank, k, SKIPPED: tl.constexpr):
    """Return the k-th largest uint32 rank, rounded down to a multiple of 4 ** SKIPPED."""
    least = tl.full([], 0, tl.uint32)
    bit = tl.full([], 0x40000000, tl.uint32)
    top = tl.max(rank, axis=0)
    while bit > top:
        bit = bit >> 2
    while bit >> (2 * SKIPPED) > 0:  # each step finds two bits, by three counts
        low, middle, high = least + bit, least + 2 * bit, least + 3 * bit
        # two 16-bit counts, unsigned because the second may set its highest bit
        pair = (rank >= low).to(tl.uint32) + ((rank >= middle).to(tl.uint32) << 16)
        pair = tl.sum(pair, axis=0)
        least = tl.where((pair & 65535) >= k, low, least)
        least = tl.where((pair >> 16) >= k, middle, least)
        least = tl.where(tl.sum((rank >= high).to(tl.int32), axis=0) >= k, high, least)
        bit = bit >> 2
    return least
