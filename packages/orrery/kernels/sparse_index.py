"""Choose the keys that each query attends to, as DeepSeek-V3.2's lightning indexer does.

T queries, S keys, H indexer heads, D indexer width

    score_ts = Σ_h weights_th · relu(q_th · k_s), in float32, for first_t ≤ s ≤ last_t

Source: https://arxiv.org/abs/2512.02556, equation 1.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from orrery.kernels import HAS_TRITON, sparse_index_fp8

Backend = Literal["deep_gemm", "triton", "plain"]

CHUNK_KEYS = 4096
CHUNK_ELEMENTS = 2**24  # products q_th · k_s at a time: 64 MiB in float32


@torch.no_grad()
def select_keys(
    q_THD: Tensor,
    k_SD: Tensor,
    weights_TH: Tensor,
    first_T: Tensor,
    last_T: Tensor,
    top_k: int,
    backend: Backend | None = None,
) -> Tensor:
    """Return the `top_k` best keys of each query: i32 [T, top_k], in any order.

    If the range first_t to last_t has fewer keys, −1 fills the rest of the row. Ties go to the
    lowest index. FP8 q and k come from `sparse_index_fp8`. Then `weights` must include q's scales
    as factors. Raise ValueError on other shapes.
    """
    num_queries, num_heads, width = q_THD.shape
    is_fp8 = q_THD.dtype == sparse_index_fp8.DTYPE
    key_width = k_SD.shape[1] * k_SD.element_size() - sparse_index_fp8.SCALE_BYTES
    key_width = key_width if is_fp8 else k_SD.shape[1]
    if key_width != width or weights_TH.shape != (num_queries, num_heads):
        raise ValueError(
            f"q {list(q_THD.shape)}, k {list(k_SD.shape)} and weights {list(weights_TH.shape)} "
            f"must be [T, H, D], [S, {'bytes' if is_fp8 else 'D'}] and [T, H]"
        )
    if first_T.shape != (num_queries,) or last_T.shape != (num_queries,):
        raise ValueError(
            f"first {list(first_T.shape)} and last {list(last_T.shape)} must be [{num_queries}]"
        )
    if backend is None and is_fp8:
        backend = "deep_gemm" if q_THD.is_cuda else "plain"
    elif backend is None:
        is_half = q_THD.dtype in (torch.bfloat16, torch.float16) and k_SD.dtype == q_THD.dtype
        is_fast = HAS_TRITON and q_THD.is_cuda and is_half and _triton().supports(q_THD)
        backend = "triton" if is_fast else "plain"
    return torch.ops.orrery.select_keys(q_THD, k_SD, weights_TH, first_T, last_T, top_k, backend)


def reference_select_keys(
    q_THD: Tensor, k_SD: Tensor, weights_TH: Tensor, first_T: Tensor, last_T: Tensor, top_k: int
) -> Tensor:
    index_S = torch.arange(k_SD.shape[0], device=k_SD.device)
    score_TS = _scores(q_THD, k_SD, weights_TH, first_T, last_T, index_S)
    score_TS, index_TS = score_TS.sort(dim=1, descending=True, stable=True)
    index_TS = index_TS.masked_fill(score_TS.isneginf(), -1)[:, :top_k]
    return torch.nn.functional.pad(index_TS, (0, top_k - index_TS.shape[1]), value=-1).int()


def _triton() -> Any:
    from orrery.kernels import sparse_index_triton

    return sparse_index_triton


def _scores(
    q_THD: Tensor,
    k_SD: Tensor,
    weights_TH: Tensor,
    first_T: Tensor,
    last_T: Tensor,
    index_S: Tensor,
) -> Tensor:
    dtype = torch.promote_types(q_THD.dtype, torch.float32)
    product_THS = torch.einsum("thd,sd->ths", q_THD.to(dtype), k_SD.to(dtype)).relu_()
    score_TS = torch.einsum("th,ths->ts", weights_TH.to(dtype), product_THS)
    is_outside_TS = (index_S < first_T[:, None]) | (index_S > last_T[:, None])
    return score_TS.masked_fill(is_outside_TS, -torch.inf)


@torch.library.custom_op("orrery::select_keys", mutates_args=())
def _select_keys(
    q: Tensor, k: Tensor, weights: Tensor, first: Tensor, last: Tensor, top_k: int, backend: str
) -> Tensor:
    if backend != "plain":
        kernels = _triton() if backend == "triton" else sparse_index_fp8
        tensors = (x.contiguous() for x in (q, k, weights, first, last))
        return kernels.select_keys(*tensors, top_k)
    if q.dtype == sparse_index_fp8.DTYPE:
        key, scale = sparse_index_fp8.unpack(k)
        q, k = q.float(), key.float() * scale[:, None]
    indices = torch.empty(q.shape[0], top_k, dtype=torch.int32, device=q.device)
    step = max(1, CHUNK_ELEMENTS // (q.shape[1] * max(1, min(CHUNK_KEYS, k.shape[0]))))
    for start in range(0, q.shape[0], step):
        rows = slice(start, start + step)
        indices[rows] = _stream(q[rows], k, weights[rows], first[rows], last[rows], top_k)
    return indices


def _stream(
    q: Tensor, k: Tensor, weights: Tensor, first: Tensor, last: Tensor, top_k: int
) -> Tensor:
    """Return the best keys. Chunks ascend, so a stable sort prefers low indices in ties."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    best_TK = torch.full((q.shape[0], top_k), -torch.inf, dtype=dtype, device=q.device)
    index_TK = torch.full_like(best_TK, -1, dtype=torch.int64)
    for start in range(0, k.shape[0], CHUNK_KEYS):
        index_C = torch.arange(start, min(start + CHUNK_KEYS, k.shape[0]), device=k.device)
        score_TC = _scores(q, k[start : start + CHUNK_KEYS], weights, first, last, index_C)
        score_TN, place_TN = torch.cat((best_TK, score_TC), dim=1).sort(
            dim=1, descending=True, stable=True
        )
        best_TK = score_TN[:, :top_k]
        known_TN = torch.cat((index_TK, index_C.expand(q.shape[0], -1)), dim=1)
        index_TK = known_TN.gather(1, place_TN[:, :top_k])
    return index_TK.masked_fill(best_TK.isneginf(), -1).int()


@_select_keys.register_fake
def _(
    q: Tensor, k: Tensor, weights: Tensor, first: Tensor, last: Tensor, top_k: int, backend: str
) -> Tensor:
    return q.new_empty(q.shape[0], top_k, dtype=torch.int32)
