"""Train the policy: `__main__` parses arguments, `assemble` builds, `loop` trains.

Do not import torch here, because `grow_segments` must run first.
"""

import os

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"  # torch 2.13 reads PYTORCH_ALLOC_CONF before this name
EXPANDABLE = "expandable_segments:True"


def grow_segments() -> None:
    """Use expandable CUDA memory segments, unless the environment configures the allocator.

    Fixed segments would waste memory, because micro-batches vary in length.
    """
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault(ALLOCATOR, EXPANDABLE)
