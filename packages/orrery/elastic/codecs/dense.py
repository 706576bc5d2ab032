"""Encode every value: as float32, or as an integer with a scale or codebook per block."""

import numpy as np

from orrery.elastic.codecs.base import SMALLEST, UNITS, Bytes, Codec, Floats, blocks_of, scales_of

BOOK_BYTES = 1024


class Float32Codec(Codec):
    kind = "float32"
    block = 1

    def __init__(self, num_threads: int = 1, native: object = None) -> None:
        super().__init__(num_threads, native=None)  # native code is no faster

    def wire_bytes(self, n: int) -> int:
        return 4 * n

    def _encode(self, x: Floats, wire: Bytes) -> None:
        wire[:] = x.view(np.uint8)

    def _values(self, wire: Bytes, n: int) -> Floats:
        return wire.view(np.float32)


class Int8BlockCodec(Codec):
    """Encode values as int8 with a scale per 256 values, 1.016 bytes a value.

    The scale is max |x| / 127. Layout: float32 scales, then one int8 a value.
    """

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


class Int8CodebookCodec(Codec):
    """Encode blocks of 65,536 values by 256 bins over ±6σ, 1.016 bytes a value.

    A bin decodes to its values' mean. Layout: 256 float32 means per block, then one byte a value.
    Source: INTELLECT-1 (arXiv 2412.01152, §2.2).
    """

    kind = "int8_codebook"
    block = 65_536

    def wire_bytes(self, n: int) -> int:
        return n + BOOK_BYTES * -(-n // self.block)

    def _encode(self, x: Floats, wire: Bytes) -> None:
        head = self.wire_bytes(x.size) - x.size
        books = wire[:head].view(np.float32).reshape(-1, 256)
        for book, start in zip(books, range(0, x.size, self.block), strict=True):
            values = x[start : start + self.block]
            codes = wire[head + start : head + start + values.size]
            book[:], codes[:] = _codebook(values)

    def _values(self, wire: Bytes, n: int) -> Floats:
        head = len(wire) - n
        books = np.frombuffer(wire[:head].tobytes(), np.float32)
        return books[np.arange(n) // self.block * 256 + wire[head:]]


def _codebook(values: Floats) -> tuple[Floats, Bytes]:
    absmax = np.abs(values).max()
    if absmax < SMALLEST:
        return np.zeros(256, np.float32), np.full(values.size, 128, np.uint8)
    units = np.rint(values * (UNITS / absmax)).astype(np.int64)
    unit = np.float64(absmax) * 2.0**-20
    sigma = unit * np.sqrt(np.float64((units * units).sum()) / max(values.size - 1, 1))
    inverse = np.float32(1.0 / (12.0 / 256.0 * sigma))
    codes = np.clip(np.rint(values * inverse), -128, 127).astype(np.int32) + 128
    counts = np.bincount(codes, minlength=256)
    sums = np.bincount(codes, weights=units, minlength=256)  # float64 is exact below 2^53
    return (sums / np.maximum(counts, 1) * unit).astype(np.float32), codes.astype(np.uint8)


class Int4BlockCodec(Codec):
    """Encode values as 4-bit integers with a scale per 256 values, 0.516 bytes a value.

    The scale is max |x| / 7. Layout: float32 scales, then ⌈m/2⌉ bytes per block of m values. Byte i
    has integer i in its low half and integer i + ⌈m/2⌉ in its high half, each plus 8.
    """

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
