"""A router's logits: half-precision operands on tensor cores, float32 result and gradient.

y_TN = x_TD · w_NDᵀ, accumulated in float32 and not rounded (float64 for float64 operands)

The backward pass splits the float32 gradient into its half-precision rounding and the rest, for one
product of twice the width.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import torch.nn.functional as F
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def wide_linear(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    """Return x · weightᵀ [T, N] in float32 (float64 for float64). Differentiable.

    x [T, D] and weight [N, D] have one floating dtype.
    """
    if x_TD.is_cuda and x_TD.dtype in HALF and x_TD.dtype == weight_ND.dtype:
        return torch.ops.orrery.wide_linear(x_TD, weight_ND)
    return reference_wide_linear(x_TD, weight_ND)


def reference_wide_linear(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    """Return `wide_linear`'s result on any device and dtype: wide operands, plain autograd."""
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    return F.linear(x_TD.to(dtype), weight_ND.to(dtype))


@torch.library.custom_op("orrery::wide_linear", mutates_args=())
def _forward(x: Tensor, weight: Tensor) -> Tensor:
    return _wide_mm(x, weight.T)


@_forward.register_fake
def _(x, weight):
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)


@torch.library.custom_op("orrery::wide_linear_backward", mutates_args=())
def _backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    rounded = grad.to(x.dtype)
    parts = torch.cat((rounded, (grad - rounded.float()).to(x.dtype)), dim=1)
    grad_x = torch.mm(parts, torch.cat((weight, weight)))
    high, low = _wide_mm(parts.T, x).chunk(2)
    return grad_x, (high + low).to(weight.dtype)


@_backward.register_fake
def _(grad, x, weight):
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _wide_mm(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _gradients(ctx, grad):
    return torch.ops.orrery.wide_linear_backward(grad, *ctx.saved_tensors)


_forward.register_autograd(_gradients, setup_context=_setup_context)
