"""Copy a rank's part of a checkpoint into host memory, then write and hash it in chunks.

- The file equals that of `safetensors.torch.save_file`: 8 bytes of header length (little endian), a
  JSON header, the tensors' bytes without gaps.
- Big files are synced as they grow, because unwritten pages could fill memory.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch

from orrery.manifest.errors import RunFailed
from orrery.trainer.heartbeat import mark_part
from orrery.trainer.host_memory import available_bytes, host_block, host_number
from orrery.trainer.parallel.world import World

CHUNK_BYTES = 32 << 20
SYNC_BYTES = 1 << 30
REMEDY = (
    "shard over more nodes, raise the job's limit if it has one, "
    "or free some (as trainer.memory.optimizer_offload)"
)
# In the order of safetensors: by rising alignment.
_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int32: "I32", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64",
}  # fmt: skip
_RANK = {dtype: rank for rank, dtype in enumerate(_NAMES)}

log = logging.getLogger(__name__)


class Stopped(Exception):
    pass


@dataclass(frozen=True)
class FileLayout:
    header: bytes
    spans: dict[str, tuple[int, int]]

    @property
    def num_bytes(self) -> int:
        return max((stop for _, stop in self.spans.values()), default=0)


def layout(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> FileLayout:
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
    assert tensor.is_contiguous() and tensor.device.type == "cpu", "copy it to the CPU first"
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


class HostCopy:
    def __init__(self, device: torch.device):
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._layout: FileLayout | None = None

    def check_room(self, num_bytes: int, world: World) -> None:
        """Raise RunFailed if this host's ranks need more memory than it has. A collective.

        All ranks read free memory before any rank allocates.
        """
        hosts = world.all_gather(host_number())
        available = world.all_gather(available_bytes())
        needed = world.all_gather(num_bytes - self._buffer.numel())
        here = [rank for rank, host in enumerate(hosts) if host == hosts[world.rank]]
        whose = "this rank's copy"
        if len(here) > 1:
            whose = f"the copies of the {len(here)} ranks on this host"
        _check_fits(
            f"weights and optimizer state in {whose} take",
            sum(max(0, needed[rank]) for rank in here),
            min(available[rank] for rank in here),
        )

    def has_room(self, num_bytes: int) -> bool:
        return self._buffer.numel() >= num_bytes

    def reserve(self, num_bytes: int) -> None:
        """Grow the buffer to `num_bytes`. Raise RunFailed if memory does not suffice."""
        if self.has_room(num_bytes):
            return
        self._buffer = torch.empty(0, dtype=torch.uint8)
        whose = "this rank's copy of weights and optimizer state takes"
        _check_fits(whose, num_bytes, available_bytes())
        self._buffer, error = host_block(num_bytes, self._device)
        if error:
            log.warning(
                "%.1f GB of host memory cannot be pinned (CUDA error %d); checkpoints block longer",
                num_bytes / 1e9,
                error,
            )

    def fill(self, pieces: Mapping[str, torch.Tensor]) -> None:
        self._layout = layout({name: (piece.dtype, piece.shape) for name, piece in pieces.items()})
        self.reserve(self._layout.num_bytes)
        for name, (start, stop) in self._layout.spans.items():
            piece = pieces[name].detach()
            target = self._buffer[start:stop].view(piece.dtype).view(piece.shape)
            target.copy_(piece, non_blocking=True)
            mark_part()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def buffers(self) -> list[bytes | memoryview]:
        assert self._layout is not None, "nothing was copied"
        return [self._layout.header, content(self._buffer[: self._layout.num_bytes])]


def _check_fits(subject: str, num_bytes: int, available: int) -> None:
    if num_bytes > available:
        raise RunFailed(
            f"trainer.checkpoint: {subject} {num_bytes / 1e9:.1f} GB of host memory, "
            f"of which {available / 1e9:.1f} GB are left to this job; {REMEDY}"
        )


def write(
    path: Path, buffers: Iterable[bytes | memoryview], stopped: Callable[[], bool] = lambda: False
) -> tuple[int, str]:
    """Write and sync `buffers`. Return (bytes, sha256). Remove the file on failure.

    Raise OSError, or Stopped between two chunks.
    """
    digest, num_bytes, unsynced = sha256(), 0, 0
    # Writing and hashing release the GIL, so both run in parallel.
    with (
        ThreadPoolExecutor(1, thread_name_prefix="sha256") as hashing,
        path.open("wb", buffering=0) as file,
        _removed_on_failure(path),
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
def _removed_on_failure(path: Path) -> Iterator[None]:
    """On failure remove `path`, which frees space for logs, and name it in an OSError."""
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
