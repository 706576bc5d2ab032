"""Shared memory of one run: what stands in `/dev/shm` under a name with `orrery-<run id12>-<place>-`; none of it outlives the run.

`place` is the first 8 hex digits of the sha256 of the run folder's path: the same run in two checkouts does not share, or remove, anything.
The launcher removes it when a stage begins, on its own node, and when it ends, on every node of its job; a role whose launcher was killed
removes it just before its own end. Weights pass through folders that `orrery.transport.weight_wire` names with `prefix`; an engine names
with `of_role` what its processes share (queues, the host tier of its cache), and removes at its start what a start that was killed left.
"""

import hashlib
import shutil
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def place(run_dir: Path) -> str:
    """8 hexadecimal digits of where the run is."""
    return hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:8]


def prefix(run_dir: Path) -> str:
    """What the names of all shared memory of this run have in them; those of our own making begin with it."""
    return f"orrery-{run_dir.resolve().name.rpartition('-')[2]}-{place(run_dir)}-"


def of_role(run_dir: Path, name: str) -> str:
    """What the names of all shared memory of the role's processes have in them; `name` as in `inference.0`."""
    return f"{prefix(run_dir)}{name}-"


def remove(name: str, root: Path = SHARED_MEMORY) -> list[Path]:
    """Remove what has `name` (`prefix` or `of_role`) in its own name; call it only when no process of that run, or role, is to go on."""
    found = sorted(root.glob(f"*{name}*")) if root.exists() else []
    for path in found:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):  # gone, or another user's, who ran this folder before
                path.unlink()
    return [path for path in found if not path.exists()]
