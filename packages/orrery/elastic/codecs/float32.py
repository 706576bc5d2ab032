"""Encode values as float32 without compression, 4 bytes a value."""

import numpy as np

from orrery.elastic.codecs.base import Bytes, Codec, Floats


class Float32Codec(Codec):
    kind = "float32"
    block = 1

    def __init__(self, num_threads: int = 1, native: object = None) -> None:
        super().__init__(num_threads, native=None)  # numpy is as fast

    def wire_bytes(self, n: int) -> int:
        return 4 * n

    def _encode(self, x: Floats, wire: Bytes) -> None:
        wire[:] = x.view(np.uint8)

    def _values(self, wire: Bytes, n: int) -> Floats:
        return wire.view(np.float32)
