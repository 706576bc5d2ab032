"""Publish and serve training-state snapshots in a separate process.

- The trainer copies its state into shared memory, then writes a line to the keeper's stdin.
- The keeper ends `linger_s` after the trainer, or when another keeper starts on its folder.
"""

import fcntl
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
from orrery.elastic.snapshots import publish_copies
from orrery.elastic.types import ElasticError
from orrery.manifest.publish import make_folder

POLL_S = 0.2
RETRY_S = 5.0
NICE = 10  # low priority: peers' requests must not slow the trainer


class KeeperOptions(msgspec.Struct, frozen=True):
    folder: str  # in shared memory
    keep: int = 2
    host: str = ""  # "" to serve no peers
    port: int = 0
    certificates: tuple[str, str, str] = ("", "", "")  # paths of authority, certificate, key
    linger_s: float = 3600.0


class SnapshotKeeper:
    """Start the keeper process. It outlives the `with` block."""

    def __init__(self, options: KeeperOptions) -> None:
        self._options = options
        self.process = _start(options)

    def copied(self) -> None:
        """Tell the keeper of a new copy. Restart the keeper if it has ended."""
        if self.process.poll() is not None:
            self.__exit__()
            self.process = _start(self._options)
        _tell(self.process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()


def _start(options: KeeperOptions) -> "subprocess.Popen[bytes]":
    text = msgspec.json.encode(options).decode()
    return subprocess.Popen(
        [sys.executable, "-m", "orrery.elastic.keeper", text],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def _tell(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.write(b"\n")
        process.stdin.flush()


def keep(options: KeeperOptions) -> None:
    os.nice(NICE)
    folder = Path(options.folder)
    make_folder(folder)
    lock = _take_over(folder)
    server = None
    if options.host:
        files = Certificates(*(Path(each) for each in options.certificates))
        server = SnapshotServer(folder, options.host, options.port, files)
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def publish() -> None:
        publish_copies(folder, options.keep)

    _serve_lines(publish, lambda: _has_successor(folder))
    end_s = time.monotonic() + options.linger_s
    while time.monotonic() < end_s and not _has_successor(folder):
        time.sleep(POLL_S)
    if server is not None:
        server.shutdown()
        server.server_close()
    lock.close()


def _serve_lines(work: Callable[[], None], is_over: Callable[[], bool]) -> None:
    """Call `work` at the start, after each line on stdin, and at the end. Retry failed calls.

    Return once stdin closes, the parent dies or `is_over()`.
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
    """End the previous keeper of `folder`. Return the folder's lock."""
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
    keep(msgspec.json.decode(sys.argv[1], type=KeeperOptions))


if __name__ == "__main__":
    main()
