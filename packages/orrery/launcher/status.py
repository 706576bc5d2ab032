"""Read and write a run's `status.json`, and hold the run's lock (flock).

If the status is `running` but the lock is free, the launcher was killed.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from orrery.launcher.slurm import queue
from orrery.manifest.errors import OrreryError
from orrery.manifest.json_file import read_as
from orrery.manifest.publish import write_atomic
from orrery.runtime.run_directory import LOCK, STATUS, whole_checkpoints

State = Literal["running", "stopping", "done", "failed", "stopped"]
LOOKED_AT_S = 1.0  # maximum wait for the lock, which `lock_holder` takes briefly


@dataclass
class RoleStatus:
    """A process's state. `pid` is 0 under Slurm. `exit` is None while the process runs."""

    name: str
    node: str
    pid: int
    port: int
    cores: list[int] | None
    state: Literal["running", "ended"]
    exit: str | None = None
    restarts: int = 0


@dataclass
class Status:
    stage: str
    attempt: int
    state: State
    message: str
    launcher_pid: int
    host: str
    slurm_job: str | None
    started_s: float
    ended_s: float | None = None
    roles: list[RoleStatus] = field(default_factory=list)

    def write(self, run_dir: Path) -> None:
        write_atomic(run_dir / STATUS, (json.dumps(asdict(self), indent=1) + "\n").encode())


def read(run_dir: Path) -> Status | None:
    path = run_dir / STATUS
    if not os.path.lexists(path):
        return None
    return read_as(path, Status, "it is not a launcher's status; remove it and start the run again")


def launcher_died(run_dir: Path, status: Status) -> bool:
    if status.state not in ("running", "stopping"):
        return False
    if status.slurm_job is None or status.host == socket.gethostname():
        return lock_holder(run_dir) is None
    try:
        state = queue.slurm_states([status.slurm_job]).get(status.slurm_job)
        return state is None or queue.state_of(state, status.slurm_job) not in ("running", "ending")
    except OrreryError:
        return False  # Slurm does not answer, so the launcher may still run


def newest_checkpoint(run_dir: Path, stage: str = "rl") -> int | None:
    if stage not in ("sft", "rl"):
        return None
    return max((one.step for one in whole_checkpoints(run_dir, stage)), default=None)


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
def hold_lock(run_dir: Path, within_s: float = LOOKED_AT_S) -> Iterator[None]:
    run_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(_path(run_dir), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        limit_s = time.monotonic() + within_s
        while not _locked(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > limit_s:
                who = f" ({found})" if (found := lock_holder(run_dir)) else ""
                raise OrreryError(
                    f"{run_dir}: another launcher is running this run{who}. Type "
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


def lock_holder(run_dir: Path) -> Holder | None:
    """Return the lock's holder, or None if the lock is free or names no live launcher."""
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
    """Return the process's start time in clock ticks since boot."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
