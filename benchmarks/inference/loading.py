"""Measure the bytes that an expert-parallel engine rank reads from disk to load its weights. CPU.

vLLM's iterator reads a folder of two layers with GLM-5's widths and 32 experts, as one of 8 ranks.
It reads with an empty page cache, without and with the filter for the rank's experts, then with the
filter and a warm cache. Matrices have their real size (25 MB), because the kernel reads ahead.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import ROOT, own_words, record

NUM_LAYERS, NUM_EXPERTS, NUM_RANKS = 2, 32, 8
HIDDEN, WIDTH = 6144, 2048


def write_layer(path: Path) -> tuple[int, int]:
    """Write a layer in bfloat16. Return its bytes, and those of the experts."""
    layer = f"model.layers.{path.stem}"
    shapes = {f"{layer}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
    for expert in range(NUM_EXPERTS):
        for name in ("gate", "up", "down"):
            shapes[f"{layer}.mlp.experts.{expert}.{name}_proj.weight"] = (WIDTH, HIDDEN)
    random = {shape: torch.randn(shape).bfloat16() for shape in set(shapes.values())}
    tensors = {name: random[shape].clone() for name, shape in shapes.items()}
    save_file(tensors, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    experts = sum(one.nbytes for name, one in tensors.items() if ".experts." in name)
    return path.stat().st_size, experts


def forget(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_bytes() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def read(folder: Path, rank: int) -> None:
    """Read as `rank`, or all experts if `rank` is negative. Print bytes read, kept, and seconds."""
    from vllm.model_executor.model_loader.ep_weight_filter import compute_local_expert_ids
    from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

    own = None if rank < 0 else compute_local_expert_ids(NUM_EXPERTS, NUM_RANKS, rank)
    files, kept = [str(path) for path in folder.iterdir()], 0
    before, begin_s = disk_bytes(), time.perf_counter()
    for _, tensor in safetensors_weights_iterator(files, False, local_expert_ids=own):
        kept += tensor.clone().nbytes
    print(json.dumps([disk_bytes() - before, kept, time.perf_counter() - begin_s]))


def measured(folder: Path, rank: int) -> list[float]:
    done = subprocess.run(
        [sys.executable, __file__, str(folder), str(rank)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".loading.") as name:
        folder = Path(name)
        sizes = [write_layer(folder / f"{i}.safetensors") for i in range(NUM_LAYERS)]
        whole, experts = (sum(each) for each in zip(*sizes, strict=True))
        rows = []
        variants = (("a rank without the filter", -1, True), ("a rank of 8", 3, True))
        for variant, rank, is_cold in (*variants, ("the same rank's second start", 3, False)):
            if is_cold:
                forget(folder)
            read_bytes, kept, seconds = measured(folder, rank)
            row = {"variant": variant, "value": read_bytes / whole, "unit": "of the files"}
            rows.append(row | {"kept_bytes": kept, "seconds": seconds})
    for row in rows:
        print(row)
    bound = (whole - experts + experts / NUM_RANKS) / whole
    record(
        Path(__file__).with_suffix(".json"),
        figure="inference/loading",
        value=rows[1]["value"],
        unit="of the files",
        goal=round(1.1 * bound, 3),
        better="lower",
        rows=rows,
        details={"file_bytes": whole, "expert_bytes": experts, "bound": bound},
    )


if __name__ == "__main__":
    if words := own_words(__doc__):
        read(Path(words[0]), int(words[1]))
    else:
        main()
