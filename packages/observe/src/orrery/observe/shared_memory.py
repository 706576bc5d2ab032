"""Shared memory of one run: `/dev/shm/orrery-<run id12>-<place>-*`, which weights pass through; none of it outlives the run.

`place` is the first 8 hex digits of the sha256 of the run folder's path: the same run in two checkouts does not share, or remove, anything.
The launcher removes it when a stage begins and ends; a role whose launcher was killed removes it just before its own end.
`orrery.transport.weight_wire` names its folders with `prefix`.
"""

import hashlib
import shutil
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def prefix(run_dir: Path) -> str:
    """What the names of all shared memory of this run begin with."""
    run_dir = run_dir.resolve()
    place = hashlib.sha256(str(run_dir).encode()).hexdigest()[:8]
    return f"orrery-{run_dir.name.rpartition('-')[2]}-{place}-"


def remove(run_dir: Path, root: Path = SHARED_MEMORY) -> list[Path]:
    """Remove what this run left there; call it only when no process of the run is to go on."""
    found = sorted(root.glob(f"{prefix(run_dir)}*")) if root.exists() else []
    for path in found:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return found
