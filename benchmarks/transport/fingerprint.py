"""Measure how fast slices in a bucket are fingerprinted: whole experts, half columns, an odd shape.

First, the slices' fingerprints must add up to the tensor's `array_fingerprint`. On a GPU the bound
is one pass over the bytes at the speed of a copy on an H200. The figure is the share of this bound
for whole experts, which are nearly all bytes of a mixture. On a CPU it is one thread's GB/s.

    python benchmarks/transport/fingerprint.py

It writes fingerprint_gpu.json on a machine with a GPU, otherwise fingerprint_cpu.json.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from orrery.wire.fingerprint import MASK, SliceFingerprints, SliceSpec, array_fingerprint
from record import parser_of, record

BYTES_A_S = 4.2e12  # copying on an H200
GOAL = 0.6  # share of the bound
REPEATS = 7
# {name: (tensor's shape, number of slices, dimension that is sliced)}
VARIANTS = {
    "whole experts [768, 2048]": ((768, 2048), 1, 0),
    "rows of [4096, 2048], two ranks": ((4096, 2048), 2, 0),
    "columns of [2048, 4096], two ranks": ((2048, 4096), 2, 1),
    "an odd shape, [999, 1001]": ((999, 1001), 1, 0),
}


def bucket(
    shape: tuple[int, int], parts: int, dim: int, size: int, device: torch.device
) -> tuple[torch.Tensor, list[SliceSpec], torch.Tensor]:
    """Return about `size` bytes of aligned bfloat16 slices, their places, and the whole tensor."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(shape, generator=generator).bfloat16()
    slices = whole.chunk(parts, dim)
    where, pieces, offset = [], [], 0
    while offset < size:
        for index, one in enumerate(slices):
            starts = tuple(index * slices[0].shape[dim] if at == dim else 0 for at in range(2))
            padded = -(-one.numel() * 2 // 16) * 16
            where.append(SliceSpec(offset, tuple(one.shape), shape, starts, 2))
            raw = torch.zeros(padded, dtype=torch.uint8)
            raw[: one.numel() * 2] = one.contiguous().view(-1).view(torch.uint8)
            pieces.append(raw)
            offset += padded
    return torch.cat(pieces).to(device), where, whole


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--mib", type=int, help="of a bucket; 1024 on a GPU, 64 on a CPU")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path(__file__).parent)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_gpu = device.type == "cuda"
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name, (shape, parts, dim) in VARIANTS.items():
        buffer, where, whole = bucket(
            shape, parts, dim, (options.mib or (1024 if is_gpu else 64)) << 20, device
        )
        fingerprints = SliceFingerprints(where, device)
        shares = fingerprints.of(buffer).tolist()
        expected = array_fingerprint(whole.view(torch.int16).numpy())
        for first in range(0, len(where), parts):
            if sum(shares[first : first + parts]) & MASK != expected:
                raise SystemExit(
                    f"{name}: the shares of tensor {first // parts} do not add up "
                    "to the reference fingerprint"
                )
        times = []
        for _ in range(REPEATS):
            if is_gpu:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            fingerprints.of(buffer)
            if is_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        seconds = statistics.median(times)
        gb_per_s = buffer.numel() / seconds / 1e9
        row = {
            "variant": name,
            "value": gb_per_s,
            "bytes": buffer.numel(),
            "slices": len(where),
            "seconds": seconds,
        }
        if is_gpu:
            bound_s = buffer.numel() / BYTES_A_S
            row |= {
                "value": bound_s / seconds,
                "gb_per_s": gb_per_s,
                "bound_s": bound_s,
                "goal": None if rows else GOAL,
            }
        rows.append(row)
        print(
            f"{name:36s} {gb_per_s:8.1f} GB/s, {1e3 * seconds:.2f} ms "
            f"for {buffer.numel() / 2**20:.0f} MiB"
        )
    record(
        options.out / f"fingerprint_{'gpu' if is_gpu else 'cpu'}.json",
        figure="fingerprints of whole experts, "
        + ("share of the bytes' bound" if is_gpu else "one thread"),
        value=rows[0]["value"],
        unit="share" if is_gpu else "GB/s",
        goal=GOAL if is_gpu else None,
        better="higher",
        rows=rows,
    )


if __name__ == "__main__":
    main()
