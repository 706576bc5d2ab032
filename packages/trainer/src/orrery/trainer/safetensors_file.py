"""Safetensors files written piece by piece, from buffers of any size, and hashed on the way.

- A file is 8 bytes of header length (little endian), a JSON header, then the tensors' bytes without gaps
  (https://huggingface.co/docs/safetensors). Tensors stand by falling alignment and then by name, as `safetensors.torch.save_file` has
  them: the same tensors make the same bytes here and there.
- Why not `save_file`: it wants every tensor of a file in memory at once, and copies each; its caller reads the file again to hash it.
- Big files are synced as they grow, so that what is not on disk yet never fills the memory of a host.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch

CHUNK_BYTES = 32 << 20
SYNC_BYTES = 1 << 30
# Rising, as safetensors sorts them.
_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
_RANK = {dtype: rank for rank, dtype in enumerate(_NAMES)}


class Stopped(Exception):
    """The writer was told to stop."""


@dataclass(frozen=True)
class FileLayout:
    """Where the tensors of one file stand: `spans` are [start, stop) in the data behind `header`, in the file's order."""

    header: bytes
    spans: dict[str, tuple[int, int]]

    @property
    def num_bytes(self) -> int:
        """Of the data, without the header."""
        return max((stop for _, stop in self.spans.values()), default=0)


def layout(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> FileLayout:
    """The file of `tensors` = {name: (dtype, shape)}."""
    header, spans, start = {}, {}, 0
    for name in sorted(tensors, key=lambda name: (-_RANK[tensors[name][0]], name)):
        dtype, shape = tensors[name]
        stop = start + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        spans[name], start = (start, stop), stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return FileLayout(len(text).to_bytes(8, "little") + text, spans)


def content(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, without a copy."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu", (
        "the caller copies what is strided, or on a device"
    )
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def write(
    path: Path, buffers: Iterable[bytes | memoryview], stopped: Callable[[], bool] = lambda: False
) -> tuple[int, str]:
    """Write `buffers` one after the other, synced when this returns: (bytes, sha256). Raises Stopped between chunks, and OSError; what was
    written until then is removed."""
    digest, num_bytes, unsynced = sha256(), 0, 0
    # Writing and hashing both let other threads run, so they run side by side, and beside whatever else this process does.
    with (
        ThreadPoolExecutor(1, thread_name_prefix="sha256") as hashing,
        path.open("wb", buffering=0) as file,
        _whole_or_gone(path),
    ):
        for chunk in _chunks(buffers):
            if stopped():
                raise Stopped(path)
            hashed = hashing.submit(digest.update, chunk)
            try:
                _write_all(file.fileno(), chunk)
            finally:
                hashed.result()
            num_bytes, unsynced = num_bytes + len(chunk), unsynced + len(chunk)
            if unsynced >= SYNC_BYTES:
                os.fdatasync(file.fileno())
                unsynced = 0
        os.fsync(file.fileno())
    return num_bytes, digest.hexdigest()


@contextmanager
def _whole_or_gone(path: Path) -> Iterator[None]:
    """A failure removes the open file `path`, so that a disk that it filled has room again for what a run says as it ends. Errors of the
    system carry its name: those of an open file do not by themselves."""
    try:
        yield
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = error.filename or str(path)
        raise


def _chunks(buffers: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    for buffer in buffers:
        view = memoryview(buffer)
        for start in range(0, len(view), CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]


def _write_all(file: int, chunk: memoryview) -> None:
    while len(chunk):
        chunk = chunk[os.write(file, chunk) :]
