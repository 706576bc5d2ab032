"""The same as `logits.py` in one pass over the logits each, as Triton kernels: float32 logits in, statistics or rounded gradients out.

- `statistics`: one program a row, an online softmax over blocks of columns. With m the running maximum and d = z − m it carries
  s = Σ exp d and w = Σ d exp d; when m rises by δ, w becomes exp(−δ)(w − δ s) and s becomes exp(−δ) s. Then
  log-normalizer = m + log s and entropy = log s − w / s: differences to the maximum, so nothing large cancels.
- `gradient`: one program a row and block of columns; `logits.py` holds the formula.
- NaN and infinite logits come out as NaN. Offsets are 64-bit: T·V passes 2³¹ at 15 thousand tokens.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

STATISTICS_BLOCK = 4096
GRADIENT_BLOCK = 4096
NUM_WARPS = 8


def statistics(logits_CV: Tensor, target_C: Tensor, temperature_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of the target, entropy and log-normalizer of whole rows; logits f32 [C, V] contiguous."""
    num_rows, vocab_size = logits_CV.shape
    out_3C = logits_CV.new_empty(3, num_rows)
    block = min(STATISTICS_BLOCK, triton.next_power_of_2(vocab_size))
    _statistics[(num_rows,)](logits_CV, target_C, temperature_C, out_3C, num_rows, vocab_size, BLOCK=block, num_warps=NUM_WARPS)
    return out_3C[0], out_3C[1], out_3C[2]


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
    """Gradient [T, B] of the logits in columns `first_column` and on, rounded once to `out_dtype`; logits f32 [T, B] contiguous."""
    num_rows, width = logits_TB.shape
    grad_TB = torch.empty_like(logits_TB, dtype=out_dtype)
    if grad_TB.numel():
        block = min(GRADIENT_BLOCK, triton.next_power_of_2(width))
        # An expanded gradient, such as a plain sum's, has stride 0.
        rows = (target_T, temperature_T, log_normalizer_T, entropy_T, grad_logprob_T.contiguous(), grad_entropy_T.contiguous())
        _gradient[(num_rows, triton.cdiv(width, block))](logits_TB, *rows, grad_TB, first_column, width, BLOCK=block, num_warps=NUM_WARPS)
    return grad_TB


@triton.jit
def _statistics(logits, target, temperature, out, num_rows, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    scale = 1.0 / tl.load(temperature + row).to(tl.float32)
    logits += row * vocab_size
    maximum = -1e38  # finite: the first block's rise must not make 0 · ∞
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocab_size
        z = tl.load(logits + column, mask=inside, other=-float("inf")) * scale
        risen = tl.maximum(maximum, tl.max(z, axis=0))
        fall = maximum - risen
        decay = tl.exp(fall)
        d = tl.where(inside, z - risen, 0.0)
        e = tl.where(inside, tl.exp(d), 0.0)
        weighted = decay * (weighted + fall * total) + d * e
        total = decay * total + e
        maximum = risen
    s = tl.sum(total, axis=0)
    log_s = tl.log(s)
    log_normalizer = maximum + log_s
    target_logit = tl.load(logits + tl.load(target + row)) * scale
    tl.store(out + row, target_logit - log_normalizer)
    tl.store(out + num_rows + row, log_s - tl.sum(weighted, axis=0) / s)
    tl.store(out + 2 * num_rows + row, log_normalizer)


@triton.jit
def _gradient(
    logits, target, temperature, log_normalizer, entropy, grad_logprob, grad_entropy, out, first_column, width, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    scale = 1.0 / tl.load(temperature + row).to(tl.float32)
    g = tl.load(grad_logprob + row).to(tl.float32)
    h = tl.load(grad_entropy + row).to(tl.float32)
    log_p = tl.load(logits + row * width + column, mask=inside, other=0.0) * scale - tl.load(log_normalizer + row)
    at_target = column == tl.load(target + row) - first_column
    value = tl.where(at_target, g, 0.0) - tl.exp(log_p) * (g + h * (log_p + tl.load(entropy + row)))
    tl.store(out + row * width + column, (value * scale).to(out.dtype.element_ty), mask=inside)
