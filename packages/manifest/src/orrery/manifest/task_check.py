"""Task check: what only the room of tasks can know of a manifest (kinds and their args, prompts that fit), asked as a command line.

- In: manifests, each with what to call it. Out: nothing, or the `OrreryError` of the first that is not well.
- Always: one process for all of them, since starting it costs more than its work.
- Never: an import of `orrery.tasks`. If that room is not installed, nothing is checked. If a
  pretrained tokenizer is not on this machine, tasks are built but prompts are not measured. The
  init stage checks again.
- Not part of rendering: `snakemake` renders all runs at every start, and checked-in manifests have passed here.
"""

import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import canonical_json
from orrery.manifest.schema import Manifest

FIRST_LINE = "tasks.train[0]: "  # opens the lines of a manifest that passed: one a task use, and every manifest has this one


def check_tasks(manifests: list[tuple[str, Manifest]]) -> None:
    """Raises `OrreryError`, one sentence with the name given to it, for the first manifest whose tasks do not build or do not fit."""
    if not manifests or find_spec("orrery.tasks") is None:
        return
    with tempfile.TemporaryDirectory(prefix="orrery-") as folder:
        paths = [Path(folder) / f"{number}.json" for number in range(len(manifests))]
        for path, (_, manifest) in zip(paths, manifests, strict=True):
            path.write_bytes(canonical_json(manifest))
        done = subprocess.run(
            [sys.executable, "-m", "orrery.tasks", "check", *map(str, paths)],
            capture_output=True,
            text=True,
        )
    if done.returncode == 0:
        return
    last = done.stderr.strip().rpartition("\n")[2] or f"it ended with code {done.returncode}"
    if not last.startswith("error: "):
        raise OrreryError(
            f"the check of tasks broke ({last}); type `orrery check RUN` for each run to find which"
        )
    num_passed = sum(line.startswith(FIRST_LINE) for line in done.stdout.splitlines())
    raise OrreryError(f"{manifests[num_passed][0]}: {last.removeprefix('error: ')}")
