"""Keep the 64 largest magnitudes of each 4,096 values, 0.029 bytes a value.

A kept value becomes a sign and one of two levels: the mean of kept magnitudes above their mean
(high), or of the others (low). `ErrorFeedback` sends dropped values later. Source: SparseLoCo
(arXiv 2508.15706).

A block of m values keeps k = ⌈m/64⌉ values. Layout: low and high level (float32), k codes of 2
bits, k indices of 12 bits, each list padded to whole bytes. Bit 0 of a code selects the level, bit
1 is the sign.
"""

import numpy as np
from numpy.typing import NDArray

from orrery.elastic.codecs.base import SMALLEST, UNITS, Bytes, Codec, Floats

SHARE = 64
LAST = 4095


def _record_bytes(m: int) -> int:
    k = -(-m // SHARE)
    return 8 + -(-k // 4) + -(-12 * k // 8) if m else 0


class TopK2BitCodec(Codec):
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
    places = np.minimum(_numbers(records[:, split:], k, 12), m - 1)  # damaged data may hold more
    values = np.take_along_axis(levels, codes & 1, axis=1)
    return places, np.where(codes & 2, -values, values)


def _bits(numbers: NDArray[np.integer], width: int) -> Bytes:
    bits = (numbers[:, :, None] >> np.arange(width) & 1).astype(np.uint8)
    return np.packbits(bits.reshape(len(numbers), -1), axis=1, bitorder="little")


def _numbers(packed: Bytes, count: int, width: int) -> NDArray[np.int64]:
    bits = np.unpackbits(packed, axis=1, count=count * width, bitorder="little")
    return bits.reshape(len(packed), count, width).astype(np.int64) @ (1 << np.arange(width))
