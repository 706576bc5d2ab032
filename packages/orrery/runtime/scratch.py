"""Name and remove a run's shared memory and scratch folders.

- Shared memory: names in `/dev/shm` contain `orrery-<id12>-<place>-`.
- Cache blocks: `<TMPDIR>/orrery-kv-<run>-<which>-<stage>`. `which` hashes the run's path and its
  manifest's inode and time, because a run begun anew repeats version numbers and must not read old
  blocks.
- Sockets of an engine: `<TMPDIR>/orrery-<place>-<engine>-*`. A path has at most 107 characters.
- `place` hashes the run folder's path, so that equal runs of two checkouts differ.
- The launcher removes all of these when a stage begins (on its node) and ends (on every node). An
  engine removes its own when it ends, and those of its killed starts when it begins.
"""

import hashlib
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from orrery.runtime.run_directory import MANIFEST

SHARED_MEMORY = Path("/dev/shm")


def place(run_dir: Path) -> str:
    """Return the first 8 hex digits of the sha256 of the run folder's path."""
    return hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:8]


def memory_prefix(run_dir: Path) -> str:
    return f"orrery-{run_dir.resolve().name.rpartition('-')[2]}-{place(run_dir)}-"


def role_memory_prefix(run_dir: Path, name: str) -> str:
    return f"{memory_prefix(run_dir)}{name}-"


def remove_memory(name: str, root: Path = SHARED_MEMORY) -> list[Path]:
    """Remove all shared memory whose name contains `name`.

    Call it only after all processes of that run, or role, have ended.
    """
    found = sorted(root.glob(f"*{name}*")) if root.exists() else []
    for path in found:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()
    return [path for path in found if not path.exists()]


def disk_prefix(run_dir: Path) -> str:
    """Return the prefix of the run's cache folders. Raise FileNotFoundError without a manifest."""
    manifest = (run_dir / MANIFEST).stat()
    which = f"{run_dir.resolve()} {manifest.st_ino} {manifest.st_mtime_ns}"
    return f"orrery-kv-{run_dir.name}-{hashlib.sha256(which.encode()).hexdigest()[:12]}-"


def disk_folder(run_dir: Path, stage: str) -> Path:
    return Path(tempfile.gettempdir()) / f"{disk_prefix(run_dir)}{stage}"


def start_prefix(run_dir: Path, engine: int | None = None) -> str:
    return f"orrery-{place(run_dir)}-{'' if engine is None else f'{engine}-'}"


def remove_folders(prefix: str, root: Path) -> None:
    """Remove all folders with this prefix, after all of their users have ended."""
    for path in root.glob(f"{prefix}*"):
        shutil.rmtree(path, ignore_errors=True)
