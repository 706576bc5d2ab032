"""Choose keys by FP8 scores as in vLLM's indexer, with DeepGEMM on Hopper.

D is 128. RoPE rotates R columns. `sparse_index` defines other letters. Each query head and each key
has one power-of-two scale. Source: vLLM 0.32, `models/deepseek_v32/common/kernels.py`.
"""

# mypy: disable-error-code="no-untyped-def"
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from orrery.kernels import HAS_TRITON
from orrery.kernels.fp8.products import load
from orrery.kernels.fp8.quantize import DTYPE, MAX

HEADS, WIDTH = (32, 64), 128  # accepted by DeepGEMM
MIN_AMAX = 1e-4  # lower bound of a row's largest absolute value, as in vLLM
SCALE_BYTES = 4
# Scores per chunk, 277 MB: 4 queries on each of 132 multiprocessors, for 2¹⁷ keys
CHUNK_ELEMENTS = 528 * 2**17
QUANTIZED = 2**24  # elements quantized at a time: 64 MiB in float32

# The signature of `sparse_index_triton.choose`, without `tiles`
TopKeys = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def has_library() -> bool:
    return load() is not None


# Equivalent to `torch.compiler.assume_constant_result`, without importing the compiler.
has_library._dynamo_marked_constant = True  # type: ignore[attr-defined]


def supports(x_TD: Tensor, num_heads: int, width: int) -> bool:
    is_half = x_TD.is_cuda and x_TD.dtype == torch.bfloat16
    return is_half and num_heads in HEADS and width == WIDTH and has_library()


def quantize_index(
    x_THD: Tensor, angles: Sequence[Tensor], turns_pairs: bool
) -> tuple[Tensor, Tensor]:
    """Return x rotated and quantized: float8_e4m3fn [T, H, D], and scales f32 [T, H].

    `angles` are cosines and sines [T, 1, R] with equal halves. The first R columns are rotated in
    pairs (2i, 2i + 1) if `turns_pairs`, otherwise (i, i + R/2).
    """
    return torch.ops.orrery.quantize_index(x_THD.detach(), *angles, turns_pairs)


def pack(key_T1D: Tensor, scale_T1: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [S, …]: each key's bytes and its scale's bytes, viewed as `dtype`."""
    key, scale = key_T1D.flatten(1).view(torch.uint8), scale_T1.view(torch.uint8)
    return torch.cat((key, scale), dim=1).view(dtype)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys float8_e4m3fn [S, D] and scales f32 [S]."""
    row = packed.view(torch.uint8)
    key, scale = row[:, :-SCALE_BYTES], row[:, -SCALE_BYTES:]
    return key.contiguous().view(DTYPE), scale.contiguous().view(torch.float32).squeeze(1)


def triton_top_keys(
    score_CS: Tensor, first_C: Tensor, last_C: Tensor, key_C: Tensor, index_CK: Tensor
) -> None:
    from orrery.kernels import sparse_index_triton as kernels

    kernels.choose(score_CS, first_C, last_C, key_C, index_CK, kernels.TILES)


def select_keys(
    q_THD: Tensor,
    packed: Tensor,
    weights_TH: Tensor,
    first_T: Tensor,
    last_T: Tensor,
    top_k: int,
    top_keys: TopKeys = triton_top_keys,
) -> Tensor:
    """Return the `top_k` best keys of each query: i32 [T, top_k], ascending, padded with −1.

    q comes from `quantize_index`, `packed` from `pack`.
    """
    (key_SD, scale_S), num_queries = unpack(packed), q_THD.shape[0]
    num_keys = key_SD.shape[0]
    index_TK = first_T.new_full((num_queries, top_k), -1, dtype=torch.int32)
    if 0 in (num_queries, num_keys, top_k):
        return index_TK
    begin_T = first_T.clamp(0, num_keys).int()
    end_T = torch.maximum(last_T.clamp(max=num_keys - 1).int() + 1, begin_T)
    zero_T, last_column_T = torch.zeros_like(begin_T), end_T - begin_T - 1
    library: Any = load()
    step = max(4, CHUNK_ELEMENTS // num_keys // 4 * 4)  # DeepGEMM's blocks have 2 or 4 queries
    for start in range(0, num_queries, step):
        rows = slice(start, start + step)
        begin_C, end_C = begin_T[rows], end_T[rows]
        # Column j of query t is key begin_t + j, undefined from end_t − begin_t on.
        score_CS = library.fp8_mqa_logits(
            q_THD[rows], (key_SD, scale_S), weights_TH[rows], begin_C, end_C,
            clean_logits=False, max_seqlen_k=num_keys,
        )  # fmt: skip
        top_keys(score_CS, zero_T[rows], last_column_T[rows], begin_C, index_TK[rows])
        del score_CS
    return index_TK


@torch.library.custom_op("orrery::quantize_index", mutates_args=())
def _quantize(x: Tensor, cos: Tensor, sin: Tensor, turns_pairs: bool) -> tuple[Tensor, Tensor]:
    if x.is_cuda and HAS_TRITON and x.shape[2] == WIDTH and cos.shape[2] == WIDTH // 2:
        from orrery.kernels import sparse_index_triton as kernels

        return kernels.quantize_index(
            x.contiguous(), cos.contiguous(), sin.contiguous(), turns_pairs
        )
    return quantize_plainly(x, cos, sin, turns_pairs)


def quantize_plainly(
    x: Tensor, cos: Tensor, sin: Tensor, turns_pairs: bool
) -> tuple[Tensor, Tensor]:
    value, scale = torch.empty_like(x, dtype=DTYPE), x.new_empty(x.shape[:2], dtype=torch.float32)
    step = max(1, QUANTIZED // x[0].numel()) if x.numel() else 1
    for start in range(0, len(x), step):
        rows = slice(start, start + step)
        turned = _rotate(x[rows].float(), cos[rows].float(), sin[rows].float(), turns_pairs)
        scale[rows] = (turned.abs().amax(-1).clamp(min=MIN_AMAX) / MAX).log2().ceil().exp2()
        value[rows] = (turned / scale[rows, :, None]).to(DTYPE)
    return value, scale


def _rotate(x_THD: Tensor, cos_T1R: Tensor, sin_T1R: Tensor, turns_pairs: bool) -> Tensor:
    width = cos_T1R.shape[-1]
    cos, sin = cos_T1R[..., : width // 2], sin_T1R[..., : width // 2]
    turning = x_THD[..., :width]
    if turns_pairs:
        first, second = turning[..., ::2], turning[..., 1::2]
    else:
        first, second = turning.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    both = torch.stack(turned, dim=-1).flatten(-2) if turns_pairs else torch.cat(turned, dim=-1)
    return torch.cat((both, x_THD[..., width:]), dim=-1)


@_quantize.register_fake
def _(x, cos, sin, turns_pairs):
    return torch.empty_like(x, dtype=DTYPE), x.new_empty(x.shape[:2], dtype=torch.float32)
