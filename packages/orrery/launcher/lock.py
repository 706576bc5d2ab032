"""One launcher per run: an flock on `<run_dir>/.lock`. The kernel frees it with the launcher.

The file holds host, pid and start time, to detect a reused pid.
"""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from orrery.manifest.errors import OrreryError
from orrery.runtime.run_directory import LOCK

LOOKED_AT_S = 1.0  # `holder` takes the lock briefly too


def _path(run_dir: Path) -> Path:
    return run_dir / LOCK


@dataclass(frozen=True)
class Holder:
    host: str
    pid: int

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    def __str__(self) -> str:
        return f"pid {self.pid}" + ("" if self.is_here else f" on {self.host}")


@contextmanager
def hold(run_dir: Path, within_s: float = LOOKED_AT_S) -> Iterator[None]:
    """Hold the run's lock. Raise OrreryError if it is not free after `within_s`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(_path(run_dir), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        limit_s = time.monotonic() + within_s
        while not _locked(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > limit_s:
                who = f" ({found})" if (found := holder(run_dir)) else ""
                raise OrreryError(
                    f"{run_dir}: another launcher runs this run{who}; type "
                    f"`orrery status {run_dir.name}` to watch it or `orrery stop {run_dir.name}` "
                    "to end it"
                )
            time.sleep(0.02)
        text = f"{socket.gethostname()} {os.getpid()} {_started(os.getpid())}\n"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holder(run_dir: Path) -> Holder | None:
    """Return the run's launcher, None if the lock is free or just taken."""
    try:
        descriptor = os.open(_path(run_dir), os.O_RDONLY | os.O_NONBLOCK)
    except (FileNotFoundError, PermissionError):
        return None
    try:
        if _locked(descriptor, fcntl.LOCK_SH):
            return None
        words = os.pread(descriptor, 400, 0).decode(errors="replace").split()
    finally:
        os.close(descriptor)
    try:
        found, started = Holder(words[0], int(words[1])), int(words[2])
        return found if not found.is_here or _started(found.pid) == started else None
    except (IndexError, ValueError, OSError):
        return None


def _started(pid: int) -> int:
    """Return the start time in ticks since boot, unlike psutil's wall clock."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
