"""Quantize to float8_e4m3fn with one float32 scale per block.

M rows, K columns, N outputs, E groups. Activations have two copies: `rows` with 1 × 128 blocks, and
`columns` (stored transposed) with 128 × 1 blocks. Weights have 128 × 128 blocks. No column block
spans two groups, and padding rows count as zero.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from orrery.kernels import HAS_TRITON
from orrery.kernels.expert_rows import swiglu_rows

BLOCK = 128
DTYPE = torch.float8_e4m3fn
MAX = 448.0
MIN_AMAX_ROWS = 1e-10  # lower bounds of a block's largest absolute value, as in vLLM
MIN_AMAX_WEIGHT = 1e-4


class Quantized(NamedTuple):
    value: Tensor  # float8_e4m3fn
    scale: Tensor  # float32


class RowGroups(NamedTuple):
    """Rows `ends[e − 1]:ends[e]` are group e: `counts[e]` real rows, then padding.

    All `ends` are multiples of 128.
    """

    ends_E: Tensor  # i32, ascending
    counts_E: Tensor  # i32


class Weight(NamedTuple):
    forward: Quantized  # values [.., N, K], scales [.., N/128, K/128]
    backward: Quantized  # the transpose, [.., K, N]


def quantize(
    x_MK: Tensor,
    groups: RowGroups | None = None,
    has_rows: bool = True,
    has_columns: bool = True,
    token_M: Tensor | None = None,
    score_M: Tensor | None = None,
) -> tuple[Quantized, Quantized]:
    """Return x quantized by rows and by columns. Unwanted tensors are empty.

    With `token_M`, quantize x[token] of x [T, K]. With `score_M`, quantize swiglu_rows(x, score) of
    x [M, 2·K].

    Rows are values [M, K] and scales [M, K/128]. Columns are values of xᵀ [K, M'] and scales
    [M'/128, K], M' = M rounded up to whole blocks. With groups, column values are flat: one matrix
    [K, rows] per group. Raise ValueError unless 128 divides K.
    """
    if x_MK.dim() != 2 or x_MK.shape[1] % (BLOCK if score_M is None else 2 * BLOCK):
        raise ValueError(f"x is {_sides(x_MK)}, but FP8 needs [M, K] with K a multiple of 128")
    if kernels := _triton(x_MK):
        sources = (each if each is None else each.contiguous() for each in (token_M, score_M))
        found = kernels.quantize(x_MK.contiguous(), groups, has_rows, has_columns, *sources)
        return Quantized(*found[:2]), Quantized(*found[2:])
    if token_M is not None:
        x_MK = x_MK[token_M]
    if score_M is not None:
        x_MK = swiglu_rows(x_MK, score_M)
    if groups is not None:
        is_real_M = group_of_rows(groups, x_MK.shape[0]) >= 0
        x_MK = torch.where(is_real_M[:, None], x_MK, 0)
    rows, columns = _nothing(x_MK), _nothing(x_MK)
    if has_rows:
        rows = reference_quantize_rows(x_MK)
    if has_columns:
        columns = reference_quantize_columns(x_MK, groups)
    return rows, columns


def quantize_weight(weight_NK: Tensor) -> Weight:
    """Quantize [.., N, K] and its transpose. Raise ValueError unless 128 divides both N and K."""
    if weight_NK.shape[-2] % BLOCK or weight_NK.shape[-1] % BLOCK:
        raise ValueError(f"weight is {_sides(weight_NK)}, but FP8 needs multiples of 128")
    if kernels := _triton(weight_NK):
        value, scale, value_t, scale_t = kernels.quantize_weight(weight_NK.contiguous())
        return Weight(Quantized(value, scale), Quantized(value_t, scale_t))
    forward = reference_quantize_weight(weight_NK)
    backward = (part.transpose(-1, -2).contiguous() for part in forward)
    return Weight(forward, Quantized(*backward))


def reference_quantize_rows(x_MK: Tensor) -> Quantized:
    x_MGB = x_MK.float().unflatten(-1, (-1, BLOCK))
    scale_MG = x_MGB.abs().amax(-1).clamp(min=MIN_AMAX_ROWS) / MAX
    return _scaled(x_MGB / scale_MG[..., None], scale_MG)


def reference_quantize_columns(x_MK: Tensor, groups: RowGroups | None = None) -> Quantized:
    """Return `quantize`'s columns. Padding rows of x must be zero."""
    x_MK = F.pad(x_MK, (0, 0, 0, -x_MK.shape[0] % BLOCK))
    x_KGB = x_MK.T.contiguous().float().unflatten(-1, (-1, BLOCK))
    scale_KG = x_KGB.abs().amax(-1).clamp(min=MIN_AMAX_ROWS) * (1 / MAX)
    value_KM, _ = _scaled(x_KGB * (1.0 / scale_KG[..., None]), scale_KG)
    if groups is not None:
        ends = [0, *groups.ends_E.tolist(), x_MK.shape[0]]
        sizes = [end - begin for begin, end in pairwise(ends)]
        parts = value_KM.view(torch.uint8).split(sizes, dim=1)
        value_KM = torch.cat([part.flatten() for part in parts]).view(DTYPE)
    return Quantized(value_KM, scale_KG.T.contiguous())


def reference_quantize_weight(weight_NK: Tensor) -> Quantized:
    *_, n, k = weight_NK.shape
    blocks = weight_NK.unflatten(-1, (k // BLOCK, BLOCK)).unflatten(-3, (n // BLOCK, BLOCK))
    amax = blocks.abs().float().amax(dim=(-3, -1), keepdim=True).clamp(min=MIN_AMAX_WEIGHT)
    scale = amax / MAX
    value = (blocks * (1.0 / scale)).to(DTYPE)
    return Quantized(value.flatten(-4, -3).flatten(-2), scale.squeeze(-1).squeeze(-2))


def dequantize_rows(x: Quantized) -> Tensor:
    blocks = x.value.float().unflatten(-1, (-1, BLOCK)) * x.scale[..., None]
    return blocks.flatten(-2)


def dequantize_columns(x: Quantized) -> Tensor:
    """Return xᵀ, f32 [K, M']. `x` is the columns that `quantize` returned without `groups`."""
    return dequantize_rows(Quantized(x.value, x.scale.T))


def dequantize_weight(weight: Quantized) -> Tensor:
    *_, n, k = weight.value.shape
    scale = weight.scale.repeat_interleave(BLOCK, -1)[..., :k].repeat_interleave(BLOCK, -2)
    return weight.value.float() * scale[..., :n, :]


def group_of_rows(groups: RowGroups, num_rows: int) -> Tensor:
    """Return each row's group, i32 [M], −1 for padding."""
    row_M = torch.arange(num_rows, device=groups.ends_E.device, dtype=torch.int32)
    group_M = torch.searchsorted(groups.ends_E, row_M, right=True)
    last = groups.ends_E.shape[0] - 1
    start_E = F.pad(groups.ends_E[:-1], (1, 0))
    real_end_M = (start_E + groups.counts_E)[group_M.clamp(max=last)]
    return torch.where((group_M <= last) & (row_M < real_end_M), group_M, -1).int()


def _scaled(ratio: Tensor, scale: Tensor) -> Quantized:
    return Quantized(ratio.clamp(-MAX, MAX).to(DTYPE).flatten(-2), scale)


def _nothing(x: Tensor) -> Quantized:
    return Quantized(x.new_empty(0, dtype=DTYPE), x.new_empty(0, dtype=torch.float32))


def _sides(x: Tensor) -> str:
    return " × ".join(map(str, x.shape))


def _triton(x: Tensor) -> Any:
    if not (HAS_TRITON and x.is_cuda):
        return None
    from orrery.kernels.fp8 import quantize_triton

    return quantize_triton
