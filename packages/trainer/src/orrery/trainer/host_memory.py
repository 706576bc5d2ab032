"""Blocks of host memory that a GPU copies from and to at the speed of the link.

- A block is pages of its own, registered with CUDA for exactly as long as it is there: memory that is freed while it is registered makes
  whoever gets the same addresses next fail (CUDA error 712).
- Registered rather than taken from torch's pinned allocator, which rounds sizes up to powers of two.
- On a CPU a block is plain memory.
"""

import mmap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Pages(mmap.mmap):
    """They are unregistered just before they go, with the last tensor over them. A `weakref.finalize` of an mmap runs just after."""

    address: int | None = None  # where they are registered
    unregister: Callable[[int], Any]

    def __del__(self) -> None:
        if self.address is not None:
            self.unregister(self.address)


def host_block(num_bytes: int, device: torch.device) -> tuple[Tensor, int]:
    """u8 [num_bytes] of zeros for `device`'s use, and the CUDA error where it could not be registered (0: none). Every page is there."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8), 0
    pages = _Pages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block = torch.frombuffer(
        pages, dtype=torch.uint8
    ).zero_()  # by many threads, where registering would touch the pages by one
    if device.type != "cuda":
        return block, 0
    torch.cuda.set_device(device)  # a thread begins with the first device
    cudart = torch.cuda.cudart()
    error = int(cudart.cudaHostRegister(block.data_ptr(), num_bytes, 0))
    if not error:
        pages.unregister, pages.address = cudart.cudaHostUnregister, block.data_ptr()
    return block, error
