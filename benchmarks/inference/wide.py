"""Serve a mixture on one engine of eight ranks, then on engines that prefill (2) and decode (6).

- Runs `wide_glm5_*` (jsonnet/runs/wide_glm5.jsonnet): GLM-5's widths in FP8, 5 layers, 48 experts
  over all ranks. The GPUs also train.
- Goals: the engines take updates while requests are in flight, and the trainer replays a route and
  the chosen keys of every token. The value is the number of tokens without a route, plus missing
  choices of keys (one per indexer and token).
- A row per run has its trained tokens/s and the pause of an update. The run with DeepEP is left out
  if `deep_ep` is not installed.

    python benchmarks/inference/wide.py            # eight GPUs; --only RUN: one run a call
    python benchmarks/inference/wide.py --smoke    # a tiny mixture on a CPU, no record
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "async")]
from shapes import numbers, run

from orrery.observe.report.data import RunData
from record import parser_of, record

RUNS = ("wide_glm5_8", "wide_glm5_2_6", "wide_glm5_2_6_deepep")
SMOKE, DEEPEP = ("wide_cpu",), "deep_ep"
COMPILES = 10.0  # allowed multiple of the median seconds per token, because ranks compile late


def checked(data: RunData) -> dict[str, Any]:
    """Return counts of updates and missing routes. Raise SystemExit if no update met requests."""
    in_flight = [row["num_in_flight"] for row in data.updates]
    if not any(in_flight):
        raise SystemExit(f"error: {data.run_dir.name}: no update met requests in flight")
    names = ["routes_missing"]
    if data.manifest.trainer.indexer_choice == "replay":
        names.append("choices_missing")
    for name in names:
        if unknown := [row["step"] for row in data.rl if row.get(name) is None]:
            raise SystemExit(f"error: {data.run_dir.name}: steps {unknown} replayed none ({name})")
    return {name: sum(row[name] for row in data.rl) for name in names} | {
        "updates_with_requests_in_flight": sum(number > 0 for number in in_flight),
        "updates": len(in_flight),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", choices=RUNS)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="the runs have finished there")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    names = SMOKE if options.smoke else (options.only,) if options.only else RUNS
    without = options.runs is None and importlib.util.find_spec(DEEPEP) is None
    rows, missing, left_out = [], 0, []
    for name in names:
        if without and name.endswith("deepep"):
            print(f"left out: {name}: the package {DEEPEP} is not installed here")
            left_out.append(name)
            continue
        data = run(name, options.runs)
        seen = checked(data)
        missing += seen["routes_missing"] + seen.get("choices_missing", 0)
        rows.append(numbers(data, COMPILES).row(name) | seen)
        print(name, seen)
    if options.smoke or not rows:
        return
    record(
        options.out / f"wide{f'_{options.only}' if options.only else ''}.json",
        figure="routes and choices of keys not replayed, engines of 8 and of 2 + 6 ranks",
        value=missing,
        unit="missing",
        goal=0,
        better="lower",
        rows=rows,
        details={"reduced": "5 of 78 layers, 48 of 256 experts", "left_out": left_out},
    )


if __name__ == "__main__":
    main()
