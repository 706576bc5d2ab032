"""Copy a rank's part of a checkpoint into shared memory.

The bytes equal those that `safetensors.torch.save_file` writes.
"""

import errno
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage, rmtree

import torch

from orrery.manifest.errors import RunFailed
from orrery.runtime.run_directory import ENLARGE, SHARED_MEMORY
from orrery.trainer.heartbeat import mark_part
from orrery.trainer.host_memory import available_bytes, host_block, host_number
from orrery.trainer.parallel.world import World

REMEDY = (
    "shard over more nodes, raise the job's limit if it has one, "
    "or turn off an option that uses it (such as trainer.memory.optimizer_offload)"
)
# The safetensors library writes tensors in the reverse of this dtype order.
_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int32: "I32", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64",
}  # fmt: skip
_RANK = {dtype: rank for rank, dtype in enumerate(_NAMES)}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileLayout:
    header: bytes
    spans: dict[str, tuple[int, int]]

    @property
    def file_bytes(self) -> int:
        return len(self.header) + max((stop for _, stop in self.spans.values()), default=0)


def layout(tensors: Mapping[str, torch.Tensor]) -> FileLayout:
    header, spans, start = {}, {}, 0
    for name in sorted(tensors, key=lambda name: (-_RANK[tensors[name].dtype], name)):
        dtype, shape = _NAMES[tensors[name].dtype], list(tensors[name].shape)
        stop = start + tensors[name].nbytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
        spans[name], start = (start, stop), stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return FileLayout(len(text).to_bytes(8, "little") + text, spans)


class SharedCopy:
    """A copy of tensors in shared memory. If it does not fit, `path` links to a memfd file."""

    def __init__(self, path: Path, device: torch.device):
        self._path, self._device = path, device
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._fits, self._nameless = True, -1

    def check_room(self, num_bytes: int, world: World, spared: int = 0) -> None:
        """Raise RunFailed if this host lacks memory for its ranks' copies. A collective.

        `spared`: bytes of shared memory to leave free.
        """
        hosts = world.all_gather(host_number())
        available = world.all_gather(available_bytes())
        shared = world.all_gather(disk_usage(SHARED_MEMORY).free)
        spared = max(world.all_gather(spared))
        needed = world.all_gather(num_bytes - self._buffer.numel())
        here = [rank for rank, host in enumerate(hosts) if host == hosts[world.rank]]
        whose = "this rank's copy"
        if len(here) > 1:
            whose = f"the copies of the {len(here)} ranks on this host"
        total, free = sum(max(0, needed[rank]) for rank in here), min(shared[one] for one in here)
        what = f"weights and optimizer state in {whose} take"
        _check_fits(what, total, min(available[rank] for rank in here))
        self._fits = total <= free - spared
        if not self._fits and here[0] == world.rank:
            log.warning(
                "%.1f GB for checkpoints do not fit in %s (%.1f GB free), so the next start cannot "
                "save a copy whose trainer and saver were killed; %s",
                *(total / 1e9, SHARED_MEMORY, free / 1e9, ENLARGE),
            )

    def has_room(self, num_bytes: int) -> bool:
        return self._buffer.numel() >= num_bytes

    def reserve(self, num_bytes: int) -> None:
        """Grow the buffer to `num_bytes`. Raise RunFailed if memory is short."""
        if self.has_room(num_bytes):
            return
        if not self._buffer.numel():
            rmtree(self._path.parent, ignore_errors=True)
            self._path.parent.mkdir(mode=0o700)
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._path.unlink(missing_ok=True)
        whose = "this rank's copy of weights and optimizer state takes"
        _check_fits(whose, num_bytes, available_bytes())
        error = self._allocate(num_bytes)
        if error:
            log.warning(
                "%.1f GB of host memory cannot be pinned (CUDA error %d); checkpoints block longer",
                num_bytes / 1e9,
                error,
            )

    def _allocate(self, num_bytes: int) -> int:
        if self._fits and num_bytes <= disk_usage(SHARED_MEMORY).free:
            try:
                with self._path.open("xb+") as file:
                    self._buffer, error = host_block(num_bytes, self._device, file.fileno())
                return error
            except OSError as full:  # another process took the space
                if full.errno != errno.ENOSPC:
                    raise
                self._path.unlink()
        if self._nameless < 0:  # kept open for restarted savers
            self._nameless = os.memfd_create("orrery.saves")
        self._path.symlink_to(f"/proc/self/fd/{self._nameless}")
        self._buffer, error = host_block(num_bytes, self._device, self._nameless)
        return error

    def fill(self, pieces: Mapping[str, torch.Tensor]) -> int:
        """Copy `pieces` into the buffer. Return the file's size in bytes."""
        found = layout(pieces)
        self.reserve(found.file_bytes)
        header = torch.frombuffer(bytearray(found.header), dtype=torch.uint8)
        self._buffer[: len(header)] = header
        data = self._buffer[len(header) :]
        for name, (start, stop) in found.spans.items():
            piece = pieces[name].detach()
            target = data[start:stop].view(piece.dtype).view(piece.shape)
            target.copy_(piece, non_blocking=True)
            mark_part()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return found.file_bytes


def _check_fits(subject: str, num_bytes: int, available: int) -> None:
    if num_bytes > available:
        raise RunFailed(
            f"trainer.checkpoint: {subject} {num_bytes / 1e9:.1f} GB of host memory, "
            f"of which {available / 1e9:.1f} GB are left to this job; {REMEDY}"
        )
