"""Checkpoints: folders that count only once they are whole.

- `checkpoints/step_<n>/<role>/…` is written by its roles; then `files.json` (sha256 of every file), then `COMPLETE`, last.
- Readers look only for `COMPLETE`. Everything is synced to disk before the marker, so a marker never lies after a crash.
- `step_<n>/later/` is the one folder that may come after the marker, which does not vouch for it; it has a marker of its own.
- Pruning removes the marker first: a half-removed checkpoint is an incomplete one, which nobody reads.
"""

import hashlib
import json
import shutil
from pathlib import Path

from orrery.manifest.errors import OrreryError
from orrery.manifest.publish import sync, write_atomic

MARKER = "COMPLETE"
FILES = "files.json"
LATER = "later"  # what the orchestrator had when it wound down after a step whose checkpoint was whole already


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    return Path(run_dir) / "checkpoints" / f"step_{step}"


def steps(run_dir: Path) -> list[int]:
    """Steps with a complete checkpoint, rising."""
    names = [path.parent.name.removeprefix("step_") for path in (Path(run_dir) / "checkpoints").glob(f"step_*/{MARKER}")]
    return sorted(int(name) for name in names if name.isdigit())


def latest(run_dir: Path) -> int | None:
    """The step of the newest complete checkpoint, or None."""
    return max(steps(run_dir), default=None)


def complete(folder: Path) -> None:
    """Say that `folder` is whole: sha256 of every file in it, then the marker."""
    folder = Path(folder)
    (folder / MARKER).unlink(missing_ok=True)
    (folder / FILES).unlink(missing_ok=True)
    files = _files(folder)
    if not files:
        raise OrreryError(f"{folder}: nothing to complete; a checkpoint holds at least one file")
    for name in files:
        sync(folder / name)
    for parent in sorted({(folder / name).parent for name in files}):
        sync(parent)
    digests = {name: _sha256(folder / name) for name in files}
    write_atomic(folder / FILES, (json.dumps(digests, indent=1) + "\n").encode())
    write_atomic(folder / MARKER, b"")
    sync(folder.parent)


def verify(folder: Path) -> None:
    """Raises `OrreryError` naming the first file that is missing, damaged, or not of the checkpoint."""
    folder = Path(folder)
    remedy = f"remove {folder} to go on from the checkpoint before it"
    if not (folder / MARKER).exists():
        raise OrreryError(f"{folder}: has no {MARKER}, so it is not whole; {remedy}")
    try:
        expected = json.loads((folder / FILES).read_text())
    except (OSError, ValueError) as error:
        raise OrreryError(f"{folder / FILES}: cannot be read ({error}); {remedy}") from error
    found = _files(folder)
    for name in sorted(expected.keys() | set(found)):
        if name not in expected:
            raise OrreryError(f"{folder / name}: is not in {FILES}; {remedy}")
        if name not in found:
            raise OrreryError(f"{folder / name}: is in {FILES} but missing; {remedy}")
        if _sha256(folder / name) != expected[name]:
            raise OrreryError(f"{folder / name}: its sha256 is not the one in {FILES}, so it is damaged; {remedy}")


def prune(run_dir: Path, keep: int) -> list[int]:
    """Remove all but the newest `keep` complete checkpoints; returns the removed steps."""
    if keep < 1:
        raise OrreryError(f"trainer.checkpoint.keep: {keep} would remove every checkpoint; keep at least 1")
    removed = steps(run_dir)[:-keep]
    for step in removed:
        folder = checkpoint_dir(run_dir, step)
        (folder / MARKER).unlink()
        sync(folder)
        shutil.rmtree(folder)
    return removed


def discard_incomplete(run_dir: Path) -> list[int]:
    """Remove what an earlier attempt left half-written; returns the steps. The orchestrator calls it before it cuts: nobody writes yet."""
    whole = set(steps(run_dir))
    removed = []
    for folder in (Path(run_dir) / "checkpoints").glob("step_*"):
        name = folder.name.removeprefix("step_")
        if name.isdigit() and int(name) not in whole:
            shutil.rmtree(folder)
            removed.append(int(name))
    return sorted(removed)


def _files(folder: Path) -> list[str]:
    every = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return sorted(path.as_posix() for path in every if path.parts[0] != LATER and path.as_posix() not in (MARKER, FILES))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
