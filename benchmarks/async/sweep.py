"""Sweep the warm start and the learning rate of a run on a file of problems, on one GPU.

    python benchmarks/async/sweep.py smollm2_problems_seed_1

- A variant is the run with another number of warm-start batches and another learning rate of RL.
  All have `--steps` RL steps and one seed, so small differences are noise.
- `--at-once` variants share the GPU, with smaller micro-batches and caches. All variants end after
  `--within` seconds. Unfinished variants are left out and named.
- `sweep_<device>.json`: the largest rise of held-out reward, and a row per variant with its rise,
  entropy and truncated answers (`learning.problems_row`).
"""

import itertools
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from learning import problems_row
from shapes import manifest_here

from orrery.manifest.schema import Manifest
from orrery.observe.report.data import RunData

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import device, parser_of, record
from workspace import whole_workspace

HERE = Path(__file__).resolve().parent
WARM_BATCHES, RATES = (25, 50, 120), (1e-5, 3e-5)
STAGES = ("init", "sft", "rl", "evaluate")
KV_CACHE_BYTES = 2 * 2**30
MICRO_BATCH_TOKENS = 4096
EVALUATED = 256  # most problems of an evaluation


def variant(run: dict[str, Any], warm_batches: int, rate: float, steps: int) -> dict[str, Any]:
    """Return the manifest of one variant, named after its values."""
    run = json.loads(json.dumps(run))
    run["name"] = f"sweep_{warm_batches}_{rate:g}".replace("-", "_")
    run["stages"]["sft"]["num_steps"] = warm_batches
    run["stages"]["rl"]["num_steps"] = steps
    evaluated = min(EVALUATED, run["stages"]["evaluate"]["num_problems"])
    run["stages"]["evaluate"]["num_problems"] = evaluated
    run["trainer"]["optimizer"]["lr"] = rate
    run["trainer"]["checkpoint"]["interval_steps"] = steps
    run["orchestrator"]["evaluation"]["interval_steps"] = steps
    for section, field, most in (
        (run["trainer"]["memory"], "max_tokens_per_micro_batch", MICRO_BATCH_TOKENS),
        (run["inference"], "kv_cache_bytes", KV_CACHE_BYTES),
    ):
        section[field] = min(section[field], most)
    return Manifest.model_validate(run).model_dump(mode="json")


def train(folder: Path, until_s: float, name: str) -> str | None:
    """Run a variant's stages. Return why it did not finish, or None."""
    for stage in STAGES:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return f"no time was left for {stage}"
        argv = [sys.executable, "-m", "orrery.launcher.cli", "run", name, stage]
        process = subprocess.Popen(
            argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            said, _ = process.communicate(timeout=left_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher then ends its roles
            process.communicate()
            return f"{stage} was not done in time"
        if process.returncode:
            lines = [line for line in said.splitlines() if line.strip()]
            return f"{stage}: {' '.join(lines[-1:])[:400]}"
        print(f"{name}: {stage} is done, {left_s:.0f} s were left before it", flush=True)
    return None


def row(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    run = RunData.load(next((folder / "runs").glob(f"{manifest['name']}-????????????")))
    values = {
        "warm_batches": manifest["stages"]["sft"]["num_steps"],
        "lr": manifest["trainer"]["optimizer"]["lr"],
    }
    name = f"{values['warm_batches']} warm-start batches, lr {values['lr']:g}"
    return problems_row(run) | values | {"variant": name, "goal": None}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--warm", type=int, nargs="+", default=WARM_BATCHES, metavar="BATCHES")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, metavar="LR")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--within", type=float, default=480.0, metavar="SECONDS")
    parser.add_argument("--out", type=Path, metavar="DIR", default=HERE)
    options = parser.parse_args()
    begin_s = time.monotonic()
    run = manifest_here(options.run)
    grid = itertools.product(options.warm, options.rates)
    manifests = [variant(run, warm, rate, options.steps) for warm, rate in grid]
    rows, missing = [], {}
    with tempfile.TemporaryDirectory(prefix="orrery-sweep-") as work:
        folder = whole_workspace(Path(work), *manifests)
        # Start the longest runs first.
        order = sorted(manifests, key=lambda each: -each["stages"]["sft"]["num_steps"])
        with ThreadPoolExecutor(options.at_once) as pool:
            names = [manifest["name"] for manifest in order]
            ended = pool.map(partial(train, folder, begin_s + options.within), names)
            whys = dict(zip(names, ended, strict=True))
        for manifest in manifests:
            if (why := whys[manifest["name"]]) is not None:
                missing[manifest["name"]] = why
                print(f"left out: {manifest['name']}: {why}", flush=True)
                continue
            try:
                rows.append(row(folder, manifest))
            except SystemExit as error:  # too few steps to measure a speed
                missing[manifest["name"]] = str(error)
                print(f"left out: {error}", flush=True)
                continue
            print(f"{rows[-1]['variant']}: {rows[-1]['value']:+.3f}", flush=True)
    if not rows:
        raise SystemExit("error: no variant finished; raise --within or lower --at-once")
    record(
        options.out / f"sweep_{device()}.json",
        figure=f"{options.run}, {options.steps} RL steps, one {device()}: largest rise of held-out "
        "reward in a sweep of warm start and learning rate",
        value=max(row["value"] for row in rows),
        unit="reward",
        goal=None,
        better="higher",
        details={
            "at_once": options.at_once,
            "missing": missing,
            "wall_s": time.monotonic() - begin_s,
        },
        rows=rows,
    )


if __name__ == "__main__":
    main()
