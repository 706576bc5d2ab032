"""Copies of a trainer that has ended, and a saver that dies, without torch."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from orrery.runtime.run_directory import SHARED_MEMORY, saves_prefix
from orrery.trainer import saver, uploader
from orrery.wire import checkpoints


def content(step: int, rank: int = 0) -> bytes:
    return bytes([step, rank]) * 5000


def copied(run_dir: Path, step: int, rank: int = 0, size: int = 1, keep: int = 2) -> Path:
    """Return the shared memory of a trainer that has copied `step` and not yet offered it."""
    memory = SHARED_MEMORY / f"{saves_prefix(run_dir)}{rank}"
    memory.mkdir(exist_ok=True)
    (memory / saver.COPY).write_bytes(content(step, rank) + b"unused")
    saver.partial_of(folder(run_dir, step) / "trainer").mkdir(parents=True, exist_ok=True)
    return memory


def offered(run_dir: Path, step: int, rank: int = 0, size: int = 1, keep: int = 2) -> Path:
    memory = copied(run_dir, step, rank)
    completion = saver.Completion(str(run_dir), "rl", 1, keep) if rank == 0 else None
    to = str(folder(run_dir, step) / "trainer")
    files, num_bytes = {"state.json": b"{}"}, len(content(step, rank))
    job = saver.SaveJob(to, rank, size, num_bytes, b"{}", files, completion)
    saver.Saver(memory).offer(job)
    return memory


def folder(run_dir: Path, step: int) -> Path:
    return checkpoints.checkpoint_dir(run_dir, step, 1)


def die_before(number: int, work: Callable[..., object], *args: object) -> None:
    """Work, and die before change `number` of the file system."""
    changes = 0

    def count(event: str, args: tuple) -> None:
        nonlocal changes
        is_write = event == "open" and args[1] and args[1] != "r"
        if is_write or event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir"):
            changes += 1
            if changes == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    work(*args)


def upload_to(url: str, run_dir: Path) -> None:
    uploader.upload(uploader.target_of(url, run_dir, "rl"), run_dir, "rl", keep=1)
