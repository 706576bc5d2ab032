"""Publish, serve, save and upload snapshots, in two processes that outlive the trainer.

python -m orrery.elastic.keeper OPTIONS    OPTIONS: `KeeperOptions` as JSON

- The trainer copies its state into shared memory and writes a line to the first process, which
  hashes and publishes the copy, serves it to peers, and saves it on disk.
- The second process uploads what is saved. A newer snapshot replaces an older one that waits.
- After the trainer's end both finish their work. The first serves on for `linger_s`, or until the
  next keeper of the folder starts.
"""

import fcntl
import hashlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import msgspec

from orrery.elastic.certificates import Certificates
from orrery.elastic.recovery import SnapshotServer
from orrery.elastic.snapshots import (
    HEADER,
    Block,
    BlockLacking,
    FolderSource,
    StateSnapshot,
    assemble,
    check_header,
    publish_copies,
    published,
    read_header,
    remove_old,
    snapshot_dir,
)
from orrery.elastic.types import ElasticError
from orrery.manifest.publish import make_folder

POLL_S = 0.2
RETRY_S = 5.0
NICE = 10  # peers' requests must not slow the trainer


class KeeperOptions(msgspec.Struct, frozen=True):
    folder: str  # in shared memory
    keep: int = 2
    disk: str = ""
    target: str = ""  # of fsspec, such as s3://bucket/run
    host: str = ""  # where to serve, nowhere if empty
    port: int = 0
    certificates: tuple[str, str, str] = ("", "", "")
    linger_s: float = 3600.0


class SnapshotKeeper:
    """The trainer's end: start the processes, tell them of copies, and leave them."""

    def __init__(self, options: KeeperOptions) -> None:
        self._options = options
        self.process = _start("keep", options)

    def copied(self) -> None:
        """Say that `copy_state` has made a copy. Start the processes again if they have ended."""
        if self.process.poll() is not None:
            self.__exit__()
            self.process = _start("keep", self._options)
        _tell(self.process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()


def _start(role: str, options: KeeperOptions) -> "subprocess.Popen[bytes]":
    text = msgspec.json.encode(options).decode()
    return subprocess.Popen(
        [sys.executable, "-m", "orrery.elastic.keeper", role, text],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def _tell(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.write(b"\n")
        process.stdin.flush()


class FsspecTarget:
    """A folder of blocks by sha256 and of headers, on any file system of fsspec."""

    def __init__(self, url: str) -> None:
        import fsspec  # a dependency of torch

        self.name = url
        self._files, root = fsspec.core.url_to_fs(url)
        self._root = root.rstrip("/")

    def upload(self, snapshot: Path, keep: int) -> None:
        """Write the missing blocks, then the header. Remove all but the newest `keep`."""
        header, source = read_header(snapshot), FolderSource(snapshot)
        self._files.makedirs(f"{self._root}/blocks", exist_ok=True)
        have = self._sizes()
        for block in header.blocks():
            if have.get(block.sha256) != block.size:
                data = source.read(block)
                if hashlib.sha256(data).hexdigest() != block.sha256:
                    raise ElasticError(f"{snapshot / block.part}: it is damaged; remove {snapshot}")
                self._files.pipe_file(f"{self._root}/blocks/{block.sha256}", data)
        name = snapshot_dir(Path(), header.round).name
        self._files.pipe_file(f"{self._root}/{name}.json", msgspec.json.encode(header))
        headers = self._headers()
        for path in headers[:-keep]:
            self._files.rm_file(path)
        used = {b.sha256 for path in headers[-keep:] for b in self._header(path).blocks()}
        for sha in self._sizes().keys() - used:
            self._files.rm_file(f"{self._root}/blocks/{sha}")

    def newest(self) -> StateSnapshot | None:
        """Return the newest header that can be read."""
        for path in reversed(self._headers()):
            with suppress(OSError, msgspec.MsgspecError, ElasticError):
                return self._header(path)
        return None

    def read(self, block: Block) -> bytes:
        try:
            found: bytes = self._files.cat_file(f"{self._root}/blocks/{block.sha256}")
        except FileNotFoundError:
            raise BlockLacking(block.sha256) from None
        return found

    def _headers(self) -> list[str]:
        return sorted(self._files.glob(f"{self._root}/round_*.json"))

    def _header(self, path: str) -> StateSnapshot:
        header = msgspec.json.decode(self._files.cat_file(path), type=StateSnapshot)
        check_header(header, path)
        return header

    def _sizes(self) -> dict[str, int]:
        listed: list[dict[str, Any]] = self._files.ls(f"{self._root}/blocks", detail=True)
        return {each["name"].rpartition("/")[2]: each["size"] for each in listed}


def keep(options: KeeperOptions) -> None:
    """Run the first process."""
    os.nice(NICE)
    folder = Path(options.folder)
    make_folder(folder)
    lock = _take_over(folder)
    uploader = _start("upload", options) if options.target else None
    server = None
    if options.host:
        files = Certificates(*(Path(each) for each in options.certificates))
        server = SnapshotServer(folder, options.host, options.port, files)
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def save_newest() -> None:
        publish_copies(folder, options.keep)
        if options.disk:
            save(folder, Path(options.disk), options.keep)
        if uploader is not None:
            _tell(uploader)

    _serve_lines(save_newest, lambda: _has_successor(folder))
    if uploader is not None and uploader.stdin is not None:
        uploader.stdin.close()
    end_s = time.monotonic() + options.linger_s
    while time.monotonic() < end_s and not _has_successor(folder):
        time.sleep(POLL_S)
    if server is not None:
        server.server_close()  # the next keeper listens on the same port
    lock.close()


def save(folder: Path, disk: Path, keep: int) -> None:
    """Copy the newest snapshot to `disk`, unless it is there."""
    newest = next(reversed(published(folder)), None)
    if newest is not None and not (disk / newest.name / HEADER).exists():
        make_folder(disk)
        assemble(read_header(newest), disk, [FolderSource(newest)])
        remove_old(disk, keep)


def upload(options: KeeperOptions) -> None:
    """Run the second process."""
    os.nice(NICE)
    source = Path(options.disk or options.folder)
    done = ""

    def upload_newest() -> None:
        nonlocal done
        newest = next(reversed(published(source)), None)
        if newest is not None and newest.name != done:
            FsspecTarget(options.target).upload(newest, options.keep)
            done = newest.name

    _serve_lines(upload_newest, lambda: False)


def _serve_lines(work: Callable[[], None], is_over: Callable[[], bool]) -> None:
    """Call `work` at the start, after every line, and at the end of input or of the parent.

    Failed work is tried again, at the latest after RETRY_S, and once at the end.
    """
    parent, is_due, is_open, due_s = os.getppid(), True, True, 0.0
    while is_open and not is_over():
        if is_due and time.monotonic() >= due_s:
            is_due = not _succeeds(work)
            due_s = time.monotonic() + RETRY_S if is_due else 0.0
        if select.select([0], [], [], POLL_S)[0]:
            is_open = bool(os.read(0, 4096))
            is_due, due_s = True, 0.0
        is_open = is_open and os.getppid() == parent
    _succeeds(work)


def _succeeds(work: Callable[[], None]) -> bool:
    try:
        work()
    except (ElasticError, OSError, msgspec.MsgspecError) as error:
        print(f"snapshots: {error}", file=sys.stderr, flush=True)
        return False
    return True


def _take_over(folder: Path) -> Any:
    """Ask an earlier keeper of the folder to end, and return the lock."""
    successor = folder / ".successor"
    successor.write_text(str(os.getpid()))
    lock = (folder / ".lock").open("a")
    fcntl.flock(lock, fcntl.LOCK_EX)
    with suppress(FileNotFoundError):
        if successor.read_text() == str(os.getpid()):
            successor.unlink()
    return lock


def _has_successor(folder: Path) -> bool:
    return (folder / ".successor").exists()


def main() -> None:
    role, text = sys.argv[1:]
    options = msgspec.json.decode(text, type=KeeperOptions)
    {"keep": keep, "upload": upload}[role](options)


if __name__ == "__main__":
    main()
