"""Check layers in block-scaled FP8 on one Hopper GPU, and time them beside bfloat16.

- `bytes`: count bytes of quantized activations and weights that differ from those of vLLM.
- `bits`: compare the outputs of a linear layer and of experts with vLLM's calls of DeepGEMM, and
  all results with float32 products of dequantized blocks and with a second run.
- `speed`: time each matrix product in bfloat16, in FP8, and in FP8 with its quantization (TFLOP/s).
- `experts`: time both passes of an MoE layer's experts, with permutation and activation: bfloat16,
  FP8 by separate operators, and fused FP8. Both FP8 forms must have equal bits.
- `dense`, `mixture`: train in bfloat16 and FP8 (tokens/s). `dense` is 12 layers of Qwen3-8B and two
  documents of 8,192 tokens, `mixture` 5 layers of Qwen3-30B-A3B with 16,384 tokens, equally routed.

A row with a goal has a `verdict`. If a part fails, the next one runs. Recorded rows of other parts
are kept. The folder $OUT gets a copy.

    python benchmarks/trainer/fp8_layers.py --parts bytes bits speed experts  # or all, 7 minutes
"""

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from timing import copy_out, milliseconds, relative_error

from orrery.kernels.expert_rows import (
    RowOrder,
    combine_rows,
    gather_rows,
    order_slots,
    sort_by_expert,
    swiglu_rows,
)
from orrery.kernels.fp8 import products
from orrery.kernels.fp8.products import (
    _grouped_gradients,
    _linear_gradients,
    fp8_experts,
    fp8_grouped_matmul,
    fp8_linear,
    weight_parts,
)
from orrery.kernels.fp8.quantize import (
    BLOCK,
    Quantized,
    RowGroups,
    dequantize_columns,
    dequantize_rows,
    dequantize_weight,
    group_of_rows,
    quantize,
    quantize_weight,
    reference_quantize_columns,
)
from orrery.kernels.grouped_matmul import grouped_matmul
from orrery.manifest.identity import load
from orrery.manifest.schema import trainer_misfits
from orrery.trainer.bench import Options, make_request
from orrery.trainer.bench.__main__ import run_ranks
from record import ROOT, parser_of, record

PARTS = ("bytes", "bits", "speed", "experts", "dense", "mixture")
RECORD = Path(__file__).with_suffix(".json")
LINEAR = ((16_384, 4096, 6144), (16_384, 4096, 24_576), (16_384, 12_288, 4096))  # M, K, N
# T tokens, K experts a token, E experts, D hidden, I inner width.
EXPERTS = ((16_384, 8, 128, 2048, 768), (16_384, 8, 32, 6144, 2048))
GROUPED = ((32, 1024, 6144, 4096), (128, 1024, 2048, 1536), (128, 1024, 768, 2048))  # E, rows, K, N
TOLERANCE = 2e-2  # tensor cores keep 14 bits of FP8 products; results round to 8 bits
SHARE = 0.9  # goal: speed with quantization over that of the FP8 product alone
SHAPES = {  # run, layers, parts in FP8, goals (speedup over bfloat16, tokens/s), routing
    "dense": ("qwen3_8b_8k", 12, ["attention", "feed_forward"], (1.3, 36_000), "natural"),
    "mixture": ("qwen3_30b_a3b_16k", 5, ["attention", "experts"], (1.24, 76_000), "balanced"),
}
LOWER = ("bytes that differ", "of its norm")  # units in which lower is better


def normal(*shape: int, std: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device="cuda") * std).bfloat16()


def differing(found: Tensor, wanted: Tensor) -> int:
    both = (each.contiguous().view(torch.uint8) for each in (found, wanted))
    return int(torch.ne(*both).sum())


# Bytes --------------------------------------------------------------------------------------------


def activations() -> dict[str, Tensor]:
    tiny = normal(512, 1024, std=1e-11, seed=1)
    tiny[:128] = 0
    spread = normal(4096, 4096, seed=2) * torch.exp2(normal(4096, 4096, seed=3).float() * 4)
    return {"normal": normal(4096, 4096), "wide": spread.bfloat16(), "tiny": tiny}


def measure_bytes() -> list[dict[str, Any]]:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    rows = []
    for name, x in activations().items():
        options = {"column_major_scales": True, "tma_aligned_scales": True, "use_ue8m0": False}
        value, scale = per_token_group_quant_fp8(x, BLOCK, **options)
        found = quantize(x, has_columns=False)[0]
        counts = differing(found.value, value), differing(found.scale, scale)
        rows.append(plain_row(f"bytes of activations, {name}", counts))
        value, scale = per_block_cast_to_fp8(x, [BLOCK, BLOCK], use_ue8m0=False)
        forward, backward = quantize_weight(x)
        counts = differing(forward.value, value), differing(forward.scale, scale)
        rows.append(plain_row(f"bytes of weights, {name}", counts))
        counts = differing(backward.value, value.T), differing(backward.scale, scale.T)
        rows.append(plain_row(f"bytes of transposed weights, {name}", counts))
        found, wanted = quantize(x, has_rows=False)[1], reference_quantize_columns(x)
        counts = differing(found.value, wanted.value), differing(found.scale, wanted.scale)
        rows.append(plain_row(f"bytes of columns and the plain form's, {name}", counts))
    return rows


def plain_row(name: str, counts: tuple[int, int]) -> dict[str, Any]:
    row = {"variant": name, "value": sum(counts), "unit": "bytes that differ", "goal": 0}
    return row | {"of_values": counts[0], "of_scales": counts[1]}


# Bits ---------------------------------------------------------------------------------------------


def groups_of(num_groups: int, rows: int, is_even: bool) -> tuple[RowGroups, int]:
    counts = torch.full((num_groups,), rows)
    if not is_even:
        counts = torch.randint(0, 2 * rows, (num_groups,), generator=torch.manual_seed(0))
    ends = ((counts + BLOCK - 1) // BLOCK * BLOCK).cumsum(0)
    total = int(ends[-1]) + BLOCK  # one block belongs to no group
    return RowGroups(*(each.int().cuda() for each in (ends, counts))), total


def measure_bits() -> list[dict[str, Any]]:
    rows = [linear_bits(1000, 4096, 6144), linear_bits(16_384, 4096, 1024)]
    rows += [grouped_bits(8, 300, 2048, 1536), grouped_bits(128, 100, 768, 2048)]
    return [row for each in rows for row in each]


def bits(name: str, found: Tensor, wanted: Tensor) -> dict[str, Any]:
    row = {"variant": name, "value": differing(found, wanted), "unit": "bytes that differ"}
    return {**row, "goal": 0, "error": relative_error(found, wanted)}


def repeated(name: str, found: list[Tensor], again: list[Tensor]) -> list[dict[str, Any]]:
    names = ("output", "gradient of x", "gradient of the weight")
    pairs = zip(names, found, again, strict=True)
    return [bits(f"{name}: {what} of two runs", *pair) for what, *pair in pairs]


def closeness(name: str, found: Tensor, wanted: Tensor) -> dict[str, Any]:
    error = relative_error(found, wanted)
    return {"variant": name, "value": error, "unit": "of its norm", "goal": TOLERANCE}


def outcome(call: Callable[[Tensor, Tensor], Tensor], *inputs: Tensor) -> list[Tensor]:
    *leaves, grad = inputs
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    y = call(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def linear_bits(m: int, k: int, n: int) -> list[dict[str, Any]]:
    from vllm.utils.deep_gemm import fp8_gemm_nt

    x, weight, grad = normal(m, k), normal(n, k, std=0.02, seed=1), normal(m, n, seed=2)
    parts = weight_parts(weight)
    name = f"layer {m} × {k} → {n}"

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return fp8_linear(x, [weight], parts)[0]

    found, again = (outcome(layer, x, weight, grad) for _ in range(2))
    theirs = torch.empty_like(found[0])
    quantized = tuple(quantize(x, has_columns=False)[0])
    fp8_gemm_nt(quantized, tuple(parts[:2]), theirs, is_deep_gemm_e8m0_used=False)
    rows = [bits(f"{name}: output and vLLM's", found[0], theirs)]
    rows += repeated(name, found, again)
    w = dequantize_weight(Quantized(*parts[:2]))
    (x_rows, x_columns), (g_rows, g_columns) = quantize(x), quantize(grad)
    wanted = (
        dequantize_rows(x_rows) @ w.T,
        dequantize_rows(g_rows) @ w,
        dequantize_columns(g_columns) @ dequantize_columns(x_columns).T,
    )
    names = ("output", "gradient of x", "gradient of the weight")
    return rows + [
        closeness(f"{name}: {what} and dequantized products", *pair)
        for what, pair in zip(names, zip(found, wanted, strict=True), strict=True)
    ]


def grouped_bits(num_groups: int, each: int, k: int, n: int) -> list[dict[str, Any]]:
    from vllm.utils.deep_gemm import m_grouped_fp8_gemm_nt_contiguous

    groups, m = groups_of(num_groups, each, is_even=False)
    x, grad = normal(m, k), normal(m, n, seed=2)
    x[int(groups.ends_E[-1]) :] = float("nan")
    weight = normal(num_groups, n, k, std=0.02, seed=1)
    parts, is_real = weight_parts(weight), group_of_rows(groups, m) >= 0
    name = f"{num_groups} experts × {each} rows, {k} → {n}"

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return fp8_grouped_matmul(x, weight, groups, parts)

    def real(results: list[Tensor]) -> list[Tensor]:
        return [results[0][is_real], results[1][is_real], results[2]]

    found, again = (real(outcome(layer, x, weight, grad)) for _ in range(2))
    theirs = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    quantized = tuple(quantize(x, groups, has_columns=False)[0])
    rows_group = group_of_rows(groups, m)
    m_grouped_fp8_gemm_nt_contiguous(quantized, tuple(parts[:2]), theirs, rows_group)
    rows = [bits(f"{name}: output and vLLM's", found[0], theirs[is_real])]
    rows += repeated(name, found, again)
    w = dequantize_weight(Quantized(*parts[:2]))
    wanted = [torch.zeros(m, n), torch.zeros(m, k), torch.zeros(num_groups, n, k)]
    wanted = [each.cuda() for each in wanted]
    begin = 0
    for e, (end, count) in enumerate(zip(*(part.tolist() for part in groups), strict=True)):
        here = slice(begin, begin + count)
        if count:
            (x_rows, x_columns), (g_rows, g_columns) = quantize(x[here]), quantize(grad[here])
            wanted[0][here] = dequantize_rows(x_rows) @ w[e].T
            wanted[1][here] = dequantize_rows(g_rows) @ w[e]
            wanted[2][e] = dequantize_columns(g_columns) @ dequantize_columns(x_columns).T
        begin = end
    names = ("output", "gradient of x", "gradient of the weight")
    return rows + [
        closeness(f"{name}: {what} and dequantized products", *pair)
        for what, pair in zip(names, zip(found, real(wanted), strict=True), strict=True)
    ]


# Speed --------------------------------------------------------------------------------------------


def measure_speed() -> list[dict[str, Any]]:
    library = products.load()
    if library is None:
        raise RuntimeError("DeepGEMM is not installed here")
    rows = []
    for m, k, n in LINEAR:
        rows += linear_speed(library, m, k, n)
    for shape in GROUPED:
        rows += grouped_speed(library, *shape)
    return rows


def timed(name: str, flops: float, calls: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Return a row: TFLOP/s of "with quantization", and of all others as fields."""
    rates = {what: flops / milliseconds(call) / 1e9 for what, call in calls.items()}
    rounded = {what: round(rate, 1) for what, rate in rates.items()}
    share = rates["with quantization"] / rates["product alone"]
    row = {"variant": name, "value": rounded["with quantization"], "unit": "TFLOP/s"}
    row["goal"] = round(SHARE * rates["product alone"], 1)
    return {**row, "tflops": rounded, "share_of_product": round(share, 3)}


def linear_speed(library: Any, m: int, k: int, n: int) -> list[dict[str, Any]]:
    x, weight, grad = normal(m, k), normal(n, k, std=0.02, seed=1), normal(m, n, seed=2)
    parts = weight_parts(weight)
    forward, backward = Quantized(*parts[:2]), Quantized(*parts[2:])
    (x_rows, x_columns), (g_rows, g_columns) = quantize(x), quantize(grad)
    columns, flops, name = list(x_columns), 2.0 * m * k * n, f"layer {m} × {k} → {n}"
    bf16 = torch.bfloat16
    sides = (columns, parts[2:])
    return [
        timed(
            f"{name}: forward",
            flops,
            {
                "bf16": lambda: x @ weight.T,
                "product alone": lambda: products.product(library, x_rows, forward, bf16),
                "with quantization": lambda: torch.ops.orrery.fp8_linear(x, [weight], parts, True),
            },
        ),
        timed(
            f"{name}: gradient of x",
            flops,
            {
                "bf16": lambda: grad @ weight,
                "product alone": lambda: products.product(library, g_rows, backward, bf16),
                "with quantization": lambda: _linear_gradients(grad, *sides, True, False),
            },
        ),
        timed(
            f"{name}: gradient of the weight",
            flops,
            {
                "bf16": lambda: grad.T @ x,
                "product alone": lambda: products.weight_gradient(library, g_columns, x_columns),
                "with quantization": lambda: _linear_gradients(grad, *sides, False, True),
            },
        ),
        timed(
            f"{name}: both gradients",
            2 * flops,
            {
                "bf16": lambda: (grad @ weight, grad.T @ x),
                "product alone": lambda: (
                    products.product(library, g_rows, backward, bf16),
                    products.weight_gradient(library, g_columns, x_columns),
                ),
                "with quantization": lambda: _linear_gradients(grad, *sides, True, True),
            },
        ),
        quantization_speed(f"quantization of {m} × {k}", x),
    ]


def quantization_variants() -> Iterator[str]:
    """Set each variant of the quantization kernel and yield its name. At the end, reset it."""
    from orrery.kernels.fp8 import quantize_triton as kernels

    before = kernels.ROWS, kernels.COLUMNS
    for variant in ((16, 4), (32, 4), (64, 4), (64, 8), (128, 4)):
        kernels.ROWS = kernels.COLUMNS = variant
        yield f"{variant[0]} rows or columns, {variant[1]} warps"
    kernels.ROWS, kernels.COLUMNS = before


def quantization_speed(name: str, x: Tensor) -> dict[str, Any]:
    """Return a row: TB/s by variant. A value of x counts 2 bytes read, and 1 written per layout.

    The layouts are rows and columns.
    """
    rates = {
        f"both, {variant}": 4e-9 * x.numel() / milliseconds(lambda: quantize(x))
        for variant in quantization_variants()
    }
    rates |= {
        "rows": 3e-9 * x.numel() / milliseconds(lambda: quantize(x, has_columns=False)),
        "columns": 3e-9 * x.numel() / milliseconds(lambda: quantize(x, has_rows=False)),
        "both": 4e-9 * x.numel() / milliseconds(lambda: quantize(x)),
        "weight": 4e-9 * x.numel() / milliseconds(lambda: quantize_weight(x)),
    }
    rounded = {what: round(rate, 2) for what, rate in rates.items()}
    return {"variant": name, "value": rounded["both"], "unit": "TB/s", "rates": rounded}


def grouped_speed(library: Any, num_groups: int, each: int, k: int, n: int) -> list[dict[str, Any]]:
    groups, m = groups_of(num_groups, each, is_even=True)
    x, grad = normal(m, k), normal(m, n, seed=2)
    weight = normal(num_groups, n, k, std=0.02, seed=1)
    parts = weight_parts(weight)
    forward, backward = Quantized(*parts[:2]), Quantized(*parts[2:])
    (x_rows, x_columns), (g_rows, g_columns) = quantize(x, groups), quantize(grad, groups)
    sides, ends, bf16 = (list(x_columns), parts[2:]), groups.ends_E, torch.bfloat16
    flops, name = 2.0 * num_groups * each * k * n, f"{num_groups} experts × {each} rows, {k} → {n}"
    real = int(ends[-1])

    def grouped_bf16(a: Tensor, b: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(a, b, offs=ends)

    return [
        timed(
            f"{name}: forward",
            flops,
            {
                "bf16": lambda: grouped_bf16(x[:real], weight.mT),
                "product alone": lambda: products.grouped_product(
                    library, x_rows, forward, groups, bf16
                ),
                "with quantization": lambda: torch.ops.orrery.fp8_grouped(
                    x, weight, parts, *groups, True
                ),
            },
        ),
        timed(
            f"{name}: gradient of x",
            flops,
            {
                "bf16": lambda: grouped_bf16(grad[:real], weight),
                "product alone": lambda: products.grouped_product(
                    library, g_rows, backward, groups, bf16
                ),
                "with quantization": lambda: _grouped_gradients(grad, *sides, *groups, True, False),
            },
        ),
        timed(
            f"{name}: gradient of the weight",
            flops,
            {
                "bf16": lambda: grouped_bf16(grad[:real].T, x[:real]),
                "product alone": lambda: products.grouped_weight_gradient(
                    library, g_columns, x_columns, groups, (n, k)
                ),
                "with quantization": lambda: _grouped_gradients(grad, *sides, *groups, False, True),
            },
        ),
    ]


# Experts ------------------------------------------------------------------------------------------


def experts_by_operators(
    x: Tensor, score: Tensor, rows: RowOrder, weights: list[Tensor], parts: list[list[Tensor]]
) -> Tensor:
    """Return [T, D] as `fp8_experts`, by separate operators. If `parts` is empty, in bfloat16.

    `weights` are [gate_up, down], and `parts` their FP8 forms.
    """
    groups = RowGroups(rows.ends_E, rows.counts_E)

    def product(x: Tensor, index: int) -> Tensor:
        if parts:
            return fp8_grouped_matmul(x, weights[index], groups, parts[index])
        return grouped_matmul(x, weights[index], rows.ends_E)

    act = swiglu_rows(product(gather_rows(x, rows), 0), order_slots(score, rows))
    return combine_rows(product(act, 1), rows)


def measure_experts(t: int, k: int, e: int, d: int, i: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(t, e, generator=generator).argsort(1)[:, :k].cuda()
    dense, blocks = sort_by_expert(chosen, e), sort_by_expert(chosen, e, BLOCK)
    inputs = [normal(t, d), torch.rand(t, k, generator=generator).cuda()]
    weights = [normal(e, 2 * i, d, std=0.02, seed=1), normal(e, d, i, std=0.02, seed=2)]
    parts, grad = [weight_parts(weight) for weight in weights], normal(t, d, seed=3)

    def results(how: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [each.detach().requires_grad_() for each in (*inputs, *weights)]
        out = how(*leaves[:2], leaves[2:])
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    def fused(x: Tensor, score: Tensor, weights: list[Tensor]) -> Tensor:
        return fp8_experts(x, score, blocks, (weights[0], weights[1]), (parts[0], parts[1]))

    forms: dict[str, Callable[..., Tensor]] = {
        "bf16": lambda x, score, w: experts_by_operators(x, score, dense, w, []),
        "FP8 by operators": lambda x, score, w: experts_by_operators(x, score, blocks, w, parts),
    }
    name = f"{t} tokens, {k} of {e} experts, {d} and {i} wide"
    times = {form: milliseconds(lambda how=how: results(how)) for form, how in forms.items()}
    wanted = results(forms["FP8 by operators"])
    differ = 0
    for variant in quantization_variants():
        times[f"FP8 fused, {variant}"] = milliseconds(lambda: results(fused))
        differ += sum(differing(*pair) for pair in zip(results(fused), wanted, strict=True))
    times["FP8 fused"] = milliseconds(lambda: results(fused))
    row = {"variant": name, "value": round(times["bf16"] / times["FP8 fused"], 3), "unit": "×"}
    row |= {"goal": 1.24, "ms": {form: round(ms, 3) for form, ms in times.items()}}
    return [row, plain_row(f"{name}: results of variants and by operators", (differ, 0))]


# Training -----------------------------------------------------------------------------------------


def options_of(name: str, **more: Any) -> Options:
    """Return options of a bench run whose weights stay gathered, because one GPU has them all."""
    _, layers, _, _, routing = SHAPES[name]
    fsdp = '{"reshard_after_forward": false}'
    return Options(
        devices=1,
        layers=layers,
        loss="sft",
        routing=routing,  # type: ignore[arg-type]
        fsdp=fsdp,
        **more,  # type: ignore[arg-type]
    )


def measure_training(name: str) -> list[dict[str, Any]]:
    manifest, layers, fp8, (goal, goal_tokens_s), _ = SHAPES[name]
    options = options_of(name, steps=6, warmup=3)
    request = make_request(load(ROOT / f"manifests/{manifest}.json"), options)
    rows: list[dict[str, Any]] = []
    for parts in (None, fp8):
        model = request.model.model_copy(update={"fp8": parts})
        if misfits := list(trainer_misfits(request.trainer, model, "h200", 1)):
            raise RuntimeError("; ".join(misfits))
        with tempfile.TemporaryDirectory() as folder:
            answer = run_ranks(replace(request, model=model), Path(folder), 240)[0]
        if "out_of_memory" in answer:
            raise RuntimeError(answer["out_of_memory"])
        times = sorted(sum(step["lengths"]) / step["step_s"] for step in answer["steps"])
        row = {
            "variant": f"{name}: {manifest}, {layers} layers, {'FP8' if parts else 'bfloat16'}",
            "value": round(times[len(times) // 2]),
            "unit": "tokens/s",
            "loss": answer["steps"][-1]["metrics"]["loss"],
            "peak_gib": round(answer["memory"]["peak_allocated_bytes"] / 2**30, 2),
        }
        if parts:
            row["goal"] = goal_tokens_s
        if "phases" in answer:
            phases = answer["phases"]
            row["seconds_by_kind"] = {
                kind: round(s, 4) for kind, s in phases["by_kind"].items() if s > 5e-4
            }
            row["longest_kernels"] = [
                [kernel[:80], round(seconds, 4), count]
                for kernel, _, seconds, count in phases["longest"][:14]
            ]
        rows.append(row)
    ratio = rows[1]["value"] / rows[0]["value"]
    rows.append({"variant": f"{name}: FP8 / bfloat16", "value": round(ratio, 3), "unit": "×"})
    rows[-1]["goal"] = goal
    return rows


def main() -> None:
    one = parser_of(__doc__)
    one.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    one.add_argument("--check", action="store_true", help="build the requests only; needs no GPU")
    arguments = one.parse_args()
    if arguments.check:
        for name, (manifest, *_) in SHAPES.items():
            print(make_request(load(ROOT / f"manifests/{manifest}.json"), options_of(name)).name)
        return
    if not torch.cuda.is_available():
        sys.exit("fp8_layers: there is no GPU here; run it on a host with one, or with --check")
    os.environ["VLLM_USE_DEEP_GEMM_E8M0"] = "0"  # as engines have it
    calls: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "bytes": measure_bytes,
        "bits": measure_bits,
        "speed": measure_speed,
        "experts": lambda: [row for shape in EXPERTS for row in measure_experts(*shape)],
        "dense": lambda: measure_training("dense"),
        "mixture": lambda: measure_training("mixture"),
    }
    rows, failed = [], []
    for part in arguments.parts:
        begin = time.monotonic()
        try:
            found = calls[part]()
        except Exception as error:
            traceback.print_exc()
            failed.append(f"{part}: {type(error).__name__}: {error}")
            found = []
        torch.cuda.empty_cache()
        for row in found:
            row |= {"part": part} | judged(row)
            print(json.dumps(row), flush=True)
        print(f"=== {part}: {time.monotonic() - begin:.0f} s", flush=True)
        rows += found
    if out := os.environ.get("OUT"):
        name = f"fp8_layers_{'_'.join(arguments.parts)}.json"
        (Path(out) / name).write_text(json.dumps(rows, indent=2) + "\n")
    keep(rows)
    if failed:
        sys.exit("\n".join(failed))


def judged(row: dict[str, Any]) -> dict[str, str]:
    """Return the `better` direction of a row, and its `verdict` if it has a goal."""
    better = "lower" if row["unit"] in LOWER else "higher"
    if "goal" not in row:
        return {"better": better}
    value, goal = row["value"], row["goal"]
    is_reached = value <= goal if better == "lower" else value >= goal
    return {"better": better, "verdict": "reached" if is_reached else "missed"}


def keep(rows: list[dict[str, Any]]) -> None:
    """Write the record, with recorded rows of other parts, if the first figure is known."""
    ran = {row["part"] for row in rows}
    before = json.loads(RECORD.read_text())["rows"] if RECORD.is_file() else []
    rows = [row for row in before if row["part"] not in ran] + rows
    rows.sort(key=lambda row: PARTS.index(row["part"]))
    values = {row["variant"]: row["value"] for row in rows}
    if "dense: FP8 / bfloat16" not in values:
        return
    record(
        RECORD,
        figure="trainer: FP8 against bfloat16, Qwen3-8B shape",
        value=values["dense: FP8 / bfloat16"],
        unit="×",
        goal=SHAPES["dense"][3][0],
        better="higher",
        rows=rows,
    )
    copy_out(RECORD)


if __name__ == "__main__":
    main()
