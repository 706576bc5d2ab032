"""Scratch disk of one run: `<TMPDIR>/orrery-kv-<run>-<which>-<stage>`, where engines keep blocks of cache; none outlives its stage.

`which` is made of the run folder's path and of its manifest's file: a run folder that was removed and made again is another run, whose
versions of weights count from 0 once more, and the same run in two checkouts does not share, or remove, anything.
The launcher removes it when a stage begins, on its own node, and when it ends, on every node of its job; an engine that is asked to end
removes its own part, and one that begins removes what it finds of earlier attempts.
"""

import hashlib
import shutil
import tempfile
from pathlib import Path


def prefix(run_dir: Path) -> str:
    """What the names of all scratch folders of this run begin with. Raises FileNotFoundError for a run without a manifest."""
    manifest = (run_dir / "manifest.json").stat()
    which = hashlib.sha256(f"{run_dir.resolve()} {manifest.st_ino} {manifest.st_mtime_ns}".encode()).hexdigest()[:12]
    return f"orrery-kv-{run_dir.name}-{which}-"


def folder(run_dir: Path, stage: str) -> Path:
    """Of this stage, on this node."""
    return Path(tempfile.gettempdir()) / f"{prefix(run_dir)}{stage}"


def remove(name: str, root: Path) -> None:
    """Remove what a run whose `prefix` this is left under `root`; call it only when no process of the run is to go on."""
    for path in root.glob(f"{name}*"):
        shutil.rmtree(path, ignore_errors=True)
