"""Visible: what a process on another node has written may be seen here later than it was written.

- A network file system keeps names, and the absence of names, in each node's memory, some for up to a minute. Listing a folder asks anew.
- Whoever polls needs only `read` and `identity`, which pass over what is just being replaced. `appears` is for what must be there, since
  its writer has said so by another way: only then is it worth waiting.
- Writers do their part: what a marker vouches for is on disk before the marker is renamed into place.
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
    """The file's content; None where it is not there, or was replaced while it was read."""
    return _if_there(path.read_bytes)


def identity(path: Path) -> tuple[int, int] | None:
    """Which file it is: another one where it was replaced. None where it is not there."""
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
    """Whether `path` is there, at the latest after `within_s` (VISIBLE_S, scaled). Blocks the thread."""
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
