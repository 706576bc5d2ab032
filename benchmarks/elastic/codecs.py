"""Measure the codecs: speed of native code, numpy and torch operators, bytes, and error in a ring.

python benchmarks/elastic/codecs.py     about a minute on two cores
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from orrery.elastic.codecs import CODECS
from orrery.elastic.codecs.base import Codec, Floats
from record import parser_of, record

VALUES = 1 << 24
CHUNK = 50_000  # values a site of the error table, as in the published emulation
KINDS = ("int8_block", "int8_codebook", "int4_block")
DRAWS: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "gaussian": lambda draw, n: draw.standard_normal(n).astype(np.float32),
    "laplace": lambda draw, n: draw.laplace(size=n).astype(np.float32),
    "student_t3": lambda draw, n: draw.standard_t(3, n).astype(np.float32),
}


def best_s(call: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        begin_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin_s)
    return min(times)


def torch_codebook(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize as INTELLECT-1's published operators do: ±3σ in 256 bins, then bin means."""
    scale = 6 * x.norm() / (x.numel() - 1) ** 0.5 / 256
    codes = ((x / scale).round() + 128).clamp(0, 255).to(torch.uint8)
    index = codes.long()
    sums = torch.zeros(256).scatter_add_(0, index, x)
    return codes, sums / torch.bincount(index, minlength=256).clamp(min=1)


def three_sigma(x: Floats) -> Floats:
    codes, book = torch_codebook(torch.from_numpy(x))
    return book[codes.long()].numpy()


def fp8_rows(x: Floats) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows of 512 to 8 bits by their absolute maximum, as torchft's rows do."""
    padded = np.pad(x, (0, -x.size % 512)) if x.size % 512 else x
    rows = torch.from_numpy(padded.reshape(-1, 512))
    scale = rows.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return (rows / scale.clamp(min=1e-30)).to(torch.float8_e4m3fn), scale


def absmax_rows(x: Floats) -> Floats:
    coded, scale = fp8_rows(x)
    return (coded.float() * scale).reshape(-1)[: x.size].numpy()


def round_trip(codec: Codec) -> Callable[[Floats], Floats]:
    def through(x: Floats) -> Floats:
        out = np.empty_like(x)
        codec.decode(codec.encode(x), out)
        return out

    return through


def ring_error(coded: Callable[[Floats], Floats], draw: str, num_sites: int) -> float:
    """Return the relative L2 error of a sum that is coded after every addition."""
    errors = []
    for seed in range(3):
        generator = np.random.default_rng(seed)
        parts = [DRAWS[draw](generator, CHUNK) for _ in range(num_sites)]
        total = coded(parts[0])
        for part in parts[1:]:
            total = coded(total + part)
        exact = np.sum(parts, axis=0, dtype=np.float64)
        errors.append(float(np.linalg.norm(total - exact) / np.linalg.norm(exact)))
    return float(np.mean(errors))


def main() -> None:
    parser_of(__doc__).parse_args()
    here = Path(__file__).parent
    torch.set_num_threads(2)
    x = np.random.default_rng(0).standard_normal(VALUES).astype(np.float32)
    out = np.zeros_like(x)
    rows: list[dict[str, Any]] = []
    for kind in CODECS:
        for is_native in (True, False):
            if kind == "float32" and is_native:
                continue
            part = x if is_native else x[: VALUES // 8]
            codec = CODECS[kind](num_threads=2, native=is_native)
            wire = codec.encode(part)
            target = out[: part.size]
            rows.append(
                {
                    "variant": f"{kind} {'native' if is_native else 'numpy'}",
                    "value": part.nbytes / best_s(lambda: codec.encode(part)) / 1e9,  # noqa: B023
                    "decode": part.nbytes / best_s(lambda: codec.decode(wire, target)) / 1e9,  # noqa: B023
                    "ratio": 4 * part.size / len(wire),
                }
            )
    tensor = torch.from_numpy(x)
    seconds = best_s(lambda: torch_codebook(tensor))
    rows.append({"variant": "torch operators, ±3σ", "value": x.nbytes / seconds / 1e9})
    seconds = best_s(lambda: fp8_rows(x))
    rows.append({"variant": "torch operators, fp8 rows", "value": x.nbytes / seconds / 1e9})
    by_name = {row["variant"]: row for row in rows}
    record(
        here / "codecs.json",
        figure="Float32 quantized to int8, GB/s on two cores",
        value=float(by_name["int8_block native"]["value"]),
        unit="GB/s",
        goal=4.0,
        better="higher",
        details={"values": VALUES},
        rows=rows,
    )
    coders = {kind: round_trip(CODECS[kind]()) for kind in KINDS}
    coders |= {"int8 codebook ±3σ (INTELLECT-1)": three_sigma, "fp8 rows (torchft)": absmax_rows}
    table: list[dict[str, Any]] = [
        {"variant": f"{name}, {draw}, {sites} sites", "value": ring_error(coder, draw, sites)}
        for name, coder in coders.items()
        for draw in DRAWS
        for sites in (2, 4, 14)
    ]
    record(
        here / "codec_error.json",
        figure="Relative error of a sum over 14 sites in int8 blocks, Gaussian",
        value=float(
            next(
                row["value"] for row in table if row["variant"] == "int8_block, gaussian, 14 sites"
            )
        ),
        unit="of the sum",
        goal=0.04,
        better="lower",
        rows=table,
    )


if __name__ == "__main__":
    main()
