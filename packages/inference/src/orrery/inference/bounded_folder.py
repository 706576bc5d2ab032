"""A folder whose files take at most so many bytes: those that were used longest ago make room for new ones.

- In: who writes says so before (`writing`), who reads says so too (`used`). Out: files that are gone.
- Always: the files that are there take at most the bound; for room is made before a file is written, by whoever writes it, and no more of
  it than it takes. A file whose room others have taken before it was whole goes as soon as it is.
- A file counts in whole pages, as disks keep it; the folders that files lie in do not count.
- Never: a promise that a file stays. Whoever reads finds it gone, and does without.
- What an earlier process has left is found at the start, and counts as used when it was written.
- Several processes may share a folder: each keeps its own account, of what it has written or found, so it holds the sum of their bounds.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from orrery.manifest.schema import on_disk_bytes


class BoundedFolder:
    """The account of one folder. Any thread may ask."""

    def __init__(self, folder: Path, max_bytes: int):
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = (
            OrderedDict()
        )  # by path: the one that was used longest ago first
        self._num_bytes = 0
        for path, _, num_bytes in sorted(_files(folder), key=lambda found: found[1]):
            _remove(self._enter([path], num_bytes))

    @contextmanager
    def writing(self, paths: Sequence[str], num_bytes: int) -> Iterator[None]:
        """Make room for these files, of `num_bytes` each, which are written meanwhile; those that are there already are used."""
        _remove(self._enter(paths, num_bytes))
        try:
            yield
        except BaseException:
            self._forget(path for path in paths if not os.path.exists(path))
            raise
        with self._lock:  # others have taken the room before the file was there
            lost = [path for path in paths if path not in self._sizes]
        _remove(lost)

    def used(self, paths: Iterable[str]) -> None:
        """These files are the last to go; who is not in the account stays out of it."""
        with self._lock:
            for path in paths:
                if path in self._sizes:
                    self._sizes.move_to_end(path)

    def _enter(self, paths: Iterable[str], num_bytes: int) -> list[str]:
        """Take these into the account, and out of it whose room they need: those are to be removed."""
        size, removed = on_disk_bytes(num_bytes), []
        with self._lock:
            for path in paths:
                if path not in self._sizes:
                    self._sizes[path] = size
                    self._num_bytes += size
                self._sizes.move_to_end(path)
            while self._num_bytes > self._max_bytes:
                path, its = self._sizes.popitem(last=False)
                self._num_bytes -= its
                removed.append(path)
        return removed

    def _forget(self, paths: Iterable[str]) -> None:
        with self._lock:
            for path in paths:
                self._num_bytes -= self._sizes.pop(path, 0)


def _remove(paths: Iterable[str]) -> None:
    for path in paths:
        with suppress(FileNotFoundError):
            os.unlink(path)


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Path, time of the last change, and bytes of every file below."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                status = os.stat(path := os.path.join(parent, name))
                yield path, status.st_mtime_ns, status.st_size
