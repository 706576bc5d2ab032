"""Check the tasks of manifests (kinds, args, prompt lengths) with `orrery.tasks`.

- One subprocess checks all manifests, because its start costs more than its work.
- `orrery.tasks` is never imported. If it is not installed, no task is checked. Without the
  pretrained tokenizer, prompts are not measured. The init stage checks again.
- Rendering does not check, because `snakemake` renders all runs at every start.
"""

import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import canonical_json
from orrery.manifest.schema import Manifest

FIRST_LINE = "tasks.train[0]: "  # printed for each correct manifest


def check_tasks(manifests: list[tuple[str, Manifest]]) -> None:
    """Raise OrreryError for the first (name, manifest) whose tasks do not build or fit."""
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
