"""What the control groups of this process leave it of memory: those of a Slurm job or a container, whose limit kills without a word.

A group and all above it count, each with what its processes use together. Where a container sees its own group as the root, the path that
it reads names folders that it does not see: they are passed over, up to the root of the mount. Versions 2 and 1, which may be side by side.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")


class Names(NamedTuple):
    """A version's mount below /sys/fs/cgroup, its files, and the rows of `memory.stat` that count files' pages, which can go at once."""

    mount: str
    limit: str
    used: str
    files: tuple[str, str]


V1 = Names(
    "memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
V2 = Names("", "memory.max", "memory.current", ("inactive_file", "active_file"))


def left_bytes(root: Path = ROOT) -> int:
    """The least that a group leaves: limit − used + files' pages, which shared memory's are not; `sys.maxsize` without a limit.

    `root` holds proc/ and sys/.
    """
    found = [sys.maxsize]
    for names, path in _groups(root):
        mount = root / "sys/fs/cgroup" / names.mount
        parts = [part for part in path.split("/") if part not in ("", "..")]
        found += [_left(mount.joinpath(*parts[:depth]), names) for depth in range(len(parts) + 1)]
    return max(0, min(found))


def _groups(root: Path) -> Iterator[tuple[Names, str]]:
    """This process's group in each version that may limit memory, from lines like `4:cpu,memory:/a/b` and `0::/a/b`."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            yield V2, path
        elif "memory" in controllers.split(","):
            yield V1, path


def _left(folder: Path, names: Names) -> int:
    try:
        limit = (folder / names.limit).read_text().strip()
        if limit == "max":
            return sys.maxsize
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return (
            int(limit)
            - int((folder / names.used).read_text())
            + sum(int(stat.get(row, 0)) for row in names.files)
        )
    except OSError:  # no such group here, or the root, which has no limit
        return sys.maxsize
