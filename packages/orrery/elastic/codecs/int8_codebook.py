"""Encode blocks of 65,536 values by 256 levels over ±6σ, 1.016 bytes a value.

Each level is the mean of the values that it encodes. Layout: a codebook (256 float32) for each
block, then one byte a value. Source: INTELLECT-1 (arXiv 2412.01152, §2.2).
"""

import numpy as np

from orrery.elastic.codecs.base import SMALLEST, UNITS, Bytes, Codec, Floats

BOOK_BYTES = 1024


class Int8CodebookCodec(Codec):
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
