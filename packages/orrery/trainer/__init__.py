"""Train the policy. `__main__` parses arguments, `assemble` builds the objects, `loop` trains.

Do not import torch here: `grow_segments` must run before torch's import.
"""

import os

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"  # torch 2.13 reads PYTORCH_ALLOC_CONF first
EXPANDABLE = "expandable_segments:True"


def grow_segments() -> None:
    """Let torch's CUDA allocator use expandable segments, unless the environment configures it.

    Micro-batches of different lengths would fragment segments of fixed size.
    """
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault(ALLOCATOR, EXPANDABLE)
