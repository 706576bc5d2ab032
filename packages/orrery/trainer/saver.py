"""Save a rank's checkpoint from shared memory to disk, in a process that outlives the trainer.

    python -m orrery.trainer.saver serve MEMORY     save after each line of input
    python -m orrery.trainer.saver finish MEMORY…   save for ended trainers

- The folder MEMORY has `copy` (the checkpoint), and `job.json` until `copy` is on disk.
- Saving is idempotent, so a killed saver may be restarted.
- After the trainer's end, the saver saves `copy` and removes MEMORY.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import sha256
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import IO, Any

import msgspec

from orrery.manifest.errors import OrreryError, RunFailed, explain_os_error
from orrery.manifest.publish import publish_folder, write_atomic
from orrery.runtime.process_control import START, die_with_parent
from orrery.runtime.run_directory import CHECKPOINT_TARGET
from orrery.runtime.timing import scaled
from orrery.wire import checkpoints, nfs

COPY, JOB, LOCK = "copy", "job.json", ".lock"
CHUNK_BYTES = 32 << 20
SYNC_BYTES = 1 << 30  # bytes written between syncs, to limit dirty pages
WRITE_DEADLINE_S = 1800.0
ORPHAN_S = 20.0  # time limit without data from other ranks, once the trainer has ended
MAX_STARTS = 3
POLL_S = 0.1


class Completion(msgspec.Struct, frozen=True):
    """Rank 0's task: mark the checkpoint complete. `beside`: role whose part must exist first."""

    run_dir: str
    stage: str
    attempt: int
    keep: int
    beside: str | None = None


class SaveJob(msgspec.Struct, frozen=True):
    folder: str
    rank: int
    world_size: int
    num_bytes: int
    index: bytes
    files: dict[str, bytes]
    completion: Completion | None = None


def checksum_file(rank: int) -> str:
    return f"rank_{rank}.sha256.json"


def partial_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.partial")


def save(memory: Path, has_trainer: Callable[[], bool] = lambda: True) -> None:
    """Save the copy if `job.json` exists. Raise RunFailed or OSError on failure."""
    if not (memory / JOB).exists():
        return
    job = msgspec.json.decode((memory / JOB).read_bytes(), type=SaveJob)
    folder = Path(job.folder)
    partial = partial_of(folder)
    if is_new := _is_listed(partial):
        try:
            _save_rank(job, memory / COPY, partial)
        except FileNotFoundError:
            # An earlier saver wrote the files, and rank 0 has since renamed `partial`.
            if job.rank == 0 or not _is_listed(folder):
                raise
        if job.rank == 0:
            for name, content in job.files.items():
                (partial / name).write_bytes(content)
            _await_checksums(partial, job.world_size, has_trainer)
            publish_folder(partial, folder)
    elif not _is_listed(folder):
        raise RunFailed(f"{folder}: was removed before it was saved")
    if job.completion is not None:
        _complete(job, job.completion, folder.parent, is_new)
    (memory / JOB).unlink()


def _save_rank(job: SaveJob, copy: Path, partial: Path) -> None:
    if (partial / (note := checksum_file(job.rank))).exists():
        return  # an earlier saver wrote the files
    tensors, index = (partial / f"rank_{job.rank}.{suffix}" for suffix in ("safetensors", "json"))
    with copy.open("rb") as file:
        mapped = mmap(file.fileno(), job.num_bytes, access=ACCESS_READ)
    written = {tensors.name: write(tensors, [memoryview(mapped)])}
    written[index.name] = write(index, [job.index])
    checkpoints.write_note(partial / note, written)


def _await_checksums(partial: Path, world_size: int, has_trainer: Callable[[], bool]) -> None:
    begin_s, size, grown_s = time.monotonic(), -1, time.monotonic()
    while True:
        found = set(os.listdir(partial))  # list the folder, because NFS caches a file's absence
        missing = [rank for rank in range(world_size) if checksum_file(rank) not in found]
        if not missing:
            return
        now = 0
        for name in found:
            with suppress(OSError):  # another rank may have renamed the file
                now += (partial / name).stat().st_size
        if now != size:
            size, grown_s = now, time.monotonic()
        limit_s, since_s = scaled(WRITE_DEADLINE_S), begin_s
        if not has_trainer():
            limit_s, since_s = scaled(ORPHAN_S), grown_s
        if time.monotonic() - since_s >= limit_s:
            raise RunFailed(
                f"{partial}: has no files of rank {missing[0]} after {limit_s:g} s; "
                f"see logs/trainer.{missing[0]}.log"
            )
        time.sleep(POLL_S)


def _complete(job: SaveJob, completion: Completion, folder: Path, is_new: bool) -> None:
    beside, run_dir = completion.beside, Path(completion.run_dir)
    if beside is not None and not nfs.appears(folder / beside):
        raise RunFailed(
            f"{folder}: the {beside} did not write its part of the checkpoint; read "
            f"logs/{beside}.0.log"
        )
    if is_new or not _is_listed(folder / checkpoints.MARKER):
        ranks = range(job.world_size)
        checkpoints.complete(folder, [f"{Path(job.folder).name}/{checksum_file(r)}" for r in ranks])
    checkpoints.prune(run_dir, completion.keep, completion.attempt, completion.stage)


def _is_listed(path: Path) -> bool:
    return nfs.appears(path, 0.0)


def write(path: Path, buffers: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write and sync a file. Return (bytes written, sha256). Remove the file on failure."""
    digest, num_bytes, unsynced = sha256(), 0, 0
    with (
        ThreadPoolExecutor(1, thread_name_prefix="sha256") as hashing,
        path.open("wb", buffering=0) as file,
        _removed_on_failure(path),
    ):
        for chunk in _chunks(buffers):
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


class Saver:
    def __init__(self, memory: Path) -> None:
        self._memory, self._is_closed = memory, False
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()  # `save` and `close` run in different threads

    def offer(self, job: SaveJob) -> None:
        """Write `job.json`, so that the copy is saved even if the trainer ends."""
        write_atomic(self._memory / JOB, msgspec.json.encode(job))

    def save(self) -> None:
        """Wait until the copy is on disk. Raise RunFailed on failure."""
        for _ in range(MAX_STARTS):
            with self._starting:
                if self._is_closed:
                    return
                if self._process is None:
                    self._process = _start(self._memory)
                process = self._process
            if answer := _ask(process):
                if error := msgspec.json.decode(answer, type=str):
                    raise RunFailed(error)
                return
            _end(process)
            with self._starting:
                if self._process is process:
                    self._process = None
        raise RunFailed(
            f"{self._memory}: the process that saves it ended {MAX_STARTS} times; look in `dmesg` "
            f"for a lack of memory, then start the run again"
        )

    def close(self) -> None:
        with self._starting:
            if self._is_closed:
                return
            self._is_closed = True
            process = self._process
            if process is not None and process.poll() is not None:
                _end(process)
                process = self._process = None
            if process is None:
                if not (self._memory / JOB).exists():
                    shutil.rmtree(self._memory, ignore_errors=True)
                    return
                process = self._process = _start(self._memory)
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()

    def wait(self) -> None:
        if (process := self._process) is not None:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    with suppress(BrokenPipeError), process:
        pass


def _start(memory: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "orrery.trainer.saver", "serve", str(memory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=inherited(memory),
        start_new_session=True,
        # Omit variable START, because the launcher kills processes that have it.
        env={name: value for name, value in os.environ.items() if name != START},
    )


def inherited(memory: Path) -> tuple[int, ...]:
    """Return (descriptor,) if `copy` links to an anonymous file, else ()."""
    copy = memory / COPY
    return (int(copy.readlink().name),) if copy.is_symlink() else ()


def _ask(process: "subprocess.Popen[bytes]") -> bytes:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(b"\n")
        process.stdin.flush()
        return process.stdout.readline()
    except (OSError, ValueError):  # ValueError after `close`
        return b""


def serve(memory: Path, asked: IO[bytes], answers: IO[bytes]) -> None:
    parent, uploads = os.getppid(), Uploads()
    with suppress(FileNotFoundError), _locked(memory):
        while asked.readline():
            uploads.note(memory)
            error = failure(memory, lambda: os.getppid() == parent)
            uploads.begin()
            with suppress(OSError):
                answers.write(msgspec.json.encode(error) + b"\n")
                answers.flush()
        if finish(memory, uploads):
            shutil.rmtree(memory, ignore_errors=True)


def finish(memory: Path, uploads: "Uploads | None" = None) -> bool:
    """Save and upload the copy of an ended trainer. Return False if saving fails."""
    uploads = uploads or Uploads()
    uploads.note(memory)
    if error := failure(memory, lambda: False):
        print(f"checkpoint: {error}", file=sys.stderr, flush=True)
    else:  # free memory before a long upload
        for descriptor in inherited(memory):
            os.close(descriptor)
        (memory / COPY).unlink(missing_ok=True)
    uploads.finish()
    return not error


class Uploads:
    def __init__(self) -> None:
        self._command: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None

    def note(self, memory: Path) -> None:
        with suppress(OSError):
            job = msgspec.json.decode((memory / JOB).read_bytes(), type=SaveJob)
            if (url := os.environ.get(CHECKPOINT_TARGET)) and (to := job.completion) is not None:
                program = [sys.executable, "-m", "orrery.trainer.uploader", "upload", url]
                self._command = [*program, to.run_dir, to.stage, str(to.keep)]

    def begin(self) -> None:
        if self._command and (self._process is None or self._process.poll() is not None):
            # Two uploaders at once would remove each other's blocks.
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=2, preexec_fn=die_with_parent
            )

    def finish(self) -> None:
        if self._process is not None:
            self._process.wait()  # may lack the newest checkpoint, so `begin` again
        self.begin()
        if self._process is not None:
            self._process.wait()


def failure(memory: Path, has_trainer: Callable[[], bool]) -> str:
    """Save the copy. Return the error message, or "" on success."""
    try:
        save(memory, has_trainer)
    except OSError as error:
        return f"{explain_os_error(error)}; the run goes on from its newest whole checkpoint"
    except (OrreryError, msgspec.MsgspecError) as error:
        return str(error)
    return ""


@contextmanager
def _locked(memory: Path) -> Iterator[Any]:
    with (memory / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    os.nice(10)
    action, *folders = sys.argv[1:]
    if action == "serve":
        serve(Path(folders[0]), sys.stdin.buffer, sys.stdout.buffer)
        return
    for memory in map(Path, folders):
        with suppress(FileNotFoundError), _locked(memory):  # waits for a running saver
            if not inherited(memory):
                finish(memory)
            elif (memory / JOB).exists():
                print(
                    f"checkpoint: {memory}: is lost, because its memory ended with its saver",
                    file=sys.stderr,
                )
        shutil.rmtree(memory, ignore_errors=True)


if __name__ == "__main__":
    main()
