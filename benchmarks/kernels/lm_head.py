"""Time the chunked LM head on one GPU against its bound: 16,384 tokens, vocabulary of 151,936.

Both backends are checked against float32 with all logits on 2,048 tokens first. Timed at hidden
1,024, 2,048 and 4,096: both backends, chunk "auto" and 4,096, kept logits, a frozen weight, and
each step of one tile. The bound is the sum of
- products at 650 TFLOP/s: 2·T·D·V FLOPs forward, 6·T·D·V backward, of which a frozen weight saves
  2·T·D·V and kept logits 2·T·D·V;
- bytes at 4.2 TB/s: a float32 logit written and read forward; backward, written unless kept, read,
  and its bfloat16 gradient written.

    python benchmarks/kernels/lm_head.py
"""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from timing import BYTES, GEMM_FLOPS, milliseconds, record_share, require, smoke_and_device

from orrery.kernels import token_logprob as lm_head
from orrery.kernels.token_logprob import reference_token_logprob, token_logprob

VOCAB = 151_936
TOKENS, REFERENCE_TOKENS = 16_384, 2_048
HIDDEN = (1_024, 2_048, 4_096)
GOAL = 0.9  # share of the bound, forward and backward at hidden 2,048
# The logits' gradient and both results round to bfloat16: at most 2⁻⁹ each.
TOLERANCES = [1e-5, 1e-5, 5e-3, 5e-3]


def example(tokens: int, hidden: int, vocab: int, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return [hidden, weight, target, temperature] and incoming gradients. Logits have std 2."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    inputs = [
        normal(tokens, hidden).bfloat16(),
        (normal(vocab, hidden) * 2 / hidden**0.5).bfloat16(),
        torch.randint(0, vocab, (tokens,), generator=generator, device=device),
        0.7 + 0.6 * torch.rand(tokens, generator=generator, device=device),
    ]
    return inputs, [normal(tokens), normal(tokens)]


def outcome(
    op: Any, inputs: list[Tensor], arriving: list[Tensor], *args: Any, **backend: Any
) -> list[Tensor]:
    hidden, weight = (x.detach().requires_grad_() for x in inputs[:2])
    outputs = op(hidden, weight, *inputs[2:], *args, **backend)
    return [
        *(x.detach() for x in outputs),
        *torch.autograd.grad(outputs, (hidden, weight), arriving),
    ]


def reference(inputs: list[Tensor], arriving: list[Tensor]) -> list[Tensor]:
    return outcome(
        reference_token_logprob,
        [x.float() if x.is_floating_point() else x for x in inputs],
        arriving,
    )


def measure(
    inputs: list[Tensor],
    arriving: list[Tensor],
    chunk: Any,
    backend: Any,
    *,
    trained: bool = True,
    keep_logits: bool = False,
) -> dict[str, Any]:
    """Return one row: times, bounds and peak memory above the inputs."""
    hidden, weight = inputs[0].detach().requires_grad_(), inputs[1].detach().requires_grad_(trained)
    target, temperature = inputs[2:]
    wanted = [x for x in (hidden, weight) if x.requires_grad]

    def forward() -> Any:
        with torch.no_grad():
            return token_logprob(hidden, weight, target, temperature, chunk, backend=backend)

    def both() -> Any:
        outputs = token_logprob(
            hidden, weight, target, temperature, chunk, keep_logits=keep_logits, backend=backend
        )
        return torch.autograd.grad(outputs, wanted, arriving)

    peak_bytes = 0
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both()
        peak_bytes = torch.cuda.max_memory_allocated() - before
    forward_ms, both_ms = milliseconds(forward, 5), milliseconds(both, 5)
    (num_tokens, width), vocab = hidden.shape, weight.shape[0]
    product_ms = 2e3 * num_tokens * width * vocab / GEMM_FLOPS
    forward_bound_ms = product_ms + 8e3 * num_tokens * vocab / BYTES
    products, logit_bytes = 4 - (not trained) - keep_logits, 14 if keep_logits else 18
    both_bound_ms = product_ms * products + logit_bytes * 1e3 * num_tokens * vocab / BYTES
    options = f"{', kept logits' * keep_logits}{', frozen weight' * (not trained)}"
    return {
        "variant": f"hidden {width}, {backend}, chunk {chunk}{options}",
        "value": both_bound_ms / both_ms,
        "goal": None,  # the first row at hidden 2,048 gets one
        "forward_ms": forward_ms,
        "forward_and_backward_ms": both_ms,
        "forward_bound_ms": forward_bound_ms,
        "forward_and_backward_bound_ms": both_bound_ms,
        "forward_share": forward_bound_ms / forward_ms,
        "peak_bytes_above_inputs": peak_bytes,
    }


def parts(inputs: list[Tensor], arriving: list[Tensor], backend: Any) -> dict[str, Any]:
    """Time each step over one tile of "auto": products in TFLOP/s, passes in TB/s."""
    hidden, weight, target, temperature = inputs
    (num_tokens, width), vocab = hidden.shape, weight.shape[0]
    chunk = lm_head.auto_chunk_tokens(hidden.device, vocab)
    tokens, block = lm_head.tiles(num_tokens, vocab, chunk, backend)[0]
    hidden, target, temperature = hidden[tokens], target[tokens], temperature[tokens]
    arriving = [x[tokens] for x in arriving]
    num_tokens = tokens.stop
    update_state, gradient_pass = lm_head._passes(backend)
    found: dict[str, Any] = {"tokens": num_tokens, "words": block.stop}

    def product(name: str, flops: float, call: Any) -> None:
        ms = milliseconds(call, 5)
        found[name] = {"ms": ms, "tflops": flops / ms / 1e9}

    def one_pass(name: str, num_bytes: float, call: Any) -> None:
        ms = milliseconds(call, 5)
        found[name] = {"ms": ms, "tbytes_per_s": num_bytes / ms / 1e9}

    flops = 2 * num_tokens * width * block.stop
    product("logits", flops, lambda: lm_head.wide_matmul(hidden, weight[block].T))
    logits = lm_head.wide_matmul(hidden, weight[block].T)
    state = lm_head.initial_state(num_tokens, torch.float32, hidden.device)
    zeros, given = torch.zeros_like(temperature), (logits, target, temperature, 0)
    one_pass("softmax", 4 * logits.numel(), lambda: update_state(state, *given))
    rows = (target, temperature, zeros, zeros, *arriving, 0, hidden.dtype)
    one_pass("gradient", 6 * logits.numel(), lambda: gradient_pass(logits, *rows))
    gradient = gradient_pass(logits.normal_(), *rows)  # the plain backend overwrote the logits
    total, out = torch.zeros_like(hidden, dtype=torch.float32), torch.empty_like(weight[block])
    product("hidden_gradient", flops, lambda: lm_head._add_matmul(total, gradient, weight[block]))
    product("weight_gradient", flops, lambda: lm_head._write_matmul(out, gradient.T, hidden))
    return found


def main() -> None:
    smoke, device = smoke_and_device("lm_head", __doc__)
    vocab, tokens, reference_tokens, sizes = (
        (1_000, 64, 32, (16,)) if smoke else (VOCAB, TOKENS, REFERENCE_TOKENS, HIDDEN)
    )
    backends = ["triton", "plain"] if device == "cuda" and lm_head.HAS_TRITON else ["plain"]
    rows: list[dict[str, Any]] = []
    details: dict[str, Any] = {
        "tokens": tokens,
        "vocab": vocab,
        "errors_against_float32": {},
        "parts": {},
    }
    details["triton"] = version("triton") if lm_head.HAS_TRITON else None
    for hidden in sizes:
        inputs, arriving = example(reference_tokens, hidden, vocab, device)
        expected = reference(inputs, arriving)
        for backend in backends:
            for chunk in (
                reference_tokens,
                reference_tokens // 4 + 8,
            ):  # one block, and several of uneven length
                what = f"hidden {hidden}, {backend}, chunk {chunk}"
                errors = require(
                    what,
                    outcome(token_logprob, inputs, arriving, chunk, backend=backend),
                    expected,
                    TOLERANCES,
                )
                details["errors_against_float32"][what] = errors
        del inputs, arriving, expected
        inputs, arriving = example(tokens, hidden, vocab, device)
        for backend in backends:
            rows.append(measure(inputs, arriving, "auto", backend))
        rows.append(measure(inputs, arriving, tokens // 4, backends[0]))
        rows.append(measure(inputs, arriving, "auto", backends[0], keep_logits=True))
        rows.append(measure(inputs, arriving, "auto", backends[0], trained=False))
        details["parts"][f"hidden {hidden}, {backends[0]}"] = parts(inputs, arriving, backends[0])
        for row in rows[-len(backends) - 3 :]:
            print(
                f"{row['variant']}: {row['forward_ms']:.2f}, "
                f"{row['forward_and_backward_ms']:.2f} ms, {row['value']:.0%} of bound"
            )
        print(details["parts"][f"hidden {hidden}, {backends[0]}"])
        del inputs, arriving
    start = f"hidden {sizes[len(sizes) // 2]}, {backends[0]}, chunk auto"
    chosen = next(row for row in rows if row["variant"].startswith(start))
    chosen["goal"] = GOAL
    if not smoke:
        record_share(
            Path(__file__).with_suffix(".json"),
            figure="LM head forward and backward, share of the bound, hidden 2,048, 16,384 tokens",
            value=chosen["value"],
            goal=GOAL,
            details=details,
            rows=rows,
        )


if __name__ == "__main__":
    main()
