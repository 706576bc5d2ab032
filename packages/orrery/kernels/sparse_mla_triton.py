"""Triton kernels of sparse MLA: forward pass, and backward pass without atomics.

A chunk has C queries. `sparse_mla` defines other letters. A pair is a query and one of its chosen
keys. Outputs of the backward kernels:

- `_pair_gradients`: dlogit [C, K, H], the derivative by q · key, and each pair's dkv [D] =
  Σ_h dlogit_h · q_h, plus Σ_h p_h · dout_h in the first V columns
- `_query_gradients`: dq = dlogitᵀ · keys
- `_sum_pairs`: each key's sum of dkv over pairs, in float32 in a fixed order

`sparse_mla_hopper` replaces the first two kernels at GLM-5's widths.
"""

# mypy: disable-error-code="no-untyped-def"
import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from orrery.kernels import sparse_mla_hopper
from orrery.manifest.devices import SPARSE_PAIRS

LOG2_E = math.log2(math.e)
SHARED_BYTES = 227 * 1024  # Hopper's shared memory per program, needed for D = 576
MAX_HEADS = 64  # heads per tile in kernels that gather keys
MAX_GRID = 65535  # queries per chunk: CUDA limits a grid's second axis


class Tiles(NamedTuple):
    """Launch options. Backward kernels have (keys or pairs, columns, warps, stages)."""

    forward: tuple[int, int, int] = (64, 8, 2)  # keys, warps, stages
    pairs: tuple[int, int, int, int] = (64, 64, 4, 3)
    queries: tuple[int, int, int, int] = (64, 128, 4, 4)
    sums: tuple[int, int, int, int] = (2, 1024, 4, 3)
    chunk_rows: int = SPARSE_PAIRS  # maximum pairs per chunk, C·K
    uses_hopper: bool = True  # use `sparse_mla_hopper` if it supports the input


TILES = Tiles()


def supports(q_THD: Tensor, value_width: int) -> bool:
    _, num_heads, width = q_THD.shape
    sizes = (num_heads, value_width, width - value_width)
    fits = num_heads <= 128 and all(n >= 16 and n & (n - 1) == 0 for n in sizes)
    return fits and q_THD.is_cuda and _shared_bytes(q_THD.device.index or 0) >= SHARED_BYTES


@cache
def _shared_bytes(device: int) -> int:
    return triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]


def clear_empty(out_THV: Tensor, length_T: Tensor) -> None:
    """Zero the outputs of queries without keys."""
    num_queries, *sizes = out_THV.shape
    if num_queries:
        _clear_empty[(num_queries,)](out_THV, length_T, SIZE=math.prod(sizes), num_warps=1)


def lengths(indices_TK: Tensor) -> Tensor:
    """Return i32 [T]: 1 + the last column of `indices_TK` that holds a key, or 0 without keys."""
    place_K = torch.arange(1, indices_TK.shape[1] + 1, dtype=torch.int32, device=indices_TK.device)
    return torch.where(indices_TK >= 0, place_K, 0).amax(dim=1)


def forward(
    q_THD: Tensor,
    kv_SD: Tensor,
    indices_TK: Tensor,
    scale: float,
    value_width: int,
    tiles: Tiles = TILES,
) -> tuple[Tensor, Tensor]:
    num_queries, num_heads, width = q_THD.shape
    out_THV = q_THD.new_empty(num_queries, num_heads, value_width)
    lse_TH = q_THD.new_empty(num_queries, num_heads, dtype=torch.float32)
    heads = min(num_heads, MAX_HEADS)
    keys, warps, stages = tiles.forward
    if out_THV.numel():
        _attend[(num_queries, num_heads // heads)](
            q_THD, kv_SD, indices_TK, lengths(indices_TK), out_THV, lse_TH, scale * LOG2_E,
            indices_TK.shape[1], H=num_heads, D=width, V=value_width, KEYS=keys, HEADS=heads,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out_THV, lse_TH


def backward(
    grad_THV: Tensor,
    q_THD: Tensor,
    kv_SD: Tensor,
    indices_TK: Tensor,
    out_THV: Tensor,
    lse_TH: Tensor,
    scale: float,
    tiles: Tiles = TILES,
) -> tuple[Tensor, Tensor]:
    """Return dq and dkv in q's dtype.

    Each pair's dkv is rounded to this dtype, then summed in float32.
    """
    grad_q_THD = torch.empty_like(q_THD)
    grad_kv_SD = torch.zeros_like(kv_SD, dtype=torch.float32)
    step = min(MAX_GRID, max(1, tiles.chunk_rows // max(1, indices_TK.shape[1])))
    for index, order in enumerate(_orders_of(indices_TK, kv_SD.shape[0], step)):
        rows = slice(index * step, (index + 1) * step)
        queries = (grad_THV[rows], q_THD[rows], kv_SD, indices_TK[rows], out_THV[rows])
        _chunk(*queries, lse_TH[rows], scale, tiles, order, grad_q_THD[rows], grad_kv_SD)
    return grad_q_THD, grad_kv_SD.to(kv_SD.dtype)


def _chunk(
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    tiles: Tiles,
    order: tuple[Tensor, Tensor],
    grad_q: Tensor,
    grad_kv: Tensor,
) -> None:
    num_queries = indices.shape[0]
    num_keys, width = kv.shape
    _, num_heads, value_width = grad.shape
    length, delta = lengths(indices), torch.empty_like(lse)
    _delta[(num_queries, num_heads)](grad, out, delta, H=num_heads, V=value_width, num_warps=1)
    place, offset = order
    pair = q.new_empty(indices.numel(), width)
    given = (q, grad, kv, indices, length, lse, delta, place)
    if tiles.uses_hopper and sparse_mla_hopper.supports(q, value_width):
        sparse_mla_hopper.pair_gradients(*given, scale, grad_q, pair)
    else:
        _launch_gradients(*given, scale, tiles, grad_q, pair)

    rows, columns, warps, stages = tiles.sums
    columns = min(columns, triton.next_power_of_2(width))
    _sum_pairs[(num_keys, triton.cdiv(width, columns))](
        pair, offset, grad_kv,
        D=width, ROWS=rows, COLUMNS=columns, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _launch_gradients(
    q: Tensor,
    grad: Tensor,
    kv: Tensor,
    indices: Tensor,
    length: Tensor,
    lse: Tensor,
    delta: Tensor,
    place: Tensor,
    scale: float,
    tiles: Tiles,
    grad_q: Tensor,
    pair: Tensor,
) -> None:
    num_queries, num_chosen = indices.shape
    _, num_heads, width = q.shape
    value_width, heads = grad.shape[-1], min(num_heads, MAX_HEADS)
    sizes: dict[str, Any] = {"H": num_heads, "D": width, "V": value_width}
    grad_logit = q.new_empty(num_queries, num_chosen, num_heads)
    keys, columns, warps, stages = tiles.pairs
    _pair_gradients[(triton.cdiv(num_chosen, keys), num_queries)](
        q, grad, kv, indices, length, lse, delta, place, grad_logit, pair,
        scale * LOG2_E, scale, num_chosen,
        **sizes, KEYS=keys, COLUMNS=_columns(columns, value_width),
        REST=_columns(columns, width - value_width),
        num_warps=warps * triton.cdiv(num_heads, MAX_HEADS), num_stages=stages,
    )  # fmt: skip

    keys, columns, warps, stages = tiles.queries
    columns = min(columns, triton.next_power_of_2(width))
    _query_gradients[(triton.cdiv(width, columns), num_queries, num_heads // heads)](
        grad_logit, kv, indices, length, grad_q, num_chosen,
        **sizes, KEYS=keys, HEADS=heads, COLUMNS=columns, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _columns(wanted: int, *parts: int) -> int:
    """Return the largest power of two ≤ `wanted` that divides all `parts`."""
    return min(wanted, *(n & -n for n in parts))


# A cache of `_order_of_keys`, because several layers share a tensor of chosen keys.
_orders: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _orders_of(indices_TK: Tensor, num_keys: int, step: int) -> list[tuple[Tensor, Tensor]]:
    sizes, found = _orders.get(indices_TK, (None, []))
    if sizes != (num_keys, step):
        found = [_order_of_keys(chunk, num_keys) for chunk in indices_TK.split(step)]
        _orders[indices_TK] = (num_keys, step), found
    return found


def _order_of_keys(indices_CK: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Return each pair's row, i32 [C, K], and each key's first row, i32 [S + 1].

    Rows are pairs sorted by key, then query. Pairs with key −1 come last.
    """
    key_M = torch.where(indices_CK >= 0, indices_CK, num_keys).flatten()
    key_M, pair_M = key_M.sort(stable=True)
    row_M = torch.arange(key_M.shape[0], dtype=torch.int32, device=key_M.device)
    place_M = torch.empty_like(row_M).scatter_(0, pair_M, row_M)
    wanted = torch.arange(num_keys + 1, dtype=key_M.dtype, device=key_M.device)
    return place_M.view_as(indices_CK), torch.searchsorted(key_M, wanted, out_int32=True)


@triton.jit
def _attend(
    q, kv, indices, length, out, lse, scale_log2, num_chosen,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    head = t * H + tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    value_column, rest_column = tl.arange(0, V), V + tl.arange(0, D - V)
    q_value = tl.load(q + head[:, None] * D + value_column[None, :])
    q_rest = tl.load(q + head[:, None] * D + rest_column[None, :])
    maximum = tl.full([HEADS], -1e38, tl.float32)  # finite, because −∞ − −∞ is NaN
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, V], tl.float32)
    count = tl.load(length + t)
    for start in range(0, count, KEYS):
        k = start + tl.arange(0, KEYS)
        row = tl.load(indices + t * num_chosen + k, mask=k < count, other=-1)
        at = kv + tl.maximum(row, 0).to(tl.int64) * D
        value = tl.load(at[:, None] + value_column[None, :])
        rest = tl.load(at[:, None] + rest_column[None, :])
        z = tl.dot(q_value, tl.trans(value))
        z = tl.dot(q_rest, tl.trans(rest), z) * scale_log2
        z = tl.where((row >= 0)[None, :], z, -float("inf"))
        risen = tl.maximum(maximum, tl.max(z, axis=1))
        p = tl.exp2(z - risen[:, None])
        decay = tl.exp2(maximum - risen)
        total = total * decay + tl.sum(p, axis=1)
        acc = tl.dot(p.to(value.dtype), value, acc * decay[:, None])
        maximum = risen
    is_empty = total == 0.0
    acc = acc / tl.where(is_empty, 1.0, total)[:, None]
    log_total = (maximum + tl.log2(tl.where(is_empty, 1.0, total))) * 0.6931471805599453
    tl.store(lse + head, tl.where(is_empty, -float("inf"), log_total))
    tl.store(out + head[:, None] * V + value_column[None, :], acc.to(out.dtype.element_ty))


@triton.jit
def _clear_empty(out, length, SIZE: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    if tl.load(length + t) == 0:
        for start in range(0, SIZE, 1024):
            column = start + tl.arange(0, 1024)
            tl.store(out + t * SIZE + column, 0.0, mask=column < SIZE)


@triton.jit
def _delta(grad, out, delta, H: tl.constexpr, V: tl.constexpr):
    head = tl.program_id(0).to(tl.int64) * H + tl.program_id(1)
    column = tl.arange(0, V)
    g = tl.load(grad + head * V + column).to(tl.float32)
    tl.store(delta + head, tl.sum(g * tl.load(out + head * V + column).to(tl.float32), axis=0))


@triton.jit
def _pair_gradients(
    q, grad, kv, indices, length, lse, delta, place, grad_logit, pair,
    scale_log2, scale, num_chosen,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1).to(tl.int64)
    count = tl.load(length + t)
    if tl.program_id(0) * KEYS < count:
        k = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
        known = k < count
        row = tl.load(indices + t * num_chosen + k, mask=known, other=-1)
        inside = (row >= 0)[:, None]
        at = kv + tl.maximum(row, 0).to(tl.int64) * D
        h = tl.arange(0, H)
        q_at, grad_at = q + (t * H + h) * D, grad + (t * H + h) * V
        z = tl.zeros([KEYS, H], tl.float32)
        grad_p = tl.zeros([KEYS, H], tl.float32)
        for start in range(0, V, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            key = tl.load(at[:, None] + column[None, :])
            z = tl.dot(key, tl.trans(tl.load(q_at[:, None] + column[None, :])), z)
            grad_p = tl.dot(key, tl.trans(tl.load(grad_at[:, None] + column[None, :])), grad_p)
        for start in range(V, D, REST):
            column = start + tl.arange(0, REST)
            key = tl.load(at[:, None] + column[None, :])
            z = tl.dot(key, tl.trans(tl.load(q_at[:, None] + column[None, :])), z)
        log2_total = tl.load(lse + t * H + h) * 1.4426950408889634
        p = tl.where(inside, tl.exp2(z * scale_log2 - log2_total[None, :]), 0.0)
        value = p * (grad_p - tl.load(delta + t * H + h)[None, :]) * scale
        p_tile = p.to(pair.dtype.element_ty)
        grad_tile = value.to(pair.dtype.element_ty)
        tl.store(
            grad_logit + (t * num_chosen + k)[:, None] * H + h[None, :],
            grad_tile,
            mask=(k < num_chosen)[:, None],
        )
        to = pair + tl.load(place + t * num_chosen + k, mask=known, other=0).to(tl.int64) * D
        for start in range(0, V, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            acc = tl.dot(grad_tile, tl.load(q_at[:, None] + column[None, :]))
            acc = tl.dot(p_tile, tl.load(grad_at[:, None] + column[None, :]), acc)
            tl.store(to[:, None] + column[None, :], acc.to(pair.dtype.element_ty), mask=inside)
        for start in range(V, D, REST):
            column = start + tl.arange(0, REST)
            acc = tl.dot(grad_tile, tl.load(q_at[:, None] + column[None, :]))
            tl.store(to[:, None] + column[None, :], acc.to(pair.dtype.element_ty), mask=inside)


@triton.jit
def _query_gradients(
    grad_logit, kv, indices, length, grad_q, num_chosen,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    h = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    inside = (column < D)[None, :]
    acc = tl.zeros([HEADS, COLUMNS], tl.float32)
    count = tl.load(length + t)
    for start in range(0, count, KEYS):
        k = start + tl.arange(0, KEYS)
        known = k < count
        row = tl.load(indices + t * num_chosen + k, mask=known, other=0)
        at = kv + tl.maximum(row, 0).to(tl.int64) * D
        key = tl.load(at[:, None] + column[None, :], mask=inside, other=0.0)
        place = (t * num_chosen + k)[:, None] * H + h[None, :]
        value = tl.load(grad_logit + place, mask=known[:, None], other=0.0)
        acc = tl.dot(tl.trans(value), key, acc)
    at = grad_q + (t * H + h)[:, None] * D + column[None, :]
    tl.store(at, acc.to(grad_q.dtype.element_ty), mask=inside)


@triton.jit
def _sum_pairs(pair, offset, total, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    s = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first, last = tl.load(offset + s), tl.load(offset + s + 1)
    if first < last:
        inside = column < D
        lanes = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(first, last, ROWS):
            row = start + tl.arange(0, ROWS)
            at = pair + row.to(tl.int64)[:, None] * D + column[None, :]
            known = (row < last)[:, None] & inside[None, :]
            lanes += tl.load(at, mask=known, other=0.0).to(tl.float32)
        at = total + s * D + column
        found = tl.load(at, mask=inside, other=0.0) + tl.sum(lanes, axis=0)
        tl.store(at, found, mask=inside)
