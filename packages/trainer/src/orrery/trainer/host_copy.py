"""A copy in host memory of what a rank holds: what training waits for at a checkpoint, and what a thread writes to disk after that.

- One buffer, laid out as the data of the safetensors file that it becomes; it stays for the next checkpoint.
- Beside CUDA the buffer is pinned (`host_memory`), so that a copy runs at the speed of the link. Pinning takes seconds for tens of
  gigabytes: `reserve` does it ahead, in a thread of its own.
"""

import hashlib
import logging
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from orrery.manifest.errors import RunFailed
from orrery.trainer import cgroup
from orrery.trainer.heartbeat import mark_part
from orrery.trainer.host_memory import host_block
from orrery.trainer.parallel.world import World
from orrery.trainer.safetensors_file import FileLayout, content, layout

REMEDY = "shard over more nodes, raise the job's limit if it has one, or free some (as trainer.memory.optimizer_offload)"

log = logging.getLogger(__name__)


class HostCopy:
    """The buffer of one rank on `device`."""

    def __init__(self, device: torch.device):
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._layout: FileLayout | None = None

    def check_room(self, num_bytes: int, world: World) -> None:
        """Raises RunFailed where the ranks of this host together ask for more than it has. A collective; nothing is taken yet.

        What is there is asked before anybody knows of the others, so before anybody begins to take.
        """
        hosts, room, asked = (
            world.each(host_number()),
            world.each(available_bytes()),
            world.each(num_bytes - self._buffer.numel()),
        )
        here = [rank for rank, host in enumerate(hosts) if host == hosts[world.rank]]
        together, available = (
            sum(max(0, asked[rank]) for rank in here),
            min(room[rank] for rank in here),
        )
        if together > available:
            whose = (
                "this rank's copy"
                if len(here) == 1
                else f"the copies of the {len(here)} ranks on this host"
            )
            raise RunFailed(
                f"trainer.checkpoint: weights and optimizer state in {whose} take {together / 1e9:.1f} GB of host memory, "
                f"of which {available / 1e9:.1f} GB are left to this job; {REMEDY}"
            )

    def has_room(self, num_bytes: int) -> bool:
        return self._buffer.numel() >= num_bytes

    def reserve(self, num_bytes: int) -> None:
        """Make room. Raises RunFailed where there is none."""
        if self.has_room(num_bytes):
            return
        self._buffer = torch.empty(0, dtype=torch.uint8)
        available = available_bytes()
        if (
            num_bytes > available
        ):  # asked first: a host that runs out of memory kills, and says nothing
            raise RunFailed(
                f"trainer.checkpoint: this rank's copy of weights and optimizer state takes {num_bytes / 1e9:.1f} GB of host memory, "
                f"of which {available / 1e9:.1f} GB are left to this job; {REMEDY}"
            )
        self._buffer, error = host_block(num_bytes, self._device)
        if error:
            log.warning(
                "%.1f GB of host memory cannot be pinned (CUDA error %d); checkpoints block longer",
                num_bytes / 1e9,
                error,
            )

    def fill(self, pieces: Mapping[str, torch.Tensor]) -> None:
        """Copy `pieces`; when this returns they may change."""
        self._layout = layout({name: (piece.dtype, piece.shape) for name, piece in pieces.items()})
        self.reserve(self._layout.num_bytes)
        for name, (start, stop) in self._layout.spans.items():
            piece = pieces[name].detach()
            self._buffer[start:stop].view(piece.dtype).view(piece.shape).copy_(
                piece, non_blocking=True
            )
            mark_part()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def buffers(self) -> list[bytes | memoryview]:
        """The safetensors file of what was copied last."""
        assert self._layout is not None, "nothing was copied"
        return [self._layout.header, content(self._buffer[: self._layout.num_bytes])]


def host_number() -> int:
    """The same for processes of one host, since its boot."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = platform.node()
    return int.from_bytes(hashlib.sha256(boot.encode()).digest()[:7], "big")


def available_bytes(root: Path = cgroup.ROOT) -> int:
    """Host memory that this process can have without swapping: what the kernel has, and what its control groups leave (`cgroup.py`)."""
    found = [cgroup.left_bytes(root)]
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    return min(found)
