"""Multiprocessors that grouped products leave to others: to collectives that run beside them.

torch's grouped GEMM has one long-lived block a multiprocessor. Where a collective holds some, the blocks meant for those run after all
others, and the product takes twice as long: 1.74 for 0.89 ms beside 24 blocks of NCCL on an H200. With as many blocks fewer it does not.
Dense products have short blocks and do better with all multiprocessors, so the limit, which torch keeps for all products, is theirs alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_set = getattr(torch._C, "_set_sm_carveout_experimental", None)  # private; without it products stay slow beside collectives, and right
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
