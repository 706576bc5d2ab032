"""Host memory: how much this process may still use, and blocks that a GPU copies to at full speed.

- Available memory is the least of what the kernel has and what each control group leaves. The
  groups are those of a Slurm job or a container, whose limit kills without a message.
- A container may see its own group as the root of the mount. The path that it reads then names
  folders that do not exist here, and these are skipped. Versions 1 and 2 may be mounted together.
- A block is registered with CUDA exactly as long as its pages exist. Freed pages that stay
  registered make the next user of the same addresses fail (CUDA error 712).
- torch's pinned allocator is not used: it rounds sizes up to powers of two.
"""

import hashlib
import mmap
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = Path("/")


class CgroupVersion(NamedTuple):
    """The mount below /sys/fs/cgroup, its files, and the rows of `memory.stat` with page cache."""

    mount: str
    limit: str
    used: str
    page_cache: tuple[str, str]


V1 = CgroupVersion(
    "memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
V2 = CgroupVersion("", "memory.max", "memory.current", ("inactive_file", "active_file"))


def available_bytes(root: Path = ROOT) -> int:
    """Return the host memory that this process can use without swapping. `root` has proc/, sys/."""
    found = [cgroup_available_bytes(root)]
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    return min(found)


def cgroup_available_bytes(root: Path = ROOT) -> int:
    """Return the least that any control group leaves, or `sys.maxsize` without a limit.

    A group leaves limit − used + page cache, because page cache can be evicted at once.
    """
    found = [sys.maxsize]
    for version, path in _groups(root):
        mount = root / "sys/fs/cgroup" / version.mount
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            found.append(_group_available_bytes(mount.joinpath(*parts[:depth]), version))
    return max(0, min(found))


def _groups(root: Path) -> Iterator[tuple[CgroupVersion, str]]:
    """Yield this process's groups, from lines like `4:cpu,memory:/a/b` and `0::/a/b`."""
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


def _group_available_bytes(folder: Path, version: CgroupVersion) -> int:
    try:
        limit = (folder / version.limit).read_text().strip()
        if limit == "max":
            return sys.maxsize
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        page_cache = sum(int(stat.get(row, 0)) for row in version.page_cache)
        return int(limit) - int((folder / version.used).read_text()) + page_cache
    except OSError:  # no such group here, or the root, which has no limit
        return sys.maxsize


def host_number() -> int:
    """Return a number that processes of one host share until it reboots."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = platform.node()
    return int.from_bytes(hashlib.sha256(boot.encode()).digest()[:7], "big")


class _Pages(mmap.mmap):
    """Pages that unregister themselves before they are freed, with the last tensor over them.

    A `weakref.finalize` of an mmap would run after the pages are freed.
    """

    address: int | None = None  # where they are registered
    unregister: Callable[[int], Any]

    def __del__(self) -> None:
        if self.address is not None:
            self.unregister(self.address)


def host_block(num_bytes: int, device: torch.device) -> tuple[Tensor, int]:
    """Return (zeros u8 [num_bytes], CUDA error), registered for `device` if that is a GPU.

    The error is 0 if registration succeeded or was not needed. Every page is resident.
    """
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8), 0
    pages = _Pages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Many threads touch the pages here. Registration would touch them with one thread.
    block = torch.frombuffer(pages, dtype=torch.uint8).zero_()
    if device.type != "cuda":
        return block, 0
    torch.cuda.set_device(device)  # a new thread starts with the first device
    cudart = torch.cuda.cudart()
    error = int(cudart.cudaHostRegister(block.data_ptr(), num_bytes, 0))
    if not error:
        pages.unregister, pages.address = cudart.cudaHostUnregister, block.data_ptr()
    return block, error
