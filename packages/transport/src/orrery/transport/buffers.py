"""Receive buffers that are used again: fresh pages cost as much as the copy into them."""

import sys

import numpy as np

_UNSHARED = 2  # the list's reference and getrefcount's own argument


class BufferPool:
    """Buffers that are used again once nobody looks at them: fresh pages cost as much as the copy into them.

    Every view of a buffer (numpy's, torch's through `from_numpy`) holds a reference to it, so a reference count of one says
    that it is free. `keep` buffers are remembered; a caller who holds on to more gets fresh ones.
    """

    def __init__(self, keep: int = 2) -> None:
        self._buffers: list[np.ndarray] = []
        self._keep = keep

    def take(self, num_bytes: int) -> np.ndarray:
        """uint8 [num_bytes], contents undefined."""
        for index in range(len(self._buffers)):
            if (
                len(self._buffers[index]) >= num_bytes
                and sys.getrefcount(self._buffers[index]) == _UNSHARED
            ):
                return self._buffers[index][:num_bytes]
        buffer = np.empty(num_bytes, dtype=np.uint8)
        self._buffers = [
            *self._buffers[-(self._keep - 1) :],
            buffer,
        ]  # the oldest is forgotten: its readers keep it alive
        return buffer[:num_bytes]
