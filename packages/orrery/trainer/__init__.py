"""Trainer: batches in, next weights out. `__main__` parses, `assemble` builds, `loop` trains.

Nothing here imports torch: `grow_segments` must run before torch is loaded.
"""

import os

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"  # torch 2.13 reads it too, and prefers PYTORCH_ALLOC_CONF
EXPANDABLE = "expandable_segments:True"


def grow_segments() -> None:
    """Make torch's CUDA allocator grow its segments, unless the environment configures it.

    Micro-batches differ in length. Segments of fixed size fragment, until no gap fits a tensor.
    """
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault(ALLOCATOR, EXPANDABLE)
