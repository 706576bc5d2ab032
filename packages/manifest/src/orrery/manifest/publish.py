"""Publish a file whole: write a temporary beside it, fsync, rename. A reader sees the old file or the new one, never a part."""

import os
from pathlib import Path


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, durable when this returns; the folder must exist."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)  # else the rename itself may be lost with the power


def sync(path: Path) -> None:
    """Make what is written to a file, or what was renamed into a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
