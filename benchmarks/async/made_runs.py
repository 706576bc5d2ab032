"""Make the runs of a figure from changed manifests, in a new workspace."""

import argparse
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from shapes import for_this_machine

from orrery.manifest.schema import Manifest
from orrery.observe.report.data import RunData

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import parser_of
from workspace import whole_workspace

HERE = Path(__file__).resolve().parent


def parser_for_runs(doc: str | None, within_s: float) -> argparse.ArgumentParser:
    """Return a parser with the options that `find_or_make_runs` reads."""
    parser = parser_of(doc)
    parser.add_argument("--check", action="store_true", help="validate the manifests; no GPU")
    parser.add_argument("--runs", type=Path, metavar="DIR")
    parser.add_argument("--within", type=float, default=within_s, metavar="SECONDS")
    parser.add_argument("--out", type=Path, metavar="DIR", default=HERE)
    return parser


def find_or_make_runs(
    options: argparse.Namespace, name: str, manifests: Sequence[dict[str, Any]], parallel: int = 1
) -> Path:
    """Return the folder `--runs`, or one of new runs, whose files `<name>_runs.tar.gz` gets.

    With `--check`, validate the manifests and exit.
    """
    if options.check:
        print(*(Manifest.model_validate(manifest).name for manifest in manifests), sep="\n")
        raise SystemExit
    if options.runs is not None:
        return options.runs
    return make_runs(manifests, options.within, options.out / f"{name}_runs.tar.gz", parallel)


def load_run(runs: Path, name: str) -> RunData:
    if not (found := sorted(runs.glob(f"{name}-????????????"))):
        raise SystemExit(f"error: {runs}: it has no run {name}; read the output above")
    return RunData.load(found[0])


def make_runs(
    manifests: Sequence[dict[str, Any]], within_s: float, archive: Path, parallel: int = 1
) -> Path:
    """Run each manifest up to RL. Return the folder of the runs.

    All runs end after `within_s` seconds. `archive` gets logs and metrics, also of failures.
    """
    until_s = time.monotonic() + within_s
    archive.parent.mkdir(parents=True, exist_ok=True)
    folder = whole_workspace(Path(tempfile.mkdtemp()), *map(for_this_machine, manifests))
    try:
        with ThreadPoolExecutor(parallel) as pool:
            list(pool.map(partial(_run_stages, folder, until_s), manifests))
    finally:
        with tarfile.open(archive, "w:gz") as tar:
            for each in [*folder.glob("*.log"), *folder.glob("runs/*")]:
                tar.add(each, each.name, filter=_small)
    return folder / "runs"


def _run_stages(folder: Path, until_s: float, manifest: dict[str, Any]) -> None:
    """Run the stages one after the other, and print how each ended."""
    name = manifest["name"]
    for stage in ("init", *(["sft"] if manifest["stages"]["sft"] else []), "rl"):
        begin_s = time.monotonic()
        argv = [sys.executable, "-m", "orrery.launcher.cli", "run", name, stage]
        log = folder / f"{name}.{stage}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                argv, cwd=folder, stdout=file, stderr=subprocess.STDOUT, text=True
            )
            try:
                code: int | str = process.wait(timeout=max(0.0, until_s - begin_s))
            except subprocess.TimeoutExpired:
                process.terminate()  # the launcher then ends its roles
                process.wait()
                code = "out of time"
        print(f"{name} {stage}: {code} after {time.monotonic() - begin_s:.0f} s", flush=True)
        if code != 0:
            print("\n".join(log.read_text().splitlines()[-12:])[-3000:], flush=True)
            break


def _small(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    left_out = {"weights", "checkpoints", "rollouts", "kernels"}
    return None if left_out & set(Path(entry.name).parts) else entry
