"""Triton kernels of `token_logprob`, each with one pass over contiguous float32 logits.

NaN and infinite logits give NaN. Offsets have 64 bits, because T × V can exceed 2³¹.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

ABSORB_BLOCK = 4096
GRADIENT_BLOCK = 4096
NUM_WARPS = 8


def update_state(
    state_4T: Tensor, logits_TB: Tensor, target_T: Tensor, temperature_T: Tensor, first_column: int
) -> None:
    num_rows, width = logits_TB.shape
    if logits_TB.numel():
        block = min(ABSORB_BLOCK, triton.next_power_of_2(width))
        rows = (logits_TB, target_T, temperature_T, state_4T)
        _absorb[(num_rows,)](*rows, first_column, num_rows, width, BLOCK=block, num_warps=NUM_WARPS)


def gradient(
    logits_TB: Tensor,
    target_T: Tensor,
    temperature_T: Tensor,
    log_normalizer_T: Tensor,
    entropy_T: Tensor,
    grad_logprob_T: Tensor,
    grad_entropy_T: Tensor,
    first_column: int,
    out_dtype: torch.dtype,
) -> Tensor:
    num_rows, width = logits_TB.shape
    grad_TB = torch.empty_like(logits_TB, dtype=out_dtype)
    if grad_TB.numel():
        block = min(GRADIENT_BLOCK, triton.next_power_of_2(width))
        # The gradient of a sum has stride 0 and is not contiguous.
        gradients = (grad_logprob_T.contiguous(), grad_entropy_T.contiguous())
        rows = (target_T, temperature_T, log_normalizer_T, entropy_T, *gradients)
        _gradient[(num_rows, triton.cdiv(width, block))](
            logits_TB, *rows, grad_TB, first_column, width, BLOCK=block, num_warps=NUM_WARPS
        )
    return grad_TB


@triton.jit
def _absorb(logits, target, temperature, state, first_column, num_rows, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    scale = 1.0 / tl.load(temperature + row).to(tl.float32)
    maximum = tl.load(state + row)
    s = tl.load(state + num_rows + row)
    w = tl.load(state + 2 * num_rows + row)
    s_lanes = tl.zeros([BLOCK], tl.float32)
    w_lanes = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        z = tl.load(logits + row * width + column, mask=inside, other=-float("inf")) * scale
        risen = tl.maximum(maximum, tl.max(z, axis=0))
        fall = maximum - risen
        decay = tl.exp(fall)
        d = tl.where(inside, z - risen, 0.0)
        e = tl.where(inside, tl.exp(d), 0.0)
        w_lanes = decay * (w_lanes + fall * s_lanes) + d * e
        s_lanes = decay * s_lanes + e
        w = decay * (w + fall * s)
        s = decay * s
        maximum = risen
    tl.store(state + row, maximum)
    tl.store(state + num_rows + row, s + tl.sum(s_lanes, axis=0))
    tl.store(state + 2 * num_rows + row, w + tl.sum(w_lanes, axis=0))
    column = tl.load(target + row) - first_column
    if (column >= 0) & (column < width):
        tl.store(state + 3 * num_rows + row, tl.load(logits + row * width + column) * scale)


@triton.jit
def _gradient(
    logits, target, temperature, log_normalizer, entropy, grad_logprob, grad_entropy, out,
    first_column, width, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    scale = 1.0 / tl.load(temperature + row).to(tl.float32)
    g = tl.load(grad_logprob + row).to(tl.float32)
    h = tl.load(grad_entropy + row).to(tl.float32)
    z = tl.load(logits + row * width + column, mask=inside, other=0.0) * scale
    log_p = z - tl.load(log_normalizer + row)
    at_target = column == tl.load(target + row) - first_column
    value = tl.where(at_target, g, 0.0) - tl.exp(log_p) * (g + h * (log_p + tl.load(entropy + row)))
    tl.store(out + row * width + column, (value * scale).to(out.dtype.element_ty), mask=inside)
