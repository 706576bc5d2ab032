"""Custom operators: a linear layer, and the product of each head with its own matrix.

T tokens, H heads, I input width, O output width, R width of `tail`

    linear:         out_to = Σ_i x_ti weight_oi + bias_o
    head_products:  out_tho = Σ_i x_thi weight_hio, followed by the columns of tail_th

Activation checkpointing of compiled graphs can keep these operators' results, not `F.linear`'s.

`head_products` reads and writes token-major tensors in place. An `einsum` computes head-major
results, then copies them.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return the layer's output [..., O]. Results and gradients equal `F.linear`'s bitwise."""
    return torch.ops.orrery.linear(x, weight_OI, bias_O)


@torch.library.custom_op("orrery::linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


@_linear.register_fake
def _(x, weight, bias):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _keep_operands(ctx, inputs, output):
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight)


def _linear_gradients(ctx, grad):
    x, weight = ctx.saved_tensors
    wants_x, wants_weight, wants_bias = ctx.needs_input_grad
    rows = grad.flatten(0, -2)
    return (
        grad @ weight if wants_x else None,
        rows.T @ x.flatten(0, -2) if wants_weight else None,
        rows.sum(0) if wants_bias else None,
    )


_linear.register_autograd(_linear_gradients, setup_context=_keep_operands)


def head_products(x_THI: Tensor, weight_HIO: Tensor, tail_THR: Tensor | None = None) -> Tensor:
    """Return the products, followed by the columns of `tail`: [T, H, O + R] in x's dtype.

    Raise ValueError on other shapes or dtypes.
    """
    (num_rows, num_heads, width), dtype = x_THI.shape, x_THI.dtype
    is_known = weight_HIO.shape[:2] == (num_heads, width) and weight_HIO.dtype == dtype
    if tail_THR is not None:
        is_known &= tail_THR.shape[:2] == (num_rows, num_heads) and tail_THR.dtype == dtype
    if not is_known:
        shapes = [[x.dtype, list(x.shape)] for x in (x_THI, weight_HIO, tail_THR) if x is not None]
        raise ValueError(f"{shapes} must be [T, H, I], [H, I, O] and [T, H, R] of one dtype")
    return torch.ops.orrery.head_products(x_THI, weight_HIO, tail_THR)


def reference_head_products(
    x_THI: Tensor, weight_HIO: Tensor, tail_THR: Tensor | None = None
) -> Tensor:
    out_THO = torch.einsum("thi,hio->tho", x_THI, weight_HIO)
    return out_THO if tail_THR is None else torch.cat((out_THO, tail_THR), dim=-1)


@torch.library.custom_op("orrery::head_products", mutates_args=())
def _forward(x: Tensor, weight: Tensor, tail: Tensor | None) -> Tensor:
    out, width = _empty(x, weight, tail), weight.shape[2]
    torch.bmm(x.transpose(0, 1), weight, out=out[..., :width].transpose(0, 1))
    if tail is not None:
        out[..., width:] = tail
    return out


@_forward.register_fake
def _empty(x, weight, tail):
    tail_width = 0 if tail is None else tail.shape[2]
    return x.new_empty(*x.shape[:2], weight.shape[2] + tail_width)


@torch.library.custom_op("orrery::head_products_backward", mutates_args=())
def _backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    grad_HTO = grad[..., : weight.shape[2]].transpose(0, 1)
    grad_x = x.new_empty(x.shape)
    torch.bmm(grad_HTO, weight.transpose(1, 2), out=grad_x.transpose(0, 1))
    return grad_x, torch.bmm(x.permute(1, 2, 0), grad_HTO)


@_backward.register_fake
def _(grad, x, weight):
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _setup_context(ctx, inputs, output):
    x, weight, tail = inputs
    ctx.has_tail = tail is not None
    ctx.save_for_backward(x, weight)


def _gradients(ctx, grad):
    x, weight = ctx.saved_tensors
    grads = torch.ops.orrery.head_products_backward(grad, x, weight)
    return *grads, grad[..., weight.shape[2] :] if ctx.has_tail else None


_forward.register_autograd(_gradients, setup_context=_setup_context)
