"""Routes of cache blocks on a node's disk: a file a block, and as many as a bound allows (`bounded_folder`)."""

import contextlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from orrery.inference.bounded_folder import BoundedFolder

log = logging.getLogger("orrery.inference.routes")

FOLDER = "ORRERY_ROUTES_FOLDER"  # where an engine keeps routes on disk too
FOLDER_BYTES = "ORRERY_ROUTES_FOLDER_BYTES"  # at most


def is_on_disk(key: str) -> bool:
    """Whether this engine has routes of the block with this hash on disk, whichever of its processes asks."""
    folder = os.environ.get(FOLDER)
    return folder is not None and _path(Path(folder), key).is_file()


def _path(folder: Path, key: str) -> Path:
    return folder / key[:2] / key


class RoutesOnDisk:
    """One thread writes; any may read."""

    far = False  # what is read once need not be kept for the next time

    def __init__(self) -> None:
        self._folder = Path(os.environ[FOLDER])
        self._files = BoundedFolder(self._folder, int(os.environ[FOLDER_BYTES]))

    def write(self, objects: Iterable[Any]) -> None:
        """Put routes away; `objects` have a `key` and a `payload`. A disk that takes no more costs routes, never the engine."""
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
                with contextlib.suppress(OSError):
                    aside.unlink()

    def read(self, keys: list[str], num_bytes: int) -> list[bytes | None]:
        """The routes of these blocks, of `num_bytes` each; None where they are gone."""
        paths = [_path(self._folder, key) for key in keys]
        self._files.used(map(str, paths))
        found = [self._read(path) for path in paths]
        return [
            payload if payload is not None and len(payload) == num_bytes else None
            for payload in found
        ]

    def _read(self, path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("routes %s cannot be read, and are missing: %s", path.name, error)
            return None
