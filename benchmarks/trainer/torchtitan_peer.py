"""Measure torchtitan 0.2.2's own training loop on this machine's GPUs, from its log.

- Its word-level tokenizer and its text of random words are written here. Nothing is fetched.
- Speed and memory are those of its last logged step, which its log averages over the last two.
- `torchtitan_flavors.py` adds flavors with fewer layers to torchtitan's table.

    python benchmarks/trainer/torchtitan_peer.py 30B-A3B --seq-len 16384 --devices 8 --balanced
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NUM_WORDS, WORDS_A_TEXT, NUM_TEXTS = 8192, 4096, 512
STEPS = 8
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_STEP = re.compile(
    r"step:\s*(?P<step>\d+)\s.*?memory:\s*(?P<memory>[\d.]+)GiB.*?tps:\s*(?P<speed>[\d,]+)"
)


@dataclass(frozen=True)
class Job:
    """One training job of torchtitan."""

    flavor: str
    seq_len: int
    batch: int
    checkpointing: str
    expert_parallel: int = 1
    balanced: bool = False


def measure(
    job: Job, devices: int, layers: int | None, logs: Path, deadline_s: float = 420.0
) -> dict[str, Any]:
    """Run the job. Return its last logged step, or raise RuntimeError with the end of its log."""
    with tempfile.TemporaryDirectory() as folder:
        assets = Path(folder)
        write_assets(assets)
        line = command(job, devices, layers, assets)
        print("+ " + " ".join(line), flush=True)
        given = os.environ.get("PYTHONPATH", "").split(":")
        environment = {
            **os.environ,
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(assets / "hf"),
            "TOKENIZERS_PARALLELISM": "false",
            "ORRERY_PEER_FLAVOR": job.flavor,
            "ORRERY_PEER_LAYERS": str(layers or ""),
            "PYTHONPATH": os.pathsep.join([str(HERE), *map(os.path.abspath, filter(None, given))]),
            "LOG_RANK": "0",
        }
        log = logs / f"torchtitan_{job.flavor}_{job.seq_len}.log"
        with log.open("w") as file:
            try:
                code = subprocess.run(
                    line,
                    env=environment,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    cwd=assets,
                    timeout=deadline_s,
                ).returncode
            except subprocess.TimeoutExpired:
                code = 124
        text = _COLORS.sub("", log.read_text(errors="replace"))
    steps = [found.groupdict() for found in _STEP.finditer(text)]
    if code or not steps:
        raise RuntimeError(
            f"torchtitan ended with code {code} and {len(steps)} steps logged:\n"
            + "\n".join(text.splitlines()[-40:])
        )
    speeds = [(int(one["step"]), float(one["speed"].replace(",", ""))) for one in steps]
    last = max(speeds)
    result = {
        "tokens_per_s_per_device": last[1],
        "step": last[0],
        "peak_reserved_gib": max(float(one["memory"]) for one in steps),
        "speeds": dict(speeds),
        "devices": devices,
        "layers": layers,
        "job": asdict(job),
        "command": " ".join(["python", *line[1:]]),
        "versions": versions(),
    }
    measured = f"{last[1]:,.0f} tokens/s/GPU, {result['peak_reserved_gib']:.1f} GiB"
    print(f"torchtitan {job.flavor} {job.seq_len}: {measured}", flush=True)
    return result


def command(job: Job, devices: int, layers: int | None, assets: Path) -> list[str]:
    """Return the peer's command line, with data from `assets`."""
    flavor = job.flavor if layers is None else f"{job.flavor}-{layers}L"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += [f"--nproc_per_node={devices}", "--local-ranks-filter=0"]
    words += ["-m", "torchtitan.train", "--model.name", "qwen3", "--model.flavor", flavor]
    words += ["--training.seq_len", str(job.seq_len)]
    words += ["--training.local_batch_size", str(job.batch), "--training.steps", str(STEPS)]
    words += ["--activation_checkpoint.mode", job.checkpointing, "--compile.enable"]
    words += ["--metrics.log_freq", "2", "--training.dataset", "c4_test"]
    words += [
        "--training.dataset_path",
        str(assets / "text"),
        "--model.hf_assets_path",
        str(assets),
    ]
    words += ["--job.dump_folder", str(assets / "out")]
    experts = min(job.expert_parallel, devices)
    if experts > 1:
        words += ["--parallelism.expert_parallel_degree", str(experts)]
    if job.balanced:
        words += ["--debug.moe_force_load_balance"]
    if layers is not None:
        words += ["--experimental.custom_import", "torchtitan_flavors"]
    return words


def write_assets(folder: Path) -> None:
    """Write `tokenizer.json` and `text/words.jsonl`: random words, each a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [f"w{i}" for i in range(NUM_WORDS)]
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<bos>", "<eos>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"})
    )
    rng = random.Random(1)
    (folder / "text").mkdir()
    with (folder / "text" / "words.jsonl").open("w") as file:
        for _ in range(NUM_TEXTS):
            file.write(json.dumps({"text": " ".join(rng.choices(words, k=WORDS_A_TEXT))}) + "\n")


def versions() -> dict[str, str]:
    found = {}
    for package in ("torchtitan", "torch", "torchdata", "datasets", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("flavor")
    parser.add_argument("--seq-len", type=int, default=16384)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--checkpointing", default="full")
    parser.add_argument("--expert-parallel", type=int, default=1)
    parser.add_argument("--balanced", action="store_true")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--out", type=Path, default=Path.cwd())
    one = parser.parse_args()
    job = Job(
        one.flavor, one.seq_len, one.batch, one.checkpointing, one.expert_parallel, one.balanced
    )
    print(json.dumps(measure(job, one.devices, one.layers, one.out), indent=2))


if __name__ == "__main__":
    main()
