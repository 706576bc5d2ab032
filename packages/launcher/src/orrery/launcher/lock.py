"""One launcher a run: an flock on `<run_dir>/.lock`, which the kernel frees however the launcher ends.

The file says who holds it (pid and the pid's start time, so that a reused pid is never taken for the launcher).
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from orrery.manifest.errors import OrreryError

LOOKED_AT_S = 1.0  # whoever asks for the holder locks for a moment too


def _path(run_dir: Path) -> Path:
    return run_dir / ".lock"


@contextmanager
def hold(run_dir: Path) -> Iterator[None]:
    """Hold the run while the body runs; raises `OrreryError` when another launcher does."""
    run_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(_path(run_dir), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        limit_s = time.monotonic() + LOOKED_AT_S
        while not _locked(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > limit_s:
                pid = holder(run_dir)
                who = f" (pid {pid})" if pid else ""
                raise OrreryError(
                    f"{run_dir}: another launcher runs this run{who}; type `orrery status {run_dir.name}` to watch it "
                    f"or `orrery stop {run_dir.name}` to end it"
                )
            time.sleep(0.02)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {psutil.Process().create_time()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holder(run_dir: Path) -> int | None:
    """The pid of the launcher that holds the run now; None when nobody does, or it has not said who it is yet."""
    try:
        descriptor = os.open(_path(run_dir), os.O_RDONLY)
    except (FileNotFoundError, PermissionError):
        return None
    try:
        if _locked(descriptor, fcntl.LOCK_SH):
            return None
        words = os.pread(descriptor, 200, 0).decode().split()
    finally:
        os.close(descriptor)
    try:
        pid, created_s = int(words[0]), float(words[1])
        return pid if psutil.Process(pid).create_time() == created_s else None
    except (IndexError, ValueError, psutil.NoSuchProcess):
        return None
