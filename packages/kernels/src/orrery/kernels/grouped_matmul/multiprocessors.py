"""Multiprocessors that grouped products leave to others: to collectives that run beside them.

torch's grouped GEMM has one long-lived block a multiprocessor. Where a collective holds some, the blocks meant for those run after all
others, and the product takes up to twice as long. A step's grouped products took 243 ms beside collectives of 24 blocks, and 163 ms since
they leave 16 to them (benchmarks/trainer/{before_sharing_multiprocessors/,}qwen3_30b_a3b_16k.json).
Dense products have short blocks and do better with all multiprocessors, so the limit, which torch keeps for all products, is theirs alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_set = getattr(
    torch._C, "_set_sm_carveout_experimental", None
)  # private; without it products stay slow beside collectives, and right
_num_left = 0


def leave_multiprocessors(count: int) -> None:
    """From here on, grouped products of this process use `count` multiprocessors fewer than there are."""
    global _num_left
    _num_left = count


@contextmanager
def leaving() -> Iterator[None]:
    """Around the launch of a grouped product."""
    if _set is None or not _num_left:
        yield
        return
    _set(_num_left)
    try:
        yield
    finally:
        _set(None)
