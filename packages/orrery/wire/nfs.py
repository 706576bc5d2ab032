"""Read files that another node writes to NFS.

For up to a minute, an NFS client may report a new file as missing. Listing the folder avoids this.
Writers must sync files before they write the marker.
"""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from orrery.runtime.timing import scaled

T = TypeVar("T")

VISIBLE_S = 60.0
POLL_S = 0.1


def read(path: Path) -> bytes | None:
    """Return the content, or None if the file is missing or just replaced."""
    return _if_there(path.read_bytes)


def identity(path: Path) -> tuple[int, int] | None:
    """Return (inode, mtime) to detect a replaced file, or None if it is missing."""
    status = _if_there(path.stat)
    return None if status is None else (status.st_ino, status.st_mtime_ns)


def _if_there(look: Callable[[], T]) -> T | None:
    try:
        return look()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return None
        raise


def appears(path: Path, within_s: float | None = None) -> bool:
    """Wait until `path` exists. Return False after `within_s` seconds (None: VISIBLE_S)."""
    end = time.monotonic() + (scaled(VISIBLE_S) if within_s is None else within_s)
    while True:
        try:
            if path.name in os.listdir(path.parent):
                return True
        except (FileNotFoundError, NotADirectoryError):
            pass
        if time.monotonic() >= end:
            return False
        time.sleep(POLL_S)
