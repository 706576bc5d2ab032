"""Write and find checkpoints. A folder is valid only with the marker file `COMPLETE`.

- Attempt k writes `checkpoints/step_<n>.attempt_<k>/<role>/…`. Then `complete` writes each file's
  sha256 into `files.json`, and the marker last.
- Removal begins with the marker, so a partly removed checkpoint is invalid.
"""

import contextlib
import hashlib
import json
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import msgspec

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.manifest.json_file import read_as
from orrery.manifest.publish import sync, write_atomic
from orrery.runtime.run_directory import (
    COMPLETE,
    Checkpoint,
    checkpoint_named,
    checkpoints_dir,
    whole_checkpoints,
)
from orrery.wire import nfs

if TYPE_CHECKING:
    from orrery.manifest.schema import Manifest

MARKER = COMPLETE
FILES = "files.json"
LATER = "later"  # prefix of a checkpoint's folders with newer orchestrator state
PUBLISHED = "published.json"  # digests of published weight versions
CHUNK_BYTES = 32 << 20
DISCARDED = ".discarded"  # prefix of folders being removed


class _Noted(msgspec.Struct):
    bytes: int
    sha256: str


def checkpoint_dir(run_dir: Path, step: int, attempt: int, stage: str = "rl") -> Path:
    return checkpoints_dir(run_dir, stage) / Checkpoint(step, attempt).name


def later_dir(checkpoint: Path, attempt: int) -> Path:
    return checkpoint / f"{LATER}.attempt_{attempt}"


def is_due(step: int, manifest: "Manifest", stage: str = "rl") -> bool:
    """Return whether to save a checkpoint after `step`. SFT's last step exports weights instead."""
    at_interval = step % manifest.trainer.checkpoint.interval_steps == 0
    if stage == "sft":
        return at_interval and step < manifest.sft.num_steps
    return at_interval or step == manifest.stages.rl.num_steps


def steps(run_dir: Path, stage: str = "rl") -> list[int]:
    return sorted({one.step for one in whole_checkpoints(run_dir, stage)})


def latest(run_dir: Path, stage: str = "rl") -> Checkpoint | None:
    return max(whole_checkpoints(run_dir, stage), default=None)


def whole_dir(run_dir: Path, step: int, stage: str = "rl") -> Path:
    """Return the newest complete checkpoint of `step`, or raise OrreryError."""
    ones = [one for one in whole_checkpoints(run_dir, stage) if one.step == step]
    if not ones:
        raise OrreryError(
            f"{checkpoints_dir(run_dir, stage)}: no complete checkpoint of step {step}; "
            f"there are {steps(run_dir, stage)}"
        )
    return checkpoints_dir(run_dir, stage) / max(ones).name


def note_digests(note: Path, files: Iterable[Path]) -> None:
    write_note(note, {file.name: (file.stat().st_size, _sha256(file)) for file in files})


def write_note(note: Path, written: Mapping[str, tuple[int, str]]) -> None:
    """Write a JSON file `note` with each file's size in bytes and sha256.

    Write the note last, because its reader may rename the folder.
    """
    temporary = note.with_name(f".{note.name}.tmp")
    noted = {name: _Noted(*one) for name, one in written.items()}
    temporary.write_bytes(msgspec.json.encode(noted))
    temporary.replace(note)


def complete(folder: Path, notes: Sequence[str] = ()) -> None:
    """Mark a folder as complete. Hash only files absent from `notes` (`write_note`).

    Raise RunFailed if a noted file is missing or has another size.
    """
    folder = Path(folder)
    (folder / MARKER).unlink(missing_ok=True)
    (folder / FILES).unlink(missing_ok=True)
    for name in (FILES, MARKER):  # temporary files of killed calls
        for left in folder.glob(f".{name}.*.tmp"):
            left.unlink(missing_ok=True)
    digests = {name: digest for note in notes for name, digest in _noted(folder, note).items()}
    rest = [name for name in _files(folder) if name not in digests]
    if not digests and not rest:
        raise OrreryError(f"{folder}: a checkpoint needs at least one file")
    for name in rest:
        sync(folder / name)
    for parent in sorted({(folder / name).parent for name in (*digests, *rest)}):
        sync(parent)
    digests |= {name: _sha256(folder / name) for name in rest}
    text = json.dumps(dict(sorted(digests.items())), indent=1) + "\n"
    write_atomic(folder / FILES, text.encode())
    write_atomic(folder / MARKER, b"")
    sync(folder.parent)


def verify(
    folder: Path,
    remedy: str | None = None,
    share: tuple[int, int] = (0, 1),
    each: Callable[[], object] = lambda: None,
) -> None:
    """Raise OrreryError if a file is damaged, missing or not in `files.json`.

    - `remedy`: advice for the error message.
    - `share` (i, n): hash every n-th file, from file i on.
    - `each`: called in worker threads after each CHUNK_BYTES.
    """
    folder = Path(folder)
    remedy = remedy or f"remove {folder} to go on from the checkpoint before it"
    if not (folder / MARKER).exists():
        raise OrreryError(f"{folder}: has no {MARKER}, so it is incomplete; {remedy}")
    expected = read_as(folder / FILES, dict[str, str], remedy)
    found = _files(folder)
    for name in sorted(expected.keys() | set(found)):
        if name not in expected:
            raise OrreryError(f"{folder / name}: is not in {FILES}; {remedy}")
        if name not in found:
            raise OrreryError(f"{folder / name}: is in {FILES} but missing; {remedy}")
    index, count = share
    own = sorted(found, key=lambda name: (PurePosixPath(name).suffix, name))[index::count]
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda name: _sha256(folder / name, each), own)
        for name, digest in zip(own, digests, strict=True):
            if digest != expected[name]:
                raise OrreryError(
                    f"{folder / name}: its sha256 differs from {FILES}, so it is damaged; {remedy}"
                )


def prune(run_dir: Path, keep: int, attempt: int, stage: str = "rl") -> list[int]:
    """Remove all but the newest `keep` complete checkpoints. Return the removed steps.

    Also keep checkpoints of attempts after `attempt`. Ignore failed removals.
    """
    if keep < 1:
        raise OrreryError(
            f"trainer.checkpoint.keep: {keep} would remove all checkpoints. Keep at least 1"
        )
    removed = []
    for one in whole_checkpoints(run_dir, stage)[:-keep]:
        if one.attempt > attempt:
            continue
        folder = checkpoints_dir(run_dir, stage) / one.name
        with contextlib.suppress(OSError):
            (folder / MARKER).unlink()
            removed.append(one.step)
            discard(run_dir, folder)
    return removed


def discard_all(run_dir: Path, stage: str) -> list[int]:
    removed = []
    for folder in checkpoints_dir(run_dir, stage).glob("step_*"):
        if (one := checkpoint_named(folder.name)) is None:
            continue
        with contextlib.suppress(OSError):
            (folder / MARKER).unlink(missing_ok=True)
            discard(run_dir, folder)
            removed.append(one.step)
    return sorted(removed)


def discard(run_dir: Path, folder: Path) -> None:
    aside = checkpoints_dir(run_dir) / f"{DISCARDED}.{secrets.token_hex(8)}"
    with contextlib.suppress(FileNotFoundError):
        folder.rename(aside)
        sync(folder.parent)  # a power cut must not restore the marker
        shutil.rmtree(aside, ignore_errors=True)


def discard_incomplete(run_dir: Path, stage: str = "rl") -> list[int]:
    """Remove incomplete checkpoints, before any process saves. Return their steps."""
    whole = set(whole_checkpoints(run_dir, stage))
    removed = []
    for folder in checkpoints_dir(run_dir, stage).glob("step_*"):
        one = checkpoint_named(folder.name)
        if one is not None and one not in whole:
            try:
                discard(run_dir, folder)
            except OSError as error:
                raise OrreryError(
                    f"{folder}: incomplete, but cannot be moved aside ({error}). "
                    "Remove it and run again"
                ) from error
            removed.append(one.step)
    for left in (f"{DISCARDED}.*", f".{LATER}.*.tmp"):
        for folder in checkpoints_dir(run_dir).glob(left):
            shutil.rmtree(folder, ignore_errors=True)
    return sorted(removed)


def _files(folder: Path) -> list[str]:
    every = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return sorted(
        path.as_posix()
        for path in every
        if not path.parts[0].startswith(f"{LATER}.") and path.as_posix() not in (MARKER, FILES)
    )


def _noted(folder: Path, note: str) -> dict[str, str]:
    path = folder / note
    if not nfs.appears(path):
        raise RunFailed(
            f"{path}: missing, so a rank has not written its part of the checkpoint. Read its log"
        )
    try:
        noted = msgspec.json.decode(path.read_bytes(), type=dict[str, _Noted])
    except (OSError, msgspec.MsgspecError) as error:
        raise RunFailed(
            f"{path}: must list sizes and sha256 of files ({error}). "
            "Run again to go on from the checkpoint before it"
        ) from error
    for name, entry in noted.items():
        file = path.with_name(name)
        num_bytes = _size(file) if nfs.appears(file) else None
        if num_bytes != entry.bytes:
            has = "is missing" if num_bytes is None else f"has {num_bytes} bytes"
            raise RunFailed(
                f"{file}: {has}, but {path.name} says {entry.bytes} bytes. "
                "Run again to go on from the checkpoint before it"
            )
    return {
        path.with_name(name).relative_to(folder).as_posix(): entry.sha256
        for name, entry in noted.items()
    }


def _size(path: Path) -> int:
    with path.open("rb") as file:
        return file.seek(0, 2)  # over NFS, `stat` may give a stale size


def _sha256(path: Path, each: Callable[[], object] = lambda: None) -> str:
    digest = hashlib.sha256()
    chunk = memoryview(bytearray(min(CHUNK_BYTES, path.stat().st_size + 1)))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(chunk):
            digest.update(chunk[:size])
            each()
    return digest.hexdigest()
