"""Build the codecs' native code with `g++` into `~/.cache/orrery`, and load it.

Hosts may share the cache, so the file name has a hash of the processor's features.
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
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("native.cpp")
# Without `-ffp-contract=off`, a fused multiply-add rounds once where numpy rounds twice.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"),
    *("-ffp-contract=off", "-shared", "-fPIC"),
)
BUILD_S = 120.0


class Library:
    """The codecs' native functions. Their last two arguments select blocks [first, last)."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def encoder(self, kind: str) -> Callable[..., int]:
        """Return a function that encodes. It returns the index of an invalid value or -1."""
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
