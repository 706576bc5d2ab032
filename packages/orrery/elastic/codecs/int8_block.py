"""Encode values as 8-bit integers with a scale per 256 values, 1.016 bytes a value.

The scale is the largest magnitude / 127. Layout: float32 scales, then one int8 a value.
"""

import numpy as np

from orrery.elastic.codecs.base import Bytes, Codec, Floats, blocks_of, scales_of


class Int8BlockCodec(Codec):
    kind = "int8_block"
    block = 256

    def wire_bytes(self, n: int) -> int:
        return n + 4 * -(-n // self.block)

    def _encode(self, x: Floats, wire: Bytes) -> None:
        rows = blocks_of(x, self.block)
        scales, inverse = scales_of(rows, 127)
        head = scales.nbytes
        wire[:head] = scales.view(np.uint8)
        codes = np.rint(rows * inverse[:, None]).astype(np.int8)
        wire[head:] = codes.reshape(-1)[: x.size].view(np.uint8)

    def _values(self, wire: Bytes, n: int) -> Floats:
        head = len(wire) - n
        scales = np.frombuffer(wire[:head].tobytes(), np.float32)
        rows = blocks_of(wire[head:].view(np.int8).astype(np.float32), self.block)
        return (rows * scales[:, None]).reshape(-1)[:n]
