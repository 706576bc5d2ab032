"""Define the interface of codecs, which encode float32 values as bytes.

- Blocks of `block` values are encoded independently.
- Lossy codecs decode a block to zeros if all magnitudes are below 2^-100.
- Equal values give equal bytes on every host, with or without native code, because each float32
  operation rounds once and sums use integers.
- Native code runs if `g++` can build it, otherwise numpy. Hosts may share `~/.cache/orrery`, so the
  library's name has a hash of the processor's features.
"""

import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from orrery.elastic.types import ElasticError

log = logging.getLogger(__name__)

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

SMALLEST = np.float32(2.0**-100)
LARGEST = np.float32(2.0**100)
# Sums add integers, in units of a block's max |x| / UNITS.
UNITS = np.float32(2.0**20)
THREAD_VALUES = 1 << 18  # minimum values per thread
SOURCE = Path(__file__).with_name("native.cpp")
# `-ffp-contract=off` avoids fused multiply-adds, which round once where numpy rounds twice.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"),
    *("-ffp-contract=off", "-shared", "-fPIC"),
)
BUILD_S = 120.0


class Library:
    """Native functions. Their last two arguments select blocks [first, last)."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def encoder(self, kind: str) -> Callable[..., int]:
        """Return an encoding function. It returns an invalid value's index, or −1."""
        call = self._library[f"{kind}_encode"]
        call.argtypes = (_READ, ctypes.c_int64, _WIRE, ctypes.c_int64, ctypes.c_int64)
        call.restype = ctypes.c_int64
        return call  # type: ignore[no-any-return]

    def sum_encoder(self, kind: str) -> Callable[..., int]:
        call = self._library[f"{kind}_encode_sum"]
        added = (ctypes.c_float, ctypes.c_void_p)
        call.argtypes = (_READ, ctypes.c_int64, *added, _WIRE, ctypes.c_int64, ctypes.c_int64)
        call.restype = ctypes.c_int64
        return call  # type: ignore[no-any-return]

    def decoder(self, kind: str) -> Callable[..., None]:
        call = self._library[f"{kind}_decode"]
        out = (_FLOATS, ctypes.c_float, ctypes.c_int32)
        call.argtypes = (_WIRE, ctypes.c_int64, *out, ctypes.c_int64, ctypes.c_int64)
        call.restype = None
        return call  # type: ignore[no-any-return]


_READ = np.ctypeslib.ndpointer(np.float32, ndim=1, flags=("C",))
_FLOATS = np.ctypeslib.ndpointer(np.float32, ndim=1, flags=("C", "W"))
_WIRE = np.ctypeslib.ndpointer(np.uint8, ndim=1, flags=("C",))


@cache
def library() -> Library | None:
    try:
        return Library(_built(_cache_folder()))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        log.warning(
            "codecs: no native code (%s); numpy runs instead, slower and with equal bits. "
            "Install g++ for native code",
            said.strip().splitlines()[0] if said.strip() else type(error).__name__,
        )
        return None


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "orrery"


def _built(folder: Path) -> Path:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    path = folder / f"codecs-{_key()}.so"
    if path.exists():
        return path
    if compiler is None:
        raise OSError("g++ is missing")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / "codecs.so"
        subprocess.run(
            [compiler, *FLAGS, str(SOURCE), "-o", str(made)],
            check=True,
            capture_output=True,
            text=True,
            timeout=BUILD_S,
        )
        made.replace(path)
    return path


def _key() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"(?m)^flags.*$", cpuinfo.read_text()) if cpuinfo.exists() else None
    processor = found[0] if found else platform.processor()
    parts = (SOURCE.read_text(), *FLAGS, platform.machine(), processor)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


class Codec(ABC):
    kind: ClassVar[str]
    block: ClassVar[int]

    def __init__(self, num_threads: int = 1, native: Library | bool | None = True) -> None:
        """`native`: a library, True to build one, False or None for numpy."""
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
        """Encode x, f32[n]. Return the bytes, in `out` if given.

        Raise ElasticError for NaN and magnitudes over 2^100.
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
        """Encode `share` · x + decoded `added` into `out`. Return `out`.

        x may contain NaN if `share` is 0.
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
    """Return each row's scale max |x| / `steps` and its inverse (both 0 if max |x| < SMALLEST)."""
    absmax = np.abs(rows).max(axis=1)
    absmax[absmax < SMALLEST] = 0
    some = np.where(absmax > 0, absmax, np.float32(1))
    inverse = np.where(absmax > 0, np.float32(steps) / some, np.float32(0))
    return absmax / np.float32(steps), inverse
