"""Scratch disk of one run: where engines keep blocks of cache, and the sockets of one start of an engine; none outlives its stage.

Blocks are in `<TMPDIR>/orrery-kv-<run>-<which>-<stage>`. `which` is made of the run folder's path and of its manifest's file: a run folder
that was removed and made again is another run, whose versions of weights count from 0 once more, and the same run in two checkouts does
not share, or remove, anything.
Sockets are in `<TMPDIR>/orrery-<place of the run>-<engine>-*`, short since their paths may have 107 characters.
The launcher removes both when a stage begins, on its own node, and when it ends, on every node of its job; an engine that is asked to end
removes its own part, and one that begins removes what it finds of earlier attempts, and of its own starts that were killed.
"""

import hashlib
import shutil
import tempfile
from pathlib import Path

from orrery.observe.shared_memory import place


def prefix(run_dir: Path) -> str:
    """What the names of all scratch folders of this run begin with. Raises FileNotFoundError for a run without a manifest."""
    manifest = (run_dir / "manifest.json").stat()
    which = hashlib.sha256(
        f"{run_dir.resolve()} {manifest.st_ino} {manifest.st_mtime_ns}".encode()
    ).hexdigest()[:12]
    return f"orrery-kv-{run_dir.name}-{which}-"


def folder(run_dir: Path, stage: str) -> Path:
    """Of this stage, on this node."""
    return Path(tempfile.gettempdir()) / f"{prefix(run_dir)}{stage}"


def of_start(run_dir: Path, engine: int | None = None) -> str:
    """What the names of folders of single starts of this engine begin with; without one, of every engine."""
    return f"orrery-{place(run_dir)}-{'' if engine is None else f'{engine}-'}"


def remove(name: str, root: Path) -> None:
    """Remove what `name` (`prefix`, `of_start`) begins the name of; call it only when no process of that run, or role, is to go on."""
    for path in root.glob(f"{name}*"):
        shutil.rmtree(path, ignore_errors=True)
