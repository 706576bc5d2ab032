"""Device memory in segments that grow, which is torch's allocator told so before torch is loaded.

Micro-batches have other lengths every time. In segments of fixed sizes that leaves gaps: the allocator gives memory back and asks again
while the device waits, and in the end has none for a tensor that the gaps together would hold.
"""

import os

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"  # also read by torch 2.13, which prefers PYTORCH_ALLOC_CONF
EXPANDABLE = "expandable_segments:True"


def grow_segments() -> None:
    """For this process, unless its environment says something of the allocator already."""
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault(ALLOCATOR, EXPANDABLE)
