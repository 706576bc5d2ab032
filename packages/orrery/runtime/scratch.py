"""Names of a run's shared memory and scratch folders, and their removal.

- Shared memory: names in `/dev/shm` contain `orrery-<run id12>-<place>-`.
- Cache blocks: `<TMPDIR>/orrery-kv-<run>-<which>-<stage>`. `which` depends on the inode and time of
  the run's manifest too, because a run folder that was made again counts versions from 0.
- Sockets of one start of an engine: `<TMPDIR>/orrery-<place>-<engine>-*`. Socket paths may have at
  most 107 characters.
- `place` is the first 8 hex digits of the sha256 of the run folder's path, so that the same run in
  two checkouts shares nothing.
- The launcher removes all of it when a stage begins (its node) and ends (every node of the job).
  An engine removes its own part when it ends, and leftovers of killed starts when it begins.
"""

import hashlib
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def place(run_dir: Path) -> str:
    """Return 8 hex digits of the run folder's path."""
    return hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:8]


def memory_prefix(run_dir: Path) -> str:
    """Return the part that all names of the run's shared memory contain."""
    return f"orrery-{run_dir.resolve().name.rpartition('-')[2]}-{place(run_dir)}-"


def role_memory_prefix(run_dir: Path, name: str) -> str:
    """Return the part that all names of one role's shared memory contain (`inference.0`)."""
    return f"{memory_prefix(run_dir)}{name}-"


def remove_memory(name: str, root: Path = SHARED_MEMORY) -> list[Path]:
    """Remove all entries whose names contain `name`. Return the removed paths.

    Call it only when no process of that run, or role, goes on.
    """
    found = sorted(root.glob(f"*{name}*")) if root.exists() else []
    for path in found:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):  # gone, or another user's
                path.unlink()
    return [path for path in found if not path.exists()]


def disk_prefix(run_dir: Path) -> str:
    """Return the prefix of the run's cache folders. Raises FileNotFoundError without a manifest."""
    manifest = (run_dir / "manifest.json").stat()
    which = f"{run_dir.resolve()} {manifest.st_ino} {manifest.st_mtime_ns}"
    return f"orrery-kv-{run_dir.name}-{hashlib.sha256(which.encode()).hexdigest()[:12]}-"


def disk_folder(run_dir: Path, stage: str) -> Path:
    """Return this node's folder of cache blocks of a stage."""
    return Path(tempfile.gettempdir()) / f"{disk_prefix(run_dir)}{stage}"


def start_prefix(run_dir: Path, engine: int | None = None) -> str:
    """Return the prefix of the folders of an engine's starts; None: of all engines."""
    return f"orrery-{place(run_dir)}-{'' if engine is None else f'{engine}-'}"


def remove_folders(prefix: str, root: Path) -> None:
    """Remove all folders with this prefix. Call it only when none of their users goes on."""
    for path in root.glob(f"{prefix}*"):
        shutil.rmtree(path, ignore_errors=True)
