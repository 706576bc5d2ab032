"""Encode values as 4-bit integers with a scale per 256 values, 0.516 bytes a value.

The scale is the largest magnitude / 7. Layout: float32 scales, then ⌈m/2⌉ bytes per block of m
values. Byte i holds integer i in its low 4 bits and integer i + ⌈m/2⌉ in its high 4 bits, each with
8 added.
"""

import numpy as np

from orrery.elastic.codecs.base import Bytes, Codec, Floats, blocks_of, scales_of


class Int4BlockCodec(Codec):
    kind = "int4_block"
    block = 256

    def wire_bytes(self, n: int) -> int:
        return (n + 1) // 2 + 4 * -(-n // self.block)

    def _encode(self, x: Floats, wire: Bytes) -> None:
        rows = blocks_of(x, self.block)
        scales, inverse = scales_of(rows, 7)
        head = scales.nbytes
        wire[:head] = scales.view(np.uint8)
        codes = (np.rint(rows * inverse[:, None]) + 8).astype(np.uint8).reshape(-1)
        whole = x.size - x.size % self.block
        half = self.block // 2
        pairs = codes[:whole].reshape(-1, 2, half)
        wire[head : head + whole // 2] = (pairs[:, 0] | pairs[:, 1] << 4).reshape(-1)
        rest = np.full(2 * ((x.size - whole + 1) // 2), 8, np.uint8)
        rest[: x.size - whole] = codes[whole : x.size]
        low, high = rest.reshape(2, -1)
        wire[head + whole // 2 :] = low | high << 4

    def _values(self, wire: Bytes, n: int) -> Floats:
        head = 4 * -(-n // self.block)
        scales = np.frombuffer(wire[:head].tobytes(), np.float32)
        whole = n - n % self.block
        pairs = wire[head : head + whole // 2].reshape(-1, 1, self.block // 2)
        rest = wire[head + whole // 2 :]
        codes = np.concatenate([
            np.concatenate([pairs & 15, pairs >> 4], axis=1).reshape(-1),
            np.concatenate([rest & 15, rest >> 4])[: n - whole],
        ])  # fmt: skip
        rows = blocks_of(codes.astype(np.float32) - 8, self.block)
        return (rows * scales[:, None]).reshape(-1)[:n]
