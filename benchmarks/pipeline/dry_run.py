"""Measure how long `snakemake -n` takes to show the shape of a run.

Parsing the Snakefile renders and compares every spec, so the time grows with the number of runs.
The figure is the best of five repeats. The record also has the number of runs.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import parser_of, record

ROOT = Path(__file__).parents[2]
TARGET = "reverse_text_seeds"
REPEATS = 5


def dry_run_s() -> float:
    """Return the wall seconds of a dry run. Raise SystemExit if it does not show three runs."""
    start_s = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-m", "snakemake", "-n", TARGET], cwd=ROOT, capture_output=True, text=True
    )
    wall_s = time.perf_counter() - start_s
    if result.returncode or ["rl", "3"] not in [
        line.split() for line in result.stdout.splitlines()
    ]:
        raise SystemExit(
            f"error: `snakemake -n {TARGET}` did not show three runs:\n"
            f"{result.stdout[-2000:]}{result.stderr[-2000:]}"
        )
    return wall_s


def main() -> None:
    parser_of(__doc__).parse_args()
    times_s = []
    for _ in range(REPEATS):
        times_s.append(dry_run_s())
        print(f"{times_s[-1]:.2f} s", flush=True)
    record(
        Path(__file__).with_suffix(".json"),
        figure=f"snakemake -n {TARGET}",
        value=min(times_s),
        unit="s",
        goal=5.0,
        better="lower",
        details={
            "all_s": times_s,
            "num_manifests": len(list((ROOT / "manifests").glob("*.json"))),
            "load_average": os.getloadavg()[0],
        },
    )


if __name__ == "__main__":
    main()
