"""Host memory: how much this process may still use, and blocks that a GPU copies to at full speed.

- The limit of a control group, of a Slurm job or a container, kills without a message.
- A container may see its own group as the root of the mount. Folders that it does not see are
  skipped. Versions 1 and 2 of control groups may be mounted together.
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
    """The mount below /sys/fs/cgroup, its files, and the page-cache rows of `memory.stat`."""

    mount: str
    limit: str
    used: str
    page_cache: tuple[str, str]


V1_PAGE_CACHE = ("total_inactive_file", "total_active_file")
V1 = CgroupVersion("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", V1_PAGE_CACHE)
V2 = CgroupVersion("", "memory.max", "memory.current", ("inactive_file", "active_file"))


def available_bytes(root: Path = ROOT) -> int:
    """Return the memory that this process can use without swapping. `root` has proc/ and sys/."""
    found = [cgroup_available_bytes(root)]
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    return min(found)


def cgroup_available_bytes(root: Path = ROOT) -> int:
    """Return the least limit − used + page cache of all groups, `sys.maxsize` without a limit."""
    found = [sys.maxsize]
    for version, path in _groups(root):
        mount = root / "sys/fs/cgroup" / version.mount
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            found.append(_group_available_bytes(mount.joinpath(*parts[:depth]), version))
    return max(0, min(found))


def _groups(root: Path) -> Iterator[tuple[CgroupVersion, str]]:
    """Parse lines like `4:cpu,memory:/a/b` (version 1) and `0::/a/b` (version 2)."""
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
    except OSError:  # no such group here, or the unlimited root
        return sys.maxsize


def host_number() -> int:
    """Return a number that processes of one host share until it reboots."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = platform.node()
    return int.from_bytes(hashlib.sha256(boot.encode()).digest()[:7], "big")


class _Pages(mmap.mmap):
    """Pages that unregister before they are freed. `weakref.finalize` would run after that."""

    address: int | None = None  # where they are registered
    unregister: Callable[[int], Any]

    def __del__(self) -> None:
        if self.address is not None:
            self.unregister(self.address)


def host_block(num_bytes: int, device: torch.device) -> tuple[Tensor, int]:
    """Return resident zeros u8 [num_bytes], registered on a GPU, and the CUDA error or 0."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8), 0
    pages = _Pages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Zeroing touches the pages with many threads. Registration would use one.
    block = torch.frombuffer(pages, dtype=torch.uint8).zero_()
    if device.type != "cuda":
        return block, 0
    torch.cuda.set_device(device)  # a new thread starts with the first device
    cudart = torch.cuda.cudart()
    error = int(cudart.cudaHostRegister(block.data_ptr(), num_bytes, 0))
    if not error:
        pages.unregister, pages.address = cudart.cudaHostUnregister, block.data_ptr()
    return block, error
