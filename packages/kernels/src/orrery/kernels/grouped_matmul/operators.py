"""The grouped product and its two gradients as custom operators, which torch.compile takes into one graph without a break.

- `orrery::grouped_matmul` is its own gradient with respect to x (with the weights transposed); `orrery::grouped_matmul_weight_gradient`
  is the other one. Each runs only where its gradient is wanted, and only what the wanted ones need is kept.
- bfloat16 on a GPU is torch's grouped GEMM where K and N are multiples of 8 (its rows start at multiples of 16 bytes): the group ends stay
  on the device. All else, float32 on a GPU too, loops over the groups and waits for their ends.
- Rows beyond `ends[-1]`, which a transfer of fixed capacity leaves, belong to no group. They give nothing to the weight's gradient. What
  they hold in the output and in x's gradient is undefined, NaN where the loop runs so that a reader shows.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from orrery.kernels.grouped_matmul.multiprocessors import leaving

# Public since torch 2.10, private before; None where this torch has neither.
_grouped_mm = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def grouped_matmul(x_MK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Rows `ends[e − 1]:ends[e]` of x times weight[e] transposed: [M, N] in x's dtype.

    x [M, K] and weight [E, N, K] of one dtype; ends i32 [E], rising, at most M; a group may be empty, M may be 0.
    Rows from ends[-1] on are undefined, in the output and in x's gradient.
    """
    if (
        x_MK.shape[1] != weight_ENK.shape[2]
        or x_MK.dtype != weight_ENK.dtype
        or ends_E.shape != weight_ENK.shape[:1]
    ):
        raise ValueError(
            f"x {x_MK.dtype} {list(x_MK.shape)}, weight {weight_ENK.dtype} {list(weight_ENK.shape)} and ends {list(ends_E.shape)} "
            "must be [M, K], [E, N, K] and [E], x and weight of one dtype"
        )
    return _product(x_MK, weight_ENK, ends_E)


def _fuses(a: Tensor, *widths: int) -> bool:
    return (
        _grouped_mm is not None
        and a.is_cuda
        and a.dtype == torch.bfloat16
        and all(width % 8 == 0 for width in widths)
    )


def product(x_MK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """The product as such, for operators that are made of it; it has no gradient of its own."""
    if x_MK.shape[0] and _fuses(x_MK, *weight_ENK.shape[1:]):
        with leaving():
            return _grouped_mm(x_MK.contiguous(), weight_ENK.transpose(1, 2), offs=ends_E)
    out_MN = x_MK.new_full((x_MK.shape[0], weight_ENK.shape[1]), float("nan"))
    start = 0
    for e, end in enumerate(ends_E.tolist()):
        if start < end:
            torch.mm(x_MK[start:end], weight_ENK[e].T, out=out_MN[start:end])
        start = end
    return out_MN


@torch.library.custom_op("orrery::grouped_matmul", mutates_args=())
def _product(x_MK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    return product(x_MK, weight_ENK, ends_E)


@_product.register_fake
def _(x_MK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    return x_MK.new_empty(x_MK.shape[0], weight_ENK.shape[1])


def weight_gradient(grad_MN: Tensor, x_MK: Tensor, ends_E: Tensor) -> Tensor:
    """[E, N, K]: grad[rows of group e]ᵀ @ x[rows of group e], zero for an empty group."""
    num_groups, n, k = ends_E.shape[0], grad_MN.shape[1], x_MK.shape[1]
    if x_MK.shape[0] and _fuses(x_MK, n, k):
        with leaving():
            return _grouped_mm(grad_MN.contiguous().T, x_MK.contiguous(), offs=ends_E)
    out_ENK = x_MK.new_zeros(num_groups, n, k)
    start = 0
    for e, end in enumerate(ends_E.tolist()):
        if start < end:
            torch.mm(grad_MN[start:end].T, x_MK[start:end], out=out_ENK[e])
        start = end
    return out_ENK


@torch.library.custom_op("orrery::grouped_matmul_weight_gradient", mutates_args=())
def _weight_gradient(grad_MN: Tensor, x_MK: Tensor, ends_E: Tensor) -> Tensor:
    return weight_gradient(grad_MN, x_MK, ends_E)


@_weight_gradient.register_fake
def _(grad_MN: Tensor, x_MK: Tensor, ends_E: Tensor) -> Tensor:
    return x_MK.new_empty(ends_E.shape[0], grad_MN.shape[1], x_MK.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    x_MK, weight_ENK, ends_E = inputs
    wants_x, wants_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x_MK if wants_weight else None, weight_ENK if wants_x else None, ends_E)


def _backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, ...]:
    x_MK, weight_ENK, ends_E = ctx.saved_tensors
    grad_MN = grad_MN.contiguous()  # a plain sum's is expanded, which the grouped GEMM refuses
    grad_x_MK = (
        _product(grad_MN, weight_ENK.transpose(1, 2), ends_E) if ctx.needs_input_grad[0] else None
    )
    grad_weight_ENK = _weight_gradient(grad_MN, x_MK, ends_E) if ctx.needs_input_grad[1] else None
    return grad_x_MK, grad_weight_ENK, None


_product.register_autograd(_backward, setup_context=_keep)
