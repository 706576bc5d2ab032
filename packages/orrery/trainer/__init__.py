"""Train the policy: `__main__` parses arguments, `assemble` builds, `loop` trains.

Do not import torch here: `grow_segments` must run first.
"""

import os

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"  # torch 2.13 prefers PYTORCH_ALLOC_CONF
EXPANDABLE = "expandable_segments:True"


def grow_segments() -> None:
    """Use expandable CUDA memory segments, unless the environment configures the allocator.

    Fixed segments waste memory when micro-batches vary in length.
    """
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault(ALLOCATOR, EXPANDABLE)
