"""Check and time how sparse attention's indexer chooses 2,048 keys: 32 heads of width 128, one GPU.

First the keys chosen for 64 queries are compared with the float32 reference. Then 4,096 queries are
timed, the last tokens of a document of 8,192 to 131,072 keys. Rows in bfloat16 time the scores, the
choice from given scores, `torch.topk` on them, and scores plus choice. Rows in FP8 time vLLM's
arithmetic at 131,072 keys: scores by DeepGEMM, scores plus a choice (the recorded value), and
quantization. The last rows vary tile sizes. Bounds are the scores' FLOPs at 650 TFLOP/s, 1,300 in
FP8, and one read of the scores at 4.2 TB/s. No row starts after `--seconds`. A failed row records
its error.

    python benchmarks/kernels/sparse_index.py
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from timing import BYTES, GEMM_FLOPS, guarded, limited_run, milliseconds, record_row, seconds

from orrery.kernels import sparse_index, sparse_index_fp8
from orrery.kernels.sparse_index import HAS_TRITON, reference_select_keys, select_keys

Data = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
QUERIES, TOP_K, HEADS, WIDTH = 4_096, 2_048, 32, 128
KEYS = (8_192, 32_768, 131_072)
CHOICE_MS = 1.44  # goal of the choice, if 1.15 × the time of the same run's scores is the rest
TOLERANCE = 1e-4  # of the largest score: rounding may swap keys whose scores are almost equal
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "choice": (
        {"parts": 2},
        {"parts": 8},
        {"choose_warps": 4},
        {"choose_warps": 16},
        {"sample": 2_048},
        {"aim": 1.6},
    ),
    "scores": (
        {"rows": 128, "keys": 128},
        {"stages": 3},
        {"keys": 32, "stages": 3},
        {"warps": 4},
        {"span": 16_384},
    ),
    "both": ({"chunk_elements": 2**25}, {"chunk_elements": 2**27}),
}


def example(queries: int, keys: int, heads: int, width: int, device: str) -> Data:
    """Return q [queries, heads, width], k [keys, width], weights [queries, heads], first and last.

    Query i may read keys `first[i]` to `last[i]`, i32. Queries are the last tokens of one document.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device)

    last = torch.arange(keys - queries, keys, device=device, dtype=torch.int32)
    q, k = normal(queries, heads, width).bfloat16(), normal(keys, width).bfloat16()
    return q, k, normal(queries, heads), torch.zeros_like(last), last


def checked(data: Data, top_k: int, backend: Any) -> dict[str, Any]:
    """Return a row: the largest error of the chosen keys' sorted scores, over the largest score.

    `passes` is True if that error is small, no query has a key twice, and two runs are equal.
    """
    found, again = (select_keys(*data, top_k, backend) for _ in range(2))
    wanted = reference_select_keys(*data, top_k)
    index_S = torch.arange(data[1].shape[0], device=found.device)
    score_TS = sparse_index._scores(*data, index_S)
    values = []
    for index_TK in (found, wanted):
        chosen_TK = score_TS.gather(1, index_TK.clamp(min=0).long())
        chosen_TK = chosen_TK.masked_fill(index_TK < 0, 0.0)
        values.append(chosen_TK.sort(dim=1, descending=True).values)
    error = ((values[0] - values[1]).abs().max() / values[1].abs().max()).item()
    rising = torch.where(found < 0, len(index_S), found).sort(dim=1).values
    distinct = bool((rising.diff(dim=1) > 0).logical_or(rising[:, 1:] == len(index_S)).all())
    passes = error <= TOLERANCE and distinct and torch.equal(found, again)
    return {"unit": "largest error", "value": error, "passes": passes}


def timed(data: Data, what: str, **sizes: Any) -> dict[str, Any]:
    from orrery.kernels import sparse_index_triton as kernels

    q, k, weights, first, last = data
    tiles = kernels.TILES._replace(**sizes)
    flops = 2.0 * q.numel() * k.shape[0]
    if what == "both":
        ms = milliseconds(lambda: kernels.select_keys(*data, TOP_K, tiles), 5)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kernels.select_keys(*data, TOP_K, tiles)
        peak = torch.cuda.max_memory_allocated() - before
        share = 1e3 * flops / GEMM_FLOPS / ms
        return {"value": flops / ms / 1e9, "ms": ms, "share_of_bound": share, "peak_bytes": peak}
    step = max(1, tiles.chunk_elements // k.shape[0])
    q, weights, first, last = (x[:step].contiguous() for x in (q, weights, first, last))
    score = kernels.score(q, k, weights, first, last, tiles)
    count = QUERIES / len(q)  # number of chunks
    if what == "scores":
        ms = count * milliseconds(lambda: kernels.score(q, k, weights, first, last, tiles), 5)
        return {
            "value": flops / ms / 1e9,
            "ms": ms,
            "share_of_bound": 1e3 * flops / GEMM_FLOPS / ms,
        }
    if what == "choice":
        out = torch.empty(len(q), TOP_K, dtype=torch.int32, device=q.device)
        ms = count * milliseconds(lambda: kernels.choose(score, first, last, first, out, tiles), 5)
    else:
        ms = count * milliseconds(lambda: score.topk(TOP_K, dim=1), 5)
    bound_ms = 4e3 * QUERIES * k.shape[0] / BYTES
    return {"unit": "ms", "value": ms, "share_of_bound": bound_ms / ms}


def quantized(data: Data) -> Data:
    """Return the data as vLLM's indexer has them, without a rotation."""
    q, k, weights, first, last = data
    q, q_scale = unturned(q)
    packed = sparse_index_fp8.pack(*unturned(k[:, None]), torch.bfloat16)
    return q, packed, weights * q_scale, first, last


def unturned(x_THD: Tensor) -> tuple[Tensor, Tensor]:
    """Return x quantized as an indexer's queries and keys, without a rotation."""
    angle = x_THD.new_zeros(len(x_THD), 1, 2)
    return sparse_index_fp8.quantize_index(x_THD, (angle.cos(), angle), True)


def timed_fp8(data: Data, what: str) -> dict[str, Any]:
    """Return a row of the FP8 backend.

    `what`: "scores", "both" (scores plus a choice), or "quantization".
    """
    given = quantized(data)
    flops = 2.0 * given[0].numel() * len(given[1])
    if what == "quantization":
        return {"unit": "ms", "value": milliseconds(lambda: quantized(data), 5)}
    choose = no_choice if what == "scores" else sparse_index_fp8.triton_top_keys
    call = lambda: sparse_index_fp8.select_keys(*given, TOP_K, choose)  # noqa: E731
    ms = milliseconds(call, 5)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    peak = torch.cuda.max_memory_allocated() - before
    share = 1e3 * flops / (2 * GEMM_FLOPS) / ms
    return {"value": flops / ms / 1e9, "ms": ms, "share_of_bound": share, "peak_bytes": peak}


def no_choice(*tensors: Tensor) -> None:
    pass


def main() -> None:
    smoke, until_s, device = limited_run("sparse_index", __doc__)
    backend = "triton" if device == "cuda" and HAS_TRITON else "plain"
    sizes = (8, 40, 4, 16) if smoke else (64, KEYS[-1] // 4, HEADS, WIDTH)
    given = (example(*sizes, device), 16 if smoke else TOP_K, backend)
    check = guarded(f"check, {backend}, {sizes}", until_s, checked, *given)
    if smoke or backend == "plain":
        sys.exit(0 if check.get("passes") else f"sparse_index: wrong: {check}")
    rows = []
    for keys in KEYS:
        data = example(QUERIES, keys, HEADS, WIDTH, device)
        for what in ("scores", "choice", "torch.topk", "both"):
            rows.append(guarded(f"{what}, {keys} keys", until_s, timed, data, what))
    for what in ("scores", "both", "quantization"):
        rows.append(guarded(f"FP8: {what}, {KEYS[-1]} keys", until_s, timed_fp8, data, what))
    scores, chosen = rows[-3:-1]
    if scores["value"] is None:
        sys.exit(f"sparse_index: the goal needs this row: {scores}")
    work = scores["value"] * scores["ms"]  # in TFLOP/s × ms
    for what, variants in VARIANTS.items():
        for variant in variants:
            call = lambda *given, variant=variant: timed(*given, **variant)  # noqa: E731
            name = f"{what}, {KEYS[-1]} keys, {variant}"
            rows.append(guarded(name, until_s, call, data, what))
    record_row(
        Path(__file__).with_suffix(".json"),
        chosen,
        round(work / (1.15 * scores["ms"] + CHOICE_MS), 1),
        figure="indexer: 2,048 of 131,072 keys for 4,096 queries, scores and choice",
        details={"check": check, "seconds": seconds()},
        rows=rows,
    )
    if not check.get("passes"):
        sys.exit(f"sparse_index: wrong: {check}")


if __name__ == "__main__":
    main()
