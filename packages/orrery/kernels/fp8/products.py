"""Linear layers and groups of experts in FP8, with float32 accumulation in all three products.

- y = x · wᵀ reads x quantized by rows. dx = dy · w reads dy quantized by rows. dw = dyᵀ · x reads
  both quantized by columns, so the forward pass keeps x's columns in FP8.
- Backends: DeepGEMM on a Hopper GPU (the engine's products, bit for bit), or float32 products of
  dequantized operands, the slow reference.
- Operators are opaque to torch.compile. They compute a gradient only if autograd needs it, and keep
  x's columns only if the weight needs a gradient.
- Without `parts` each pass quantizes the weight, because a gathered weight is freed after a pass.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from orrery.kernels.fp8 import deep_gemm
from orrery.kernels.fp8.quantize import (
    BLOCK,
    DTYPE,
    Quantized,
    RowGroups,
    dequantize_columns,
    dequantize_rows,
    dequantize_weight,
    quantize,
    quantize_weight,
)

Parts = list[Tensor]  # value and scale of a weight, then of its transpose


def weight_parts(weight: Tensor) -> Parts:
    """Return `weight` [.., N, K] quantized for all products of a step."""
    forward, backward = quantize_weight(weight)
    return [*forward, *backward]


def fp8_linear(x_MK: Tensor, weights: Sequence[Tensor], parts: Parts | None = None) -> list[Tensor]:
    """Return x times each weight transposed: [M, N] each, in x's dtype, from one product.

    Weights [N, K] share x. `parts` is `weight_parts(torch.cat(weights))`. Raise ValueError if 128
    does not divide K and every N.
    """
    sizes = [weight.shape[0] for weight in weights]
    if bad := [size for size in sizes if size % BLOCK]:
        raise ValueError(f"a layer in FP8 has a multiple of 128 outputs, not {bad[0]}")
    joined_NK = weights[0] if len(weights) == 1 else torch.cat(list(weights))
    keeps = torch.is_grad_enabled() and joined_NK.requires_grad
    y_MN = _linear(x_MK, joined_NK, parts or [], keeps)[0]
    return list(y_MN.split(sizes, dim=1))


def fp8_grouped_matmul(
    x_MK: Tensor, weight_ENK: Tensor, groups: RowGroups, parts: Parts | None = None
) -> Tensor:
    """Return rows of group e times weight[e] transposed: [M, N] in x's dtype.

    Padding may hold any numbers in x, and is undefined in the result and x's gradient. `parts` is
    `weight_parts(weight)`. Raise ValueError if 128 does not divide M, N and K.
    """
    if x_MK.shape[0] % BLOCK:
        raise ValueError(f"rows of groups in FP8 are a multiple of 128, not {x_MK.shape[0]}")
    keeps = torch.is_grad_enabled() and weight_ENK.requires_grad
    return _grouped(x_MK, weight_ENK, parts or [], *groups, keeps)[0]


@torch.library.custom_op("orrery::fp8_linear", mutates_args=())
def _linear(
    x_MK: Tensor, weight_NK: Tensor, parts: list[Tensor], keeps: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, and x's columns if `keeps`."""
    weight = Quantized(*(parts or weight_parts(weight_NK))[:2])
    rows, columns = quantize(x_MK, has_columns=keeps)
    return _product(rows, weight, x_MK.dtype), *columns


@_linear.register_fake
def _(
    x_MK: Tensor, weight_NK: Tensor, parts: list[Tensor], keeps: bool
) -> tuple[Tensor, Tensor, Tensor]:
    m, k = x_MK.shape
    blocks = (m + BLOCK - 1) // BLOCK
    value_t = x_MK.new_empty((k, blocks * BLOCK) if keeps else 0, dtype=DTYPE)
    scale_t = x_MK.new_empty((blocks, k) if keeps else 0, dtype=torch.float32)
    return x_MK.new_empty(m, weight_NK.shape[0]), value_t, scale_t


@torch.library.custom_op("orrery::fp8_linear_backward", mutates_args=())
def _linear_gradients(
    grad_MN: Tensor, columns: list[Tensor], weight: list[Tensor], wants_x: bool, wants_weight: bool
) -> tuple[Tensor, Tensor]:
    """Return x's gradient in grad's dtype and the weight's in float32, empty if unwanted.

    `weight` is the plain weight, or value and scale of its transpose.
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
    _, weight_NK, parts, _ = inputs
    _keep(ctx, weight_NK, parts, output)


def _linear_backward(ctx: Any, grad_MN: Tensor | None, *_: Any) -> tuple[Any, ...]:
    nothing = [None] * ctx.num_parts
    if grad_MN is None:
        return None, None, nothing, None
    wants = ctx.needs_input_grad[:2]
    weight, columns = ctx.saved_tensors[:-2], ctx.saved_tensors[-2:]
    found = _linear_gradients(grad_MN.contiguous(), list(columns), list(weight), *wants)
    return *_wanted(ctx, found), nothing, None


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
    """Return y [M, N], then values and scales of x's columns, which are empty unless `keeps`.

    `token_M` and `score_M` are those of `quantize`. With them this operator has no autograd.
    """
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
    """Return dx [M, K] in grad's dtype and dw f32 [E, N, K]. Unwanted gradients are empty.

    `columns` are x's. `weight` is as in `_linear_gradients`. dy is grad, or grad[token_M].
    """
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
    _keep(ctx, weight_ENK, parts, (*output[:1], ends_E, counts_E, *output[1:]))


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


def _keep(ctx: Any, weight: Tensor, parts: Parts, output: tuple[Tensor, ...]) -> None:
    """Keep the columns of x, and the weight only if x's gradient is wanted."""
    ctx.mark_non_differentiable(*output[-2:])
    ctx.set_materialize_grads(False)
    ctx.num_parts, ctx.dtype = len(parts), weight.dtype
    kept = (parts[2:] or [weight]) if ctx.needs_input_grad[0] else []
    ctx.save_for_backward(*kept, *output[1:])


def _wanted(ctx: Any, found: tuple[Tensor, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    wants_x, wants_weight = ctx.needs_input_grad[:2]
    grad_x, grad_weight = found
    return grad_x if wants_x else None, grad_weight.to(ctx.dtype) if wants_weight else None


def _transposed(weight: list[Tensor]) -> Quantized:
    return Quantized(*(weight if len(weight) == 2 else weight_parts(weight[0])[2:]))


def _width(weight: list[Tensor]) -> int:
    """Return K of a plain weight [.., N, K], or of its transpose in parts."""
    return weight[0].shape[-1] if len(weight) == 1 else weight[0].shape[-2]


# Backends


def _product(rows: Quantized, weight: Quantized, dtype: torch.dtype) -> Tensor:
    if dtype == torch.bfloat16 and (library := deep_gemm.load()):
        return deep_gemm.product(library, rows, weight, dtype)
    return (dequantize_rows(rows) @ dequantize_weight(weight).T).to(dtype)


def _weight_gradient(grad: Quantized, x: Quantized) -> Tensor:
    if grad.value.is_cuda and (library := deep_gemm.load()):
        return deep_gemm.weight_gradient(library, grad, x)
    return dequantize_columns(grad) @ dequantize_columns(x).T


def _grouped_product(
    rows: Quantized, weight: Quantized, groups: RowGroups, dtype: torch.dtype
) -> Tensor:
    if dtype == torch.bfloat16 and (library := deep_gemm.load()):
        return deep_gemm.grouped_product(library, rows, weight, groups, dtype)
    x_MK, weight_ENK = dequantize_rows(rows), dequantize_weight(weight)
    out_MN = x_MK.new_full((x_MK.shape[0], weight_ENK.shape[1]), float("nan"))
    for e, (begin, end) in enumerate(pairwise([0, *groups.ends_E.tolist()])):
        out_MN[begin:end] = x_MK[begin:end] @ weight_ENK[e].T
    return out_MN.to(dtype)


def _grouped_weight_gradient(grad: Quantized, x: Quantized, groups: RowGroups) -> Tensor:
    n, k = grad.scale.shape[1], x.scale.shape[1]
    if grad.value.is_cuda and (library := deep_gemm.load()):
        return deep_gemm.grouped_weight_gradient(library, grad, x, groups, (n, k))
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
