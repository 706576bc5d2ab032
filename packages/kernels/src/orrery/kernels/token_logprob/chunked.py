"""Chunked LM head: at most `chunk_tokens` × V logits exist at any time (or one for each token, where that is more).

- Forward and backward go over the same tiles of all logits: the backward makes each again, by the same product of the same shapes, so
  that its logits are the forward's to the last bit. The forward keeps hidden, weight, target, temperature and two numbers a token; or
  the logits as well, where memory is plenty (`keep_logits`).
- With Triton a tile is a part of the vocabulary for all tokens. The forward carries what a softmax needs from one to the next. A tile's
  rows of the weight's gradient are one product, rounded once: no float32 copy of that gradient exists, nor a sum over chunks. What is
  summed over tiles, in float32 inside the products, is the gradient of the hidden states: T × D numbers, not V × D.
- In the plain form a tile is `chunk_tokens` tokens with the whole vocabulary, so that what else is in the batch does not change a token's
  product; the weight's gradient is summed over tiles in float32 and rounded once.
- So the length of a chunk changes the order of sums in float32, and nothing else.
- Logits are float32 whatever the inputs are: bfloat16 operands are multiplied as they are and accumulated in float32 on a GPU, and
  converted first on a CPU. Float64 inputs stay float64 (for the referee's tests). Their gradient is rounded to the inputs' dtype.
- Gradients flow through log-prob and entropy to hidden and weight, each made only where it is wanted; target and temperature are
  constants. Not twice differentiable. The host waits for nothing.

What moves on a GPU with Triton, beside the products: each float32 logit is written and read once in the forward, and in the backward
written and read once more and its bfloat16 gradient written once (and read by two products).
"""

from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from orrery.kernels.token_logprob import logits

ChunkTokens = int | Literal["auto"]
Form = Literal["plain", "triton"]

AUTO_SHARE = (
    16  # of the device's memory, one part for a chunk's float32 logits and their 16-bit gradient
)
AUTO_CPU_TOKENS = 256
ALIGNMENT = 128  # blocks are whole tiles of the products where they are large enough

_HAS_TRITON = find_spec("triton") is not None


def token_logprob(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    target_T: Tensor,
    temperature_T: Tensor,
    chunk_tokens: ChunkTokens,
    *,
    keep_logits: bool = False,
    form: Form | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of `target_T` under softmax(hidden · weightᵀ / temperature), and that distribution's entropy: float32 [T] each.

    hidden [T, D] and weight [V, D] of one floating dtype; target i64 [T] in [0, V); temperature f32 [T] > 0. T may be 0.
    `chunk_tokens` "auto": on a GPU as many as a sixteenth of its total memory holds at 6 bytes a logit, in multiples of 128; on a CPU
    256. Total, not free memory: the same on every rank of one kind, so that ranks make the same blocks.
    `keep_logits`: the forward's logits stay, 4 · T · V bytes, and the backward makes a quarter fewer products of the same bits.
    `form` is Triton's on a GPU where it is installed, and plain otherwise; naming one is for tests and measurements.
    """
    num_tokens = hidden_TD.shape[0]
    if chunk_tokens != "auto" and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, or auto, got {chunk_tokens}")
    if hidden_TD.dtype != weight_VD.dtype or hidden_TD.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"hidden {hidden_TD.dtype} {list(hidden_TD.shape)} and weight {weight_VD.dtype} {list(weight_VD.shape)} do not go together"
        )
    if target_T.shape != (num_tokens,) or temperature_T.shape != (num_tokens,):
        raise ValueError(
            f"target {list(target_T.shape)} and temperature {list(temperature_T.shape)} must be [{num_tokens}]"
        )
    if form is None:
        form = (
            "triton"
            if _HAS_TRITON and hidden_TD.is_cuda and hidden_TD.dtype != torch.float64
            else "plain"
        )
    chunk_tokens = (
        auto_chunk_tokens(hidden_TD.device, weight_VD.shape[0])
        if chunk_tokens == "auto"
        else chunk_tokens
    )
    return _ChunkedTokenLogprob.apply(
        hidden_TD, weight_VD, target_T, temperature_T, chunk_tokens, form, keep_logits
    )


def auto_chunk_tokens(device: torch.device, vocab_size: int) -> int:
    """Tokens of a chunk that "auto" stands for; `token_logprob` says the rule."""
    if device.type != "cuda":
        return AUTO_CPU_TOKENS
    tokens = torch.cuda.get_device_properties(device).total_memory // (AUTO_SHARE * 6 * vocab_size)
    return max(ALIGNMENT, tokens // ALIGNMENT * ALIGNMENT)


def tiles(
    num_tokens: int, vocab_size: int, chunk_tokens: int, form: Form
) -> list[tuple[slice, slice]]:
    """(tokens, words) that cover all logits, each of at most `chunk_tokens` × V of them, one word for every token at least."""
    if form == "plain":
        return [
            (slice(i, min(i + chunk_tokens, num_tokens)), slice(0, vocab_size))
            for i in range(0, num_tokens, chunk_tokens)
        ]
    tokens, words = (
        slice(0, num_tokens),
        blocks(vocab_size, chunk_tokens * vocab_size // max(1, num_tokens)),
    )
    return [(tokens, block) for block in words]


def blocks(length: int, longest: int) -> list[slice]:
    """As few slices as cover `length` at no more than `longest` (at least 1) each, of nearly one size, multiples of 128 where that fits."""
    longest = max(1, longest)
    size = -(-length // max(1, -(-length // longest)))
    aligned = -(-size // ALIGNMENT) * ALIGNMENT
    size = aligned if aligned <= longest else size
    return [slice(start, min(start + size, length)) for start in range(0, length, max(1, size))]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def wide_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with float32 accumulation and result (float64 for float64)."""
    out = _wide(a)
    if a.dtype == out:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=out)
    return a.to(out) @ b.to(out)


def _add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in the dtype of total: inside the product where this torch can."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += wide_matmul(a, b)


def _write_matmul(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a @ b, accumulated in float32 and rounded once."""
    if a.is_cuda or a.dtype == _wide(a):
        torch.mm(a, b, out=out)
    else:
        out.copy_(wide_matmul(a, b))


class _ChunkedTokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        target_T: Tensor,
        temperature_T: Tensor,
        chunk_tokens: int,
        form: Form,
        keep_logits: bool,
    ) -> tuple[Tensor, Tensor]:
        absorb = _passes(form).absorb
        ctx.logits = []
        state_4T = logits.nothing_seen(hidden_TD.shape[0], _wide(hidden_TD), hidden_TD.device)
        for tokens, words in tiles(hidden_TD.shape[0], weight_VD.shape[0], chunk_tokens, form):
            logits_CB = wide_matmul(hidden_TD[tokens], weight_VD[words].T)
            if keep_logits:
                ctx.logits.append(
                    logits_CB.clone() if form == "plain" else logits_CB
                )  # the plain passes write over what they read
            absorb(
                state_4T[:, tokens], logits_CB, target_T[tokens], temperature_T[tokens], words.start
            )
            del logits_CB  # a name would keep one tile's alive while the next one's are made
        logprob_T, entropy_T, log_normalizer_T = logits.finish(state_4T)
        ctx.save_for_backward(
            hidden_TD, weight_VD, target_T, temperature_T, log_normalizer_T, entropy_T
        )
        ctx.chunk_tokens, ctx.form = chunk_tokens, form
        return logprob_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob_T: Tensor, grad_entropy_T: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, target_T, temperature_T, log_normalizer_T, entropy_T = (
            ctx.saved_tensors
        )
        gradient = _passes(ctx.form).gradient
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        rows = (
            target_T,
            temperature_T,
            log_normalizer_T,
            entropy_T,
            grad_logprob_T,
            grad_entropy_T,
        )
        every = tiles(hidden_TD.shape[0], weight_VD.shape[0], ctx.chunk_tokens, ctx.form)
        dtype, summed = log_normalizer_T.dtype, len({tokens.start for tokens, _ in every}) != 1
        grad_hidden_TD = torch.zeros_like(hidden_TD, dtype=dtype) if wants_hidden else None
        grad_weight_VD = None
        if wants_weight:
            grad_weight_VD = (
                torch.zeros_like(weight_VD, dtype=dtype) if summed else torch.empty_like(weight_VD)
            )
        for tokens, words in every:
            hidden_CD, weight_BD = hidden_TD[tokens], weight_VD[words]
            rows_C = (row[tokens] for row in rows)
            logits_CB = ctx.logits.pop(0) if ctx.logits else wide_matmul(hidden_CD, weight_BD.T)
            grad_logits_CB = gradient(logits_CB, *rows_C, words.start, hidden_TD.dtype)
            del logits_CB
            if grad_hidden_TD is not None:
                _add_matmul(grad_hidden_TD[tokens], grad_logits_CB, weight_BD)
            if grad_weight_VD is not None:
                (_add_matmul if summed else _write_matmul)(
                    grad_weight_VD[words], grad_logits_CB.T, hidden_CD
                )
            del grad_logits_CB
        grad_hidden_TD = grad_hidden_TD.to(hidden_TD.dtype) if grad_hidden_TD is not None else None
        grad_weight_VD = grad_weight_VD.to(weight_VD.dtype) if grad_weight_VD is not None else None
        return grad_hidden_TD, grad_weight_VD, None, None, None, None, None


def _passes(form: Form) -> Any:
    """The module whose `absorb` and `gradient` pass over a tile's logits."""
    if form == "plain":
        return logits
    from orrery.kernels.token_logprob import triton

    return triton
