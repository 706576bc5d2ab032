"""Publish: rename files and folders so that they survive a power cut.

- A file is written under a temporary name, synced and renamed. A reader sees the old or the new
  content, never a part. The folder is synced last, because a power cut may undo a rename.
- A writer publishes its files before their marker. If the marker exists after a power cut, the
  files are whole.
- Durable: manifests, layout, attempts, status, DONE, receipts, results, reports, weights,
  tokenizers, checkpoints, snapshots of the orchestrator, kept batches, copies of the code.
- Not synced: logs, metrics, samples, health, endpoints, scratch disks, weights and batches in
  transit. A power cut ends their readers too, or costs rows.
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
    """Rename the file `temporary` to `path` in the same folder; durable when this returns."""
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def publish_folder(temporary: Path, folder: Path) -> None:
    """Replace `folder` by the folder `temporary` next to it; durable when this returns.

    Files that are synced already cost little.
    """
    sync_tree(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    sync(folder.parent)


def sync_tree(folder: Path) -> None:
    """Make a folder's content durable: sync its files, then its folders from the inside out."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            if not os.path.islink(path := os.path.join(parent, name)):
                sync(Path(path))
        sync(Path(parent))


def sync_folders(folder: Path) -> None:
    """Make all names below a folder durable, also those that other processes created."""
    for parent, _, _ in os.walk(folder, topdown=False):
        with suppress(FileNotFoundError):  # removed meanwhile
            sync(Path(parent))


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, durable when this returns. Keep an existing folder."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync(folder.parent)


def sync(path: Path) -> None:
    """Make a file's content or a folder's names durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
