"""Compare the measured memory and speed of engines with those that `orrery plan` computes.

Each case is one engine with dummy weights under a steady load (`throughput.py`). Its memory is the
GPU's used memory under load, minus that before the engine starts. Each case is recorded as it ends.

    python benchmarks/inference/engine_plan.py       # one GPU of 80 GB, about 4 minutes
    python benchmarks/inference/engine_plan.py --run reverse_text_moe --requests 32 --tokens 64
"""

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

from throughput import LOG_PROBS, OURS, Rows, manifest, measure

from orrery.manifest.budget import engine
from orrery.manifest.budget.engine import Serving
from orrery.manifest.devices import accelerator_of, rates_of
from record import parser_of, record  # throughput.py extends sys.path

HERE = Path(__file__).resolve().parent
CASES = (  # run, quantization, requests in flight
    ("qwen3_4b_16k", "none", 256),
    ("qwen3_30b_a3b_16k", "fp8", 256),
    ("qwen3_0_6b_16k", "none", 64),
)


def ask_driver(field: str) -> str | None:
    """Return nvidia-smi's `field` of the first GPU, or None without a driver."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def used_bytes() -> int | None:
    used = ask_driver("memory.used")
    return None if used is None else int(used) << 20


def compared(args: argparse.Namespace, speed: float, before: int | None) -> dict[str, Any]:
    spec = manifest(args, False)
    name = ask_driver("name")
    accelerator = "cpu" if name is None else accelerator_of(name) or "h200"
    model, inference, is_gpu = spec.model, spec.inference, name is not None
    memory, used = engine.memory(model, inference, is_gpu, False), used_bytes()
    load, rates = Serving(args.tokens, args.tokens, args.requests), rates_of(accelerator)
    batch = engine.batch_size(model, inference, load)
    step_s = engine.decode_s(model, inference, batch, load.mean_context, rates, 0.0)
    prefill_s = engine.prefill_s(model, inference, args.tokens, rates, 0.0)
    planned = args.tokens / (args.tokens * step_s / batch + prefill_s)
    row = {
        "variant": f"{args.run}, quantization {args.quantization}, {args.requests} requests",
        "value": planned / speed - 1,
        "unit": "error of output tokens/s",
        "goal": None,
        "planned_tokens_per_s": planned,
        "measured_tokens_per_s": speed,
        "planned_bytes": memory,
    }
    if used is not None and before is not None:
        row["measured_bytes"] = used - before
        row["memory_error"] = sum(memory.values()) / (used - before) - 1
    return row


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--run", help="only this run")
    parser.add_argument("--quantization", choices=("none", "fp8"), default="none")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512, help="of a prompt, and of an answer")
    parser.add_argument("--seconds", type=float, default=240.0, help="start no case after these")
    parser.add_argument("--out", type=Path, default=HERE)
    given = parser.parse_args()
    cases = [(given.run, given.quantization, given.requests)] if given.run else CASES
    start_s, rows = time.monotonic(), []
    for run, quantization, requests in cases:
        if time.monotonic() - start_s > given.seconds:
            print(f"{run}: left out, as the time is over")
            continue
        args = argparse.Namespace(
            run=run, quantization=quantization, requests=requests, tokens=given.tokens, rounds=1
        )
        before = used_bytes()

        def seen(found: Rows, args: argparse.Namespace = args, before: int | None = before) -> None:
            rows.append(compared(args, found[OURS][0], before))

        measure(args, {OURS: {OURS: LOG_PROBS}}, [OURS], seen)
        print(json.dumps(rows[-1]), flush=True)
        keep(given.out / "engine_plan.json", rows)


def keep(path: Path, rows: list[dict[str, Any]]) -> None:
    errors = [abs(row.get("memory_error", 0.0)) for row in rows]
    record(
        path,
        figure="inference: largest error of the planned memory of an engine",
        value=max(errors),
        unit="share",
        goal=0.05,
        better="lower",
        details={"largest_error_of_speed": max(abs(row["value"]) for row in rows)},
        rows=rows,
    )


if __name__ == "__main__":
    main()
