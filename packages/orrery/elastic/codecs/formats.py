"""Define the codecs: float32, integers with a scale or codebook per block, and top-k."""

import numpy as np
from numpy.typing import NDArray

from orrery.elastic.codecs.base import SMALLEST, UNITS, Bytes, Codec, Floats, blocks_of, scales_of

BOOK_BYTES = 1024
SHARE = 64
LAST = 4095


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
    """Encode values as int8 with the scale max |x| / 127 per 256 values, 1.016 bytes a value.

    Layout: float32 scales, then one int8 a value.
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
    """Encode blocks of 65,536 values into 256 bins over ±6σ, 1.016 bytes a value.

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
    """Encode 4-bit integers with the scale max |x| / 7 per 256 values, 0.516 bytes a value.

    Layout: float32 scales, then ⌈m/2⌉ bytes per block of m values. Byte i has integers i (low half)
    and i + ⌈m/2⌉ (high half), each plus 8.
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


def _record_bytes(m: int) -> int:
    k = -(-m // SHARE)
    return 8 + -(-k // 4) + -(-12 * k // 8) if m else 0


class TopK2BitCodec(Codec):
    """Keep the 64 largest magnitudes of each 4,096 values, 0.029 bytes a value.

    A kept value becomes its sign and a level. The high level is the mean of kept magnitudes above
    their mean. The low level is the mean of the others. `ErrorFeedback` sends dropped values later.
    Source: SparseLoCo (arXiv 2508.15706).

    A block of m values keeps k = ⌈m/64⌉. Layout: low and high level (float32), k codes of 2 bits, k
    indices of 12 bits, each list padded to whole bytes. Bit 0 of a code is the level, bit 1 the
    sign.
    """

    kind = "top_k_2bit"
    block = 4096

    def wire_bytes(self, n: int) -> int:
        return n // self.block * _record_bytes(self.block) + _record_bytes(n % self.block)

    def _encode(self, x: Floats, wire: Bytes) -> None:
        whole = x.size - x.size % self.block
        end = self.wire_bytes(whole)
        if whole:
            records = _records(x[:whole].reshape(-1, self.block))
            wire[:end] = records.reshape(-1)
        if whole < x.size:
            wire[end:] = _records(x[None, whole:])[0]

    def _values(self, wire: Bytes, n: int) -> Floats:
        values = np.zeros(n, np.float32)
        self._decode_plain(wire, values, 1.0, False)
        return values

    def _decode_plain(self, wire: Bytes, out: Floats, scale: float, adds: bool) -> None:
        if not adds:
            out[:] = 0
        whole = out.size - out.size % self.block
        end = self.wire_bytes(whole)
        parts = ((wire[:end], out[:whole], self.block), (wire[end:], out[whole:], out.size - whole))
        for records, values, m in parts:
            if values.size:
                places, kept = _kept(records.reshape(-1, _record_bytes(m)), m)
                kept *= np.float32(scale)
                rows = values.reshape(-1, m)
                found = np.take_along_axis(rows, places, axis=1)
                np.put_along_axis(rows, places, found + kept if adds else kept, axis=1)


def _records(rows: Floats) -> Bytes:
    num_rows, m = rows.shape
    k = -(-m // SHARE)
    bits = np.abs(rows).view(np.uint32).astype(np.uint64)
    # Among equal magnitudes, keep the lower index.
    keys = bits << np.uint64(12) | np.arange(LAST, LAST - m, -1).astype(np.uint64)
    best = np.partition(keys, m - k, axis=1)[:, m - k :]
    places = np.sort(LAST - (best & np.uint64(LAST)).astype(np.int64), axis=1)
    values = np.take_along_axis(rows, places, axis=1)
    magnitudes = np.abs(values)
    absmax = magnitudes.max(axis=1)
    is_zero = absmax < SMALLEST
    to_units = np.where(is_zero, np.float32(0), UNITS / np.where(is_zero, UNITS, absmax))
    units = np.rint(magnitudes * to_units[:, None]).astype(np.int64)
    is_high = units * k > units.sum(axis=1)[:, None]
    has_zeros = units.min(axis=1) == 0
    is_high[has_zeros] = units[has_zeros] > 0
    levels = np.empty((num_rows, 2), np.float32)
    for level, members in enumerate((~is_high, is_high)):
        means = (units * members).sum(axis=1) / np.maximum(members.sum(axis=1), 1)
        exact = means * (absmax.astype(np.float64) * 2.0**-20)
        levels[:, level] = np.where(is_zero, 0.0, exact)
    codes = is_high.astype(np.uint16) | np.signbit(values).astype(np.uint16) << 1
    return np.concatenate([levels.view(np.uint8), _bits(codes, 2), _bits(places, 12)], axis=1)


def _kept(records: Bytes, m: int) -> tuple[NDArray[np.int64], Floats]:
    """Return the kept indices and values, each [rows, k]."""
    k = -(-m // SHARE)
    split = 8 + -(-k // 4)
    levels = np.ascontiguousarray(records[:, :8]).view(np.float32)
    codes = _numbers(records[:, 8:split], k, 2)
    places = np.minimum(_numbers(records[:, split:], k, 12), m - 1)  # damaged indices may be larger
    values = np.take_along_axis(levels, codes & 1, axis=1)
    return places, np.where(codes & 2, -values, values)


def _bits(numbers: NDArray[np.integer], width: int) -> Bytes:
    bits = (numbers[:, :, None] >> np.arange(width) & 1).astype(np.uint8)
    return np.packbits(bits.reshape(len(numbers), -1), axis=1, bitorder="little")


def _numbers(packed: Bytes, count: int, width: int) -> NDArray[np.int64]:
    bits = np.unpackbits(packed, axis=1, count=count * width, bitorder="little")
    return bits.reshape(len(packed), count, width).astype(np.int64) @ (1 << np.arange(width))
