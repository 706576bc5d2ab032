"""Train the policy. `__main__` parses arguments, `assemble` builds the objects, `loop` trains.

Do not import torch here, because `grow_segments` must run first.
"""

import os

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"  # torch 2.13 prefers PYTORCH_ALLOC_CONF
EXPANDABLE = "expandable_segments:True"


def grow_segments() -> None:
    """Let torch's CUDA allocator use expandable segments, unless the environment configures it.

    Micro-batches of varying length would fragment fixed segments.
    """
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault(ALLOCATOR, EXPANDABLE)
