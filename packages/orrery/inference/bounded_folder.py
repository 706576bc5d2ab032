"""Limit a folder's bytes: remove the least recently used files.

- Old files are removed before a write, so the limit is never exceeded. Readers must expect missing
  files.
- File sizes are rounded up to pages.
- Each process counts its files alone, so a shared folder may reach the sum of all limits.
"""

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from orrery.manifest.schema import on_disk_bytes

log = logging.getLogger("orrery.inference.routes")

FOLDER = "ORRERY_ROUTES_FOLDER"
FOLDER_BYTES = "ORRERY_ROUTES_FOLDER_BYTES"


class BoundedFolder:
    def __init__(self, folder: Path, max_bytes: int):
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by path, least recently used first
        self._num_bytes = 0
        for path, _, num_bytes in sorted(_files(folder), key=lambda found: found[1]):
            _remove(self._enter([path], num_bytes))

    @contextmanager
    def writing(self, paths: Sequence[str], num_bytes: int) -> Iterator[None]:
        """Make room for the files of `num_bytes` each that the `with` body writes."""
        _remove(self._enter(paths, num_bytes))
        try:
            yield
        except BaseException:
            self._forget(path for path in paths if not os.path.exists(path))
            raise
        with self._lock:
            lost = [path for path in paths if path not in self._sizes]
        _remove(lost)

    def used(self, paths: Iterable[str]) -> None:
        """Mark files as just used."""
        with self._lock:
            for path in paths:
                if path in self._sizes:
                    self._sizes.move_to_end(path)

    def _enter(self, paths: Iterable[str], num_bytes: int) -> list[str]:
        """Add new files to the total. Return the evicted files, for the caller to remove."""
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
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                status = os.stat(path := os.path.join(parent, name))
                yield path, status.st_mtime_ns, status.st_size


def is_on_disk(key: str) -> bool:
    folder = os.environ.get(FOLDER)
    return folder is not None and _path(Path(folder), key).is_file()


def _path(folder: Path, key: str) -> Path:
    return folder / key[:2] / key


class RoutesOnDisk:
    """Routes on disk, one file per block. One thread writes, any thread reads."""

    def __init__(self) -> None:
        self._folder = Path(os.environ[FOLDER])
        self._files = BoundedFolder(self._folder, int(os.environ[FOLDER_BYTES]))

    def write(self, objects: Iterable[Any]) -> None:
        """Write objects with a `key` and a `payload` (routes). Drop each that the disk refuses."""
        for each in objects:
            path = _path(self._folder, each.key)
            aside = path.with_suffix(f".{os.getpid()}")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with self._files.writing([str(path)], len(each.payload)):
                    aside.write_bytes(each.payload)
                    aside.rename(path)
            except OSError as error:
                log.warning("routes %s cannot be kept on disk: %s", path.name, error)
                with suppress(OSError):
                    aside.unlink()

    def read(self, keys: list[str], num_bytes: int) -> dict[str, bytes]:
        paths = {key: _path(self._folder, key) for key in keys}
        self._files.used(map(str, paths.values()))
        found = {key: self._read(path) for key, path in paths.items()}
        return {key: payload for key, payload in found.items() if len(payload) == num_bytes}

    def _read(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            log.warning("routes %s cannot be read, and are missing: %s", path.name, error)
            return b""
