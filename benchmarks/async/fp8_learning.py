"""Compare RL with layers in FP8 on both sides with bfloat16, three seeds each, on one H200.

- Tasks: `reverse_text_h200` writes words backwards. `calculator` calls a tool in up to three turns.
- A row has the held-out rewards after RL of all seeds. Its value is how far the mean with FP8 is
  below the mean with bfloat16, in standard errors of bfloat16's mean.
- `--parallel` runs share the GPU.

    bash benchmarks/async/gpu_host.sh figure fp8_learning.py        # on a GPU host, nine minutes
    python benchmarks/async/fp8_learning.py --runs DIR              # from finished runs in DIR
    python benchmarks/async/fp8_learning.py --check                 # the manifests only
"""

import statistics
import sys
from pathlib import Path
from typing import Any

from learning import curve
from made_runs import find_or_make_runs, parser_for_runs
from shapes import checked_in

from orrery.observe.report.data import RunData

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import record

TASKS, KINDS, SEEDS = ("reverse_text", "calculator"), ("bfloat16", "fp8"), (1, 2, 3)
CACHE_BYTES = 4 << 30  # of each engine, because several share the GPU


def name_of(task: str, kind: str, seed: int) -> str:
    return f"fp8_learning_{task}_{kind}_seed_{seed}"


def manifest_of(task: str, kind: str, seed: int) -> dict[str, Any]:
    middle = "" if kind == "bfloat16" else "fp8_"
    run = checked_in(f"reverse_text_h200_{middle}seed_{seed}")
    if task == "calculator":
        other = checked_in("calculator")
        run |= {field: other[field] for field in ("tasks", "stages", "orchestrator")}
        for each in run["tasks"]["train"]:
            each["seed"] += 100 * seed
    run["name"] = name_of(task, kind, seed)
    run["inference"]["kv_cache_bytes"] = CACHE_BYTES
    return run


def rewards(runs: Path, task: str, kind: str) -> list[float]:
    """Return the held-out rewards after RL of the seeds whose runs have ended."""
    found = []
    for seed in SEEDS:
        for folder in sorted(runs.glob(f"{name_of(task, kind, seed)}-????????????")):
            run = RunData.load(folder)
            stage = run.manifest.stages.rl
            if stage is not None and len(run.rl) == stage.num_steps:
                found.append(curve(run)[-1][2])
    return found


def main() -> None:
    parser = parser_for_runs(__doc__, within_s=540.0)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--parallel", type=int, default=4)
    options = parser.parse_args()
    each = [(task, kind, seed) for task in options.tasks for kind in KINDS for seed in SEEDS]
    manifests = [manifest_of(*one) for one in each]
    runs = find_or_make_runs(options, "fp8_learning", manifests, options.parallel)
    rows = []
    for task in options.tasks:
        found = {kind: rewards(runs, task, kind) for kind in KINDS}
        if any(len(values) < len(SEEDS) for values in found.values()):
            print(f"left out: {task} (not all seeds have ended: {found})")
            continue
        means = {kind: statistics.mean(values) for kind, values in found.items()}
        error = statistics.stdev(found["bfloat16"]) / len(SEEDS) ** 0.5
        below = means["bfloat16"] - means["fp8"]
        value = max(below, 0.0) / error if error else float(below > 0)
        rows.append({"variant": task, "value": value, "goal": 1.0, "rewards": found} | means)
        print(rows[-1])
    if not rows:
        raise SystemExit("error: no task has all its seeds; read the logs, or raise --within")
    record(
        options.out / "fp8_learning.json",
        figure="reward after RL in FP8 below bfloat16's, largest of the tasks",
        value=max(row["value"] for row in rows),
        unit="standard errors",
        goal=1.0,
        better="lower",
        details={"seeds": list(SEEDS)},
        rows=rows,
    )


if __name__ == "__main__":
    main()
