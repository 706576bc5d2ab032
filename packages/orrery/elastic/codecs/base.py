"""Define the interface of codecs between float32 values and bytes.

- Blocks of `block` values are encoded independently.
- Magnitudes are at most 2^100. Lossy codecs decode a block of magnitudes below 2^-100 to zeros.
- Equal values give equal bytes on every host, with or without native code. Each
  float32 operation rounds once, and sums use integers.
"""

import os
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from orrery.elastic.codecs.native import Library, library
from orrery.elastic.types import ElasticError

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

SMALLEST = np.float32(2.0**-100)
LARGEST = np.float32(2.0**100)
UNITS = np.float32(2.0**20)  # sums are integers in units of max |x| / 2^20
THREAD_VALUES = 1 << 18  # minimum values per thread


class Codec(ABC):
    kind: ClassVar[str]
    block: ClassVar[int]

    def __init__(self, num_threads: int = 1, native: Library | bool | None = True) -> None:
        """`native`: a library, True to build one, False or None to use numpy."""
        found = library() if native is True else native or None
        self._native = (found.encoder(self.kind), found.decoder(self.kind)) if found else None
        self._encode_sum = found.sum_encoder(self.kind) if found else None
        self._num_threads = num_threads

    @abstractmethod
    def wire_bytes(self, n: int) -> int: ...

    @abstractmethod
    def _encode(self, x: Floats, wire: Bytes) -> None: ...

    @abstractmethod
    def _values(self, wire: Bytes, n: int) -> Floats: ...

    def encode(self, x: Floats, out: Bytes | None = None) -> Bytes:
        """Return x, f32[n], as bytes, in `out` if given.

        Raise ElasticError for NaN, infinity and magnitudes over 2^100.
        """
        x = _floats(x, "x")
        wire = np.empty(self.wire_bytes(x.size), np.uint8) if out is None else out
        if self._native:
            encode, _ = self._native
            bad = self._run(x.size, lambda a, b: encode(x, x.size, wire, a, b))
            refused = min((each for each in bad if each >= 0), default=-1)
        else:
            in_range = np.abs(x) <= LARGEST
            refused = -1 if in_range.all() else int(in_range.argmin())
            if refused < 0:
                self._encode(x, wire)
        if refused >= 0:
            raise _refusal(x, refused)
        return wire

    def encode_sum(self, x: Floats, share: float, added: Bytes | None, out: Bytes) -> Bytes:
        """Encode `share` · x plus the decoded `added` into `out`, and return it.

        If `share` is 0, x may contain NaN.
        """
        if added is not None:
            added = self._checked(added, x)
        if self._encode_sum is None:
            values = np.multiply(x, np.float32(share)) if share else np.zeros_like(x)
            if added is not None:
                self.decode_add(added, values)
            return self.encode(values, out)
        call, address = self._encode_sum, added.ctypes.data if added is not None else None
        bad = self._run(x.size, lambda a, b: call(x, x.size, share, address, out, a, b))
        if (refused := min((each for each in bad if each >= 0), default=-1)) >= 0:
            raise _refusal(x, refused)
        return out

    def decode(self, wire: Bytes, out: Floats) -> None:
        """Decode `wire` to `out`, f32[n]. Raise ElasticError for a wrong length."""
        self._decode(self._checked(wire, out), out, 1.0, False)

    def decode_add(self, wire: Bytes, acc: Floats, scale: float = 1.0) -> None:
        """Add `scale` times the decoded values to `acc`, f32[n]."""
        self._decode(self._checked(wire, acc), acc, scale, True)

    def _decode(self, wire: Bytes, out: Floats, scale: float, adds: bool) -> None:
        if self._native:
            _, decode = self._native
            self._run(out.size, lambda a, b: decode(wire, out.size, out, scale, adds, a, b))
        elif out.size:
            self._decode_plain(wire, out, scale, adds)

    def _decode_plain(self, wire: Bytes, out: Floats, scale: float, adds: bool) -> None:
        values = self._values(wire, out.size)
        if not adds:
            out[:] = values
            return
        if scale != 1.0:
            values = values * np.float32(scale)
        out += values

    def _checked(self, wire: Bytes, out: Floats) -> Bytes:
        _floats(out, "the result")
        if len(wire) != (needed := self.wire_bytes(out.size)):
            raise ElasticError(
                f"codec {self.kind}: {len(wire)} bytes arrived for {out.size} values, which take "
                f"{needed}; set the same trainer.elastic at every site"
            )
        return np.frombuffer(wire, np.uint8)

    def _run(self, n: int, call):  # type: ignore[no-untyped-def]
        blocks = -(-n // self.block)
        parts = max(1, min(self._num_threads, n // THREAD_VALUES))
        if parts == 1:
            return [call(0, blocks)]
        ends = [blocks * part // parts for part in range(parts + 1)]
        return list(_threads().map(call, ends[:-1], ends[1:]))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="codec")


def _refusal(x: Floats, refused: int) -> ElasticError:
    return ElasticError(
        f"delta: value {refused} of {x.size} is {x[refused]:g}; values must be finite and at most "
        "2^100; lower the inner learning rate, or resume from a checkpoint"
    )


def _floats(x: Floats, name: str) -> Floats:
    if x.dtype != np.float32 or x.ndim != 1 or not x.flags.c_contiguous:
        raise TypeError(f"{name}: {x.dtype} {x.shape}; codecs take contiguous float32 vectors")
    return x


def blocks_of(x: Floats, block: int) -> Floats:
    rows = -(-x.size // block)
    if rows * block == x.size:
        return x.reshape(rows, block)
    padded = np.zeros(rows * block, np.float32)
    padded[: x.size] = x
    return padded.reshape(rows, block)


def scales_of(rows: Floats, steps: int) -> tuple[Floats, Floats]:
    """Return each row's scale, max |x| / `steps`, and 1 / scale, or 0 if max |x| < SMALLEST."""
    absmax = np.abs(rows).max(axis=1)
    absmax[absmax < SMALLEST] = 0
    some = np.where(absmax > 0, absmax, np.float32(1))
    inverse = np.where(absmax > 0, np.float32(steps) / some, np.float32(0))
    return absmax / np.float32(steps), inverse
