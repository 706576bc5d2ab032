"""Publish: how a file or a folder that must outlive a power cut gets its name.

- Bytes first, then the name: whatever is written goes to a name of its own, is synced, and is renamed. A reader sees the old or the
  new, never a part. The folder is synced last, for a rename alone may be lost with the power.
- So a marker that exists after a power cut vouches for files that are whole, where its writer published those before the marker.
- Durable: manifests, layout, attempts, status, DONE, receipts, results, reports, weights, tokenizers, checkpoints, snapshots of the
  orchestrator, kept batches, copies of the code.
- Not durable, and not synced: logs, metrics, samples, health, endpoints, scratch disks, weights and batches on their way between
  processes. A power cut ends all readers of those, or costs rows.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, durable when this returns; the folder must exist."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    publish_file(temporary, path)


def publish_file(temporary: Path, path: Path) -> None:
    """Rename a file that is written to `path`, in the same folder; durable when this returns."""
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def publish_folder(temporary: Path, folder: Path) -> None:
    """Rename a folder that is written, with all that is in it, to `folder`, replacing what is there; durable when this returns.

    Both stand in the same folder. Files that are synced already cost little.
    """
    sync_tree(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    sync(folder.parent)


def sync_tree(folder: Path) -> None:
    """Make all that is in a folder durable: every file, then every folder after those inside it."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            if not os.path.islink(path := os.path.join(parent, name)):
                sync(Path(path))
        sync(Path(parent))


def sync_folders(folder: Path) -> None:
    """Make the names of all files and folders in a folder durable, whichever process gave them."""
    for parent, _, _ in os.walk(folder, topdown=False):
        with suppress(FileNotFoundError):  # removed meanwhile
            sync(Path(parent))


def make_folder(folder: Path) -> None:
    """Make a folder with those above it, durable when this returns; one that is there stays."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync(folder.parent)


def sync(path: Path) -> None:
    """Make what is written to a file, or the names in a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
