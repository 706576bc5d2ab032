"""Train: `__main__` parses arguments, `assemble` builds the objects, `loop` trains.

This module does not import torch, because `grow_segments` must run first.
"""

import os

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"  # torch 2.13 prefers PYTORCH_ALLOC_CONF
EXPANDABLE = "expandable_segments:True"


def grow_segments() -> None:
    """Let torch's CUDA allocator grow its segments, unless an environment variable configures it.

    Micro-batches differ in length and would fragment segments of fixed size.
    """
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault(ALLOCATOR, EXPANDABLE)
