"""Compute linear layers and grouped experts in FP8, with float32 sums.

For y = x · wᵀ and dx = dy · w, x and dy are quantized by rows. For dw = dyᵀ · x, they are quantized
by columns. `parts` is the weight quantized in advance. Without it, each pass quantizes the weight.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from orrery.kernels.expert_rows import RowOrder, slot_values, sum_rows, swiglu_rows_backward
from orrery.kernels.fp8.quantize import (
    BLOCK,
    DTYPE,
    Quantized,
    RowGroups,
    dequantize_columns,
    dequantize_rows,
    dequantize_weight,
    group_of_rows,
    quantize,
    quantize_weight,
)

HOPPER = (9, 0)
BY_CHANNEL = (1, 1, BLOCK)  # both operands have 1 × 128 blocks


@cache
def load() -> ModuleType | None:
    """Return DeepGEMM, or None if it cannot run here."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER:
        return None
    # vLLM's default cache folder, to share compiled kernels with engines.
    root = os.environ.get("VLLM_CACHE_ROOT", "~/.cache/vllm")
    os.environ.setdefault("DG_JIT_CACHE_DIR", str(Path(root).expanduser() / "deep_gemm"))
    try:
        return importlib.import_module("deep_gemm")
    except ImportError:
        pass
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        return None
    folder = Path(vllm.origin).parent / "third_party" / "deep_gemm"
    if not (folder / "__init__.py").is_file():
        return None
    # Register vLLM's copy under the name that its submodules import.
    spec = importlib.util.spec_from_file_location(
        "deep_gemm", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["deep_gemm"] = module
    try:
        spec.loader.exec_module(module)
    except (ImportError, RuntimeError, AssertionError):  # wrong torch version, or no nvcc
        del sys.modules["deep_gemm"]
        return None
    return module


def product(library: Any, x: Quantized, weight: Quantized, dtype: torch.dtype) -> Tensor:
    """Return x · weightᵀ [M, N]. x [M, K] has 1 × 128 blocks, weight [N, K] 128 × 128."""
    out_MN = x.value.new_empty(x.value.shape[0], weight.value.shape[0], dtype=dtype)
    library.fp8_gemm_nt(tuple(x), tuple(weight), out_MN, disable_ue8m0_cast=True)
    return out_MN


def weight_gradient(library: Any, grad: Quantized, x: Quantized) -> Tensor:
    """Return gradᵀ · x, f32 [N, K]. Both inputs are columns from `quantize`."""
    out_NK = grad.value.new_zeros(grad.value.shape[0], x.value.shape[0], dtype=torch.float32)
    sides = ((each.value, each.scale.T) for each in (grad, x))
    library.fp8_gemm_nt(*sides, out_NK, c=out_NK, recipe=BY_CHANNEL, disable_ue8m0_cast=True)
    return out_NK


def grouped_product(
    library: Any, x: Quantized, weight: Quantized, groups: RowGroups, dtype: torch.dtype
) -> Tensor:
    """Return [M, N]: x's rows of group e times weight[e]ᵀ. Padding rows are undefined."""
    num_rows = x.value.shape[0]
    out_MN = x.value.new_empty(num_rows, weight.value.shape[1], dtype=dtype)
    group_M = group_of_rows(groups, num_rows)
    library.m_grouped_fp8_gemm_nt_contiguous(
        tuple(x), tuple(weight), out_MN, group_M, disable_ue8m0_cast=True
    )
    return out_MN


def grouped_weight_gradient(
    library: Any, grad: Quantized, x: Quantized, groups: RowGroups, sides: tuple[int, int]
) -> Tensor:
    """Return `weight_gradient` of each group, f32 [E, N, K]."""
    num_groups = groups.ends_E.shape[0]
    out_ENK = grad.value.new_zeros(num_groups, *sides, dtype=torch.float32)
    length_E = torch.diff(groups.ends_E, prepend=groups.ends_E.new_zeros(1))
    # DeepGEMM uses `sizes` only to choose tiles and check buffers, so they may be inexact.
    num_blocks = x.scale.shape[0]
    each, rest = divmod(num_blocks, num_groups)
    sizes = [(each + (e < rest)) * BLOCK for e in range(num_groups)]
    flat = ((part.value, part.scale.T) for part in (grad, x))
    library.k_grouped_fp8_gemm_nt_contiguous(*flat, out_ENK, sizes, length_E, c=out_ENK)
    return out_ENK


Parts = list[Tensor]  # value and scale of the weight, then of its transpose


def weight_parts(weight: Tensor) -> Parts:
    forward, backward = quantize_weight(weight)
    return [*forward, *backward]


def fp8_linear(x_MK: Tensor, weights: Sequence[Tensor], parts: Parts | None = None) -> list[Tensor]:
    """Return x · weightᵀ [M, N] in x's dtype for each weight [N, K].

    `parts` is `weight_parts(torch.cat(weights))`. Raise ValueError unless 128 divides K and each N.
    """
    sizes = [weight.shape[0] for weight in weights]
    if bad := [size for size in sizes if size % BLOCK]:
        raise ValueError(f"an FP8 layer has {bad[0]} outputs, but needs a multiple of 128")
    keeps = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    y_MN = _linear(x_MK, list(weights), parts or [], keeps)[0]
    return list(y_MN.split(sizes, dim=1))


def fp8_grouped_matmul(
    x_MK: Tensor, weight_ENK: Tensor, groups: RowGroups, parts: Parts | None = None
) -> Tensor:
    """Return [M, N] in x's dtype: x's rows of group e times weight[e]ᵀ.

    Padding rows are undefined in the result and in x's gradient. `parts` is `weight_parts(weight)`.
    128 must divide M, N and K. Raise ValueError if it does not divide N or K.
    """
    keeps = torch.is_grad_enabled() and weight_ENK.requires_grad
    return _grouped(x_MK, weight_ENK, parts or [], *groups, keeps)[0]


@torch.library.custom_op("orrery::fp8_linear", mutates_args=())
def _linear(
    x_MK: Tensor, weights: list[Tensor], parts: list[Tensor], keeps: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y and the quantized columns of x (empty unless `keeps`).

    Autograd keeps the weights, not their concatenation, because FSDP can free weights.
    """
    weight = Quantized(*(parts or weight_parts(_joined(weights)))[:2])
    rows, columns = quantize(x_MK, has_columns=keeps)
    return _product(rows, weight, x_MK.dtype), *columns


@_linear.register_fake
def _(
    x_MK: Tensor, weights: list[Tensor], parts: list[Tensor], keeps: bool
) -> tuple[Tensor, Tensor, Tensor]:
    m, k = x_MK.shape
    blocks = (m + BLOCK - 1) // BLOCK
    value_t = x_MK.new_empty((k, blocks * BLOCK) if keeps else 0, dtype=DTYPE)
    scale_t = x_MK.new_empty((blocks, k) if keeps else 0, dtype=torch.float32)
    return x_MK.new_empty(m, sum(weight.shape[0] for weight in weights)), value_t, scale_t


@torch.library.custom_op("orrery::fp8_linear_backward", mutates_args=())
def _linear_gradients(
    grad_MN: Tensor, columns: list[Tensor], weight: list[Tensor], wants_x: bool, wants_weight: bool
) -> tuple[Tensor, Tensor]:
    """Return dx in grad's dtype and dw in float32. Unwanted gradients are empty.

    `weight` holds the weight, or value and scale of its quantized transpose.
    """
    rows, grad_columns = quantize(grad_MN, None, wants_x, wants_weight)
    grad_x, grad_weight = grad_MN.new_empty(0), grad_MN.new_empty(0, dtype=torch.float32)
    if wants_x:
        grad_x = _product(rows, _transposed(weight), grad_MN.dtype)
    if wants_weight:
        grad_weight = _weight_gradient(grad_columns, Quantized(*columns))
    return grad_x, grad_weight


@_linear_gradients.register_fake
def _(
    grad_MN: Tensor, columns: list[Tensor], weight: list[Tensor], wants_x: bool, wants_weight: bool
) -> tuple[Tensor, Tensor]:
    m, n = grad_MN.shape
    grad_x = grad_MN.new_empty((m, _width(weight)) if wants_x else 0)
    shape = (n, columns[0].shape[0]) if wants_weight else 0
    return grad_x, grad_MN.new_empty(shape, dtype=torch.float32)


def _keep_for_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, weights, parts, _ = inputs
    ctx.sizes = [weight.shape[0] for weight in weights]
    _keep(ctx, weights, parts, output)


def _linear_backward(ctx: Any, grad_MN: Tensor | None, *_: Any) -> tuple[Any, ...]:
    nothing = [None] * ctx.num_parts
    wants_x, wants = ctx.needs_input_grad[:2]
    if grad_MN is None:
        return None, [None] * len(wants), nothing, None
    saved = ctx.saved_tensors  # readable only once with activation checkpointing
    weight, columns = list(saved[:-2]), list(saved[-2:])
    if weight and not ctx.num_parts:
        weight = [_joined(weight)]
    gradients = _linear_gradients(grad_MN.contiguous(), columns, weight, wants_x, any(wants))
    found = gradients[1].split(ctx.sizes) if any(wants) else wants
    grad_weights = [
        grad.to(ctx.dtype) if is_wanted else None
        for grad, is_wanted in zip(found, wants, strict=True)
    ]
    return gradients[0] if wants_x else None, grad_weights, nothing, None


_linear.register_autograd(_linear_backward, setup_context=_keep_for_linear)


@torch.library.custom_op("orrery::fp8_grouped", mutates_args=())
def _grouped(
    x_MK: Tensor,
    weight_ENK: Tensor,
    parts: list[Tensor],
    ends_E: Tensor,
    counts_E: Tensor,
    keeps: bool,
    token_M: Tensor | None = None,
    score_M: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `_linear` per group. `quantize` explains `token_M` and `score_M` (no autograd)."""
    weight, groups = (
        Quantized(*(parts or weight_parts(weight_ENK))[:2]),
        RowGroups(ends_E, counts_E),
    )
    rows, columns = quantize(x_MK, groups, True, keeps, token_M, score_M)
    return _grouped_product(rows, weight, groups, x_MK.dtype), *columns


@_grouped.register_fake
def _(
    x_MK: Tensor,
    weight_ENK: Tensor,
    parts: list[Tensor],
    ends_E: Tensor,
    counts_E: Tensor,
    keeps: bool,
    token_M: Tensor | None = None,
    score_M: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    m, k = (x_MK if token_M is None else token_M).shape[0], weight_ENK.shape[2]
    value_t = x_MK.new_empty(m * k if keeps else 0, dtype=DTYPE)
    scale_t = x_MK.new_empty((m // BLOCK, k) if keeps else 0, dtype=torch.float32)
    return x_MK.new_empty(m, weight_ENK.shape[1]), value_t, scale_t


@torch.library.custom_op("orrery::fp8_grouped_backward", mutates_args=())
def _grouped_gradients(
    grad_MN: Tensor,
    columns: list[Tensor],
    weight: list[Tensor],
    ends_E: Tensor,
    counts_E: Tensor,
    wants_x: bool,
    wants_weight: bool,
    token_M: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return dx [M, K] and dw [E, N, K] like `_linear_gradients`. dy is grad or grad[token_M]."""
    groups = RowGroups(ends_E, counts_E)
    rows, grad_columns = quantize(grad_MN, groups, wants_x, wants_weight, token_M)
    grad_x, grad_weight = grad_MN.new_empty(0), grad_MN.new_empty(0, dtype=torch.float32)
    if wants_x:
        grad_x = _grouped_product(rows, _transposed(weight), groups, grad_MN.dtype)
    if wants_weight:
        grad_weight = _grouped_weight_gradient(grad_columns, Quantized(*columns), groups)
    return grad_x, grad_weight


@_grouped_gradients.register_fake
def _(
    grad_MN: Tensor,
    columns: list[Tensor],
    weight: list[Tensor],
    ends_E: Tensor,
    counts_E: Tensor,
    wants_x: bool,
    wants_weight: bool,
    token_M: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    m, n = (grad_MN if token_M is None else token_M).shape[0], grad_MN.shape[1]
    grad_x = grad_MN.new_empty((m, _width(weight)) if wants_x else 0)
    shape = (ends_E.shape[0], n, columns[1].shape[1]) if wants_weight else 0
    return grad_x, grad_MN.new_empty(shape, dtype=torch.float32)


def _keep_for_grouped(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, weight_ENK, parts, ends_E, counts_E, *_ = inputs
    _keep(ctx, [weight_ENK], parts, (*output[:1], ends_E, counts_E, *output[1:]))


def _grouped_backward(ctx: Any, grad_MN: Tensor | None, *_: Any) -> tuple[Any, ...]:
    nothing = [None] * ctx.num_parts
    if grad_MN is None:
        return None, None, nothing, None, None, None
    wants = ctx.needs_input_grad[:2]
    *weight, ends_E, counts_E, value_t, scale_t = ctx.saved_tensors
    columns = [value_t, scale_t]
    found = _grouped_gradients(grad_MN.contiguous(), columns, weight, ends_E, counts_E, *wants)
    return *_wanted(ctx, found), nothing, None, None, None


_grouped.register_autograd(_grouped_backward, setup_context=_keep_for_grouped)


def _keep(ctx: Any, weights: list[Tensor], parts: Parts, output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[-2:])
    ctx.set_materialize_grads(False)
    ctx.num_parts, ctx.dtype = len(parts), weights[0].dtype
    kept = (parts[2:] or weights) if ctx.needs_input_grad[0] else []
    ctx.save_for_backward(*kept, *output[1:])


def _wanted(ctx: Any, found: tuple[Tensor, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    wants_x, wants_weight = ctx.needs_input_grad[:2]
    grad_x, grad_weight = found
    return grad_x if wants_x else None, grad_weight.to(ctx.dtype) if wants_weight else None


def _joined(weights: list[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def _transposed(weight: list[Tensor]) -> Quantized:
    return Quantized(*(weight if len(weight) == 2 else weight_parts(weight[0])[2:]))


def _width(weight: list[Tensor]) -> int:
    return weight[0].shape[-1] if len(weight) == 1 else weight[0].shape[-2]


def _product(rows: Quantized, weight: Quantized, dtype: torch.dtype) -> Tensor:
    if rows.value.is_cuda and dtype == torch.bfloat16 and (library := load()):
        return product(library, rows, weight, dtype)
    return (dequantize_rows(rows) @ dequantize_weight(weight).T).to(dtype)


def _weight_gradient(grad: Quantized, x: Quantized) -> Tensor:
    if grad.value.is_cuda and (library := load()):
        return weight_gradient(library, grad, x)
    return dequantize_columns(grad) @ dequantize_columns(x).T


def _grouped_product(
    rows: Quantized, weight: Quantized, groups: RowGroups, dtype: torch.dtype
) -> Tensor:
    if rows.value.is_cuda and dtype == torch.bfloat16 and (library := load()):
        return grouped_product(library, rows, weight, groups, dtype)
    x_MK, weight_ENK = dequantize_rows(rows), dequantize_weight(weight)
    out_MN = x_MK.new_full((x_MK.shape[0], weight_ENK.shape[1]), float("nan"))
    for e, (begin, end) in enumerate(pairwise([0, *groups.ends_E.tolist()])):
        out_MN[begin:end] = x_MK[begin:end] @ weight_ENK[e].T
    return out_MN.to(dtype)


def _grouped_weight_gradient(grad: Quantized, x: Quantized, groups: RowGroups) -> Tensor:
    n, k = grad.scale.shape[1], x.scale.shape[1]
    if grad.value.is_cuda and (library := load()):
        return grouped_weight_gradient(library, grad, x, groups, (n, k))
    out_ENK = grad.scale.new_zeros(groups.ends_E.shape[0], n, k)
    for e, (begin, end) in enumerate(pairwise([0, *groups.ends_E.tolist()])):
        grad_NM, x_KM = (
            dequantize_columns(
                Quantized(
                    part.value[begin * width : end * width].view(width, end - begin),
                    part.scale[begin // BLOCK : end // BLOCK],
                )
            )
            for part, width in ((grad, n), (x, k))
        )
        out_ENK[e] = grad_NM @ x_KM.T
    return out_ENK


def fp8_experts(
    x_TD: Tensor,
    score_TK: Tensor,
    rows: RowOrder,
    weights: tuple[Tensor, Tensor],
    parts: tuple[Parts, Parts],
) -> Tensor:
    """Return [T, D]: each token's sum of score · output over its experts with a row.

    `rows` comes from `sort_by_expert` with block 128. `weights` are gate-up [E, 2·I, D] and
    down [E, D, I], `parts` their `weight_parts` or two empty lists. Raise ValueError unless 128
    divides the number of rows.
    """
    if rows.row_M.shape[0] % BLOCK:
        raise ValueError(
            f"FP8 experts got {rows.row_M.shape[0]} rows; sort them with sort_by_expert(block=128)"
        )
    keeps = [torch.is_grad_enabled() and weight.requires_grad for weight in weights]
    order = (rows.row_M, rows.place_TK, rows.ends_E, rows.counts_E)
    return _Experts.apply(x_TD, score_TK, *weights, *order, *keeps, *parts[0], *parts[1])


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        score_TK: Tensor,
        gate_up: Tensor,
        down: Tensor,
        row_M: Tensor,
        place_TK: Tensor,
        ends_E: Tensor,
        counts_E: Tensor,
        keeps_x: bool,
        keeps_act: bool,
        *parts: Tensor,
    ) -> Tensor:
        first, second = list(parts[:4]), list(parts[4:])
        groups = (ends_E, counts_E)
        token_M, score_M = row_M // place_TK.shape[1], score_TK.flatten()[row_M]
        product = torch.ops.orrery.fp8_grouped
        gate_up_M2I, *of_x = product(x_TD, gate_up, first, *groups, keeps_x, token_M)
        y_MD, *of_act = product(gate_up_M2I, down, second, *groups, keeps_act, None, score_M)
        ctx.dtypes, ctx.num_parts = (gate_up.dtype, down.dtype), len(parts)
        rows = (gate_up_M2I, score_M, token_M, place_TK)
        kept = (first[2:], second[2:]) if parts else ([gate_up], [down])
        ctx.save_for_backward(*rows, *groups, *of_x, *of_act, *kept[0], *kept[1])
        return sum_rows(y_MD, place_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        gate_up_M2I, score_M, token_M, place_TK, *saved = ctx.saved_tensors
        groups, of_x, of_act, weights = saved[:2], saved[2:4], saved[4:6], saved[6:]
        half = len(weights) // 2
        wants_x, wants_score, wants_gate_up, wants_down = ctx.needs_input_grad[:4]
        gradients = torch.ops.orrery.fp8_grouped_backward
        grad_act, grad_down = gradients(
            grad_TD.contiguous(), of_act, weights[half:], *groups, True, wants_down, token_M
        )
        grad_gate_up_M2I, grad_score_M = swiglu_rows_backward(grad_act, gate_up_M2I, score_M)
        grad_x_MD, grad_gate_up = gradients(
            grad_gate_up_M2I, of_x, weights[:half], *groups, wants_x, wants_gate_up
        )
        grad_x = sum_rows(grad_x_MD, place_TK) if wants_x else None
        grad_score = slot_values(grad_score_M, place_TK) if wants_score else None
        of_weights = (
            gradient.to(dtype) if wants else None
            for gradient, dtype, wants in zip(
                (grad_gate_up, grad_down), ctx.dtypes, (wants_gate_up, wants_down), strict=True
            )
        )
        return grad_x, grad_score, *of_weights, *[None] * (6 + ctx.num_parts)
