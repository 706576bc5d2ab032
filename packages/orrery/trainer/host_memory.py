"""Measure available host memory, and allocate pinned blocks.

- `available_bytes` respects cgroup limits, because Linux kills processes above them.
- `host_block` avoids torch's pinned allocator, which rounds sizes up to powers of two.
"""

import hashlib
import mmap
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = Path("/")


class CgroupVersion(NamedTuple):
    """File names of a cgroup version. `page_cache`: keys in `memory.stat`."""

    mount: str
    limit: str
    used: str
    page_cache: tuple[str, str]


V1_PAGE_CACHE = ("total_inactive_file", "total_active_file")
V1 = CgroupVersion("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", V1_PAGE_CACHE)
V2 = CgroupVersion("", "memory.max", "memory.current", ("inactive_file", "active_file"))


def available_bytes(root: Path = ROOT) -> int:
    """Return bytes available without swapping. `root` contains proc/ and sys/."""
    found = [cgroup_available_bytes(root)]
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    return min(found)


def cgroup_available_bytes(root: Path = ROOT) -> int:
    """Return min(limit − used + page cache) over this process's cgroups."""
    found = [sys.maxsize]
    for version, path in _groups(root):
        mount = root / "sys/fs/cgroup" / version.mount
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            found.append(_group_available_bytes(mount.joinpath(*parts[:depth]), version))
    return max(0, min(found))


def _groups(root: Path) -> Iterator[tuple[CgroupVersion, str]]:
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
    except OSError:
        return sys.maxsize


def host_number() -> int:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = platform.node()
    return int.from_bytes(hashlib.sha256(boot.encode()).digest()[:7], "big")


class _Pages(mmap.mmap):
    """Pages that `__del__` unregisters from CUDA. `weakref.finalize` would run too late.

    CUDA cannot pin an address again before it is unregistered (error 712).
    """

    address: int | None = None
    unregister: Callable[[int], Any]

    def __del__(self) -> None:
        if self.address is not None:
            self.unregister(self.address)


def host_block(num_bytes: int, device: torch.device, file: int | None = None) -> tuple[Tensor, int]:
    """Return zeros (u8 [num_bytes], pinned if `device` is a GPU) and CUDA's error code or 0.

    `file`: descriptor of a file to map. Raise OSError if memory is short.
    """
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8), 0
    if file is None:
        pages = _Pages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        os.posix_fallocate(file, 0, num_bytes)  # later, a write without space would raise SIGBUS
        pages = _Pages(file, num_bytes)
    block = torch.frombuffer(pages, dtype=torch.uint8).zero_()
    if device.type != "cuda":
        return block, 0
    torch.cuda.set_device(device)  # this may be a new thread, whose device is 0
    cudart = torch.cuda.cudart()
    error = int(cudart.cudaHostRegister(block.data_ptr(), num_bytes, 0))
    if not error:
        pages.unregister, pages.address = cudart.cudaHostUnregister, block.data_ptr()
    return block, error
