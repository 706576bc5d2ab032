"""Model a power cut: compute the states that a folder may have after a cut at any moment.

- In: the calls of `os` that this process makes below `root` while `Disk` is entered.
- The model is the worst case of POSIX, so it is worse than ext4. A file keeps only the bytes of its
  last sync. Each name added or removed since its folder's last sync may exist or not,
  independently.
- `may_exist`: some state has the path. `is_safe`: every state has it, with its present bytes.
"""

import os
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

CHANGES = ("rename", "replace", "unlink", "rmdir", "mkdir", "link", "symlink")


class Disk:
    """The disk below `root`.

    `look` is called after every change and every sync. `skip(frame)` tells whether to leave out the
    sync that `frame` calls.
    """

    def __init__(
        self,
        root: Path,
        look: Callable[["Disk"], None],
        skip: Callable[[FrameType], bool] = lambda frame: False,
    ):
        self.root, self._look, self._skip = root, look, skip
        self._names: dict[int, dict[str, int]] = {}  # folder's inode → its names at its last sync
        self._bytes: dict[int, bytes] = {}  # file's inode → its bytes at its last sync
        self._held: dict[int, int] = {}  # inode → descriptor, so that the number is not reused
        self._real: dict[str, Any] = {}
        for parent, _, files in os.walk(root, topdown=False):  # all present files are safe
            for path in (*(os.path.join(parent, name) for name in files), parent):
                self._sync(os.open(path, os.O_RDONLY))

    def __enter__(self) -> Self:
        def fsync(descriptor: int) -> None:
            if not self._skip(sys._getframe(1)):
                # The folder may be write-only.
                self._sync(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY))
            self._look(self)

        def changed(name: str) -> Callable[..., Any]:
            def call(*words: Any, **options: Any) -> Any:
                result = self._real[name](*words, **options)
                self._look(self)
                return result

            return call

        for name in ("fsync", *CHANGES):
            self._real[name] = getattr(os, name)
            setattr(os, name, fsync if name == "fsync" else changed(name))
        return self

    def __exit__(self, *_: object) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)
        for descriptor in self._held.values():
            os.close(descriptor)

    def _sync(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        with suppress(KeyError):
            os.close(self._held[status.st_ino])
        self._held[status.st_ino] = descriptor
        if stat.S_ISDIR(status.st_mode):
            self._names[status.st_ino] = _names(descriptor)
        elif stat.S_ISREG(status.st_mode):
            self._bytes[status.st_ino] = os.pread(descriptor, status.st_size, 0)

    # States -------------------------------------------------------------------------------------

    def may_exist(self, pattern: str) -> list[tuple[str, "Found"]]:
        """Return (path, inode) for every path that some state has and that matches `pattern`.

        `*` in a pattern stands for one whole name.
        """
        found = [("", Found(self, os.stat(self.root).st_ino, True))]
        for part in Path(pattern).parts:
            found = [
                (f"{path}/{name}".lstrip("/"), child)
                for path, one in found
                for name, child in one.children()
                if part in ("*", name)
            ]
        return found

    def is_safe(self, path: Path) -> bool:
        """Return whether every state has `path` with its present content; folders recursively."""
        relative = path.relative_to(self.root)
        if path.is_dir():
            return self.is_named(relative) and all(self.is_safe(child) for child in path.iterdir())
        return self.is_named(relative) and (
            path.is_symlink() or self._bytes.get(path.stat().st_ino) == path.read_bytes()
        )

    def is_named(self, relative: Path, within: Path = Path()) -> bool:
        """Return whether every state with the folder `within` has the path `relative` below it.

        The path must lead to its present inode.
        """
        at = self.root / within
        for part in relative.relative_to(within).parts:
            if self._names.get(os.stat(at).st_ino, {}).get(part) != os.lstat(at / part).st_ino:
                return False
            at /= part
        return True


class Found:
    """An inode that some state has under a path. `is_sure`: every state has it there."""

    def __init__(self, disk: Disk, inode: int, is_sure: bool):
        self._disk, self.inode, self.is_sure = disk, inode, is_sure

    def children(self) -> list[tuple[str, "Found"]]:
        """Return (name, inode) for every entry that some state has in this folder."""
        synced, now = self._disk._names.get(self.inode, {}), self._now()
        return [
            (name, Found(self._disk, inode, synced.get(name) == now.get(name)))
            for name in {**synced, **now}
            for inode in {names[name] for names in (synced, now) if name in names}
        ]

    def surely(self, relative: str) -> bytes | None:
        """Return the bytes that a file in this folder has in every state, or None."""
        found = self
        for part in Path(relative).parts:
            inside = [child for name, child in found.children() if name == part and child.is_sure]
            if not inside:
                return None
            [found] = inside
        return self._disk._bytes.get(found.inode)

    def _now(self) -> dict[str, int]:
        if (descriptor := self._disk._held.get(self.inode)) is not None:
            return _names(descriptor)
        for parent, _, _ in os.walk(self._disk.root):
            if os.stat(parent).st_ino == self.inode:
                return _names(parent)
        return {}


def _names(folder: int | str) -> dict[str, int]:
    with suppress(OSError), os.scandir(folder) as entries:
        return {entry.name: entry.stat(follow_symlinks=False).st_ino for entry in entries}
    return {}
