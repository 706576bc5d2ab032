"""Time how 100 runs, a sweep of the demo, are rendered, checked, hashed and written.

The sweep is a separate spec in a temporary checkout. Repeats share no cache. The figure is the best
of five, to exclude the load of other programs.
"""

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from orrery.manifest.identity import Workspace, run_id
from orrery.manifest.render import render_all, write

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import ROOT, parser_of, record

NUM_RUNS = 100
REPEATS = 5

ONE_FILE = """
local reverse_text = (import 'runs/reverse_text.jsonnet').reverse_text;
(import 'lib/named.libsonnet')({
  ['sweep_%d' % seed]: reverse_text { seed: seed, trainer+: { optimizer+: { lr: 1e-5 * seed } } }
  for seed in std.range(1, 100)
})
"""
OWN_FILE = """
local reverse_text = (import 'runs/reverse_text.jsonnet').reverse_text;
(import 'lib/named.libsonnet')({
  sweep_%d: reverse_text { seed: %d, trainer+: { optimizer+: { lr: 1e-5 * %d } } },
})
"""


def checkout(folder: Path, specs: dict[str, str]) -> Workspace:
    """Copy the specs of this checkout with other runs."""
    shutil.copytree(ROOT / "jsonnet", folder / "jsonnet", ignore=shutil.ignore_patterns("runs"))
    (folder / "jsonnet" / "runs").mkdir()
    shutil.copy(ROOT / "jsonnet" / "runs" / "reverse_text.jsonnet", folder / "jsonnet" / "runs")
    (folder / "locks").mkdir()
    shutil.copy(ROOT / "locks" / "cpu.txt", folder / "locks")
    for name, text in specs.items():
        (folder / "jsonnet" / "runs" / name).write_text(text)
    return Workspace(folder)


def render_s(workspace: Workspace) -> float:
    """Return the wall seconds to render and hash all, and to write the missing files."""
    shutil.rmtree(workspace.root / "manifests", ignore_errors=True)
    start_s = time.perf_counter()
    runs = render_all(workspace)
    ids = {run_id(run.manifest) for run in runs}
    write(workspace, runs)
    wall_s = time.perf_counter() - start_s
    if len(ids) != NUM_RUNS + 1:  # the sweep and reverse_text itself
        raise SystemExit(f"error: {len(ids)} ids for {NUM_RUNS + 1} runs")
    return wall_s


def main() -> None:
    parser_of(__doc__).parse_args()
    shapes = {
        "one file, a comprehension": {"sweep.jsonnet": ONE_FILE},
        "a file a run": {
            f"sweep_{n}.jsonnet": OWN_FILE % (n, n, n) for n in range(1, NUM_RUNS + 1)
        },
    }
    rows: list[dict[str, Any]] = []
    for shape, specs in shapes.items():
        with tempfile.TemporaryDirectory() as folder:
            workspace = checkout(Path(folder), specs)
            times_s = [render_s(workspace) for _ in range(REPEATS)]
        rows.append({"variant": shape, "value": min(times_s), "all_s": times_s})
        print(f"{shape}: {min(times_s):.3f} s", flush=True)
    record(
        Path(__file__).with_suffix(".json"),
        figure=f"render, check, hash and write {NUM_RUNS} runs",
        value=max(row["value"] for row in rows),
        unit="s",
        goal=1.0,
        better="lower",
        rows=rows,
        details={"load_average": os.getloadavg()[0]},
    )


if __name__ == "__main__":
    main()
