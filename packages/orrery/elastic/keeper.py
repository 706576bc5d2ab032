"""Publish and serve snapshots of the training state in the keeper process.

- The trainer writes a line to the keeper's stdin after each copy of its state.
- The keeper ends `linger_s` after the trainer, when another keeper starts on its folder, or when
  the folder is removed.
- Its first line on stdout is empty, or says why it cannot serve.
- `/newest` returns the newest header and `/block/SHA256` a block, over HTTPS with mutual TLS.
"""

import fcntl
import http
import http.server
import os
import re
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
from orrery.elastic.connection import Strangers
from orrery.elastic.snapshots import (
    HEADER,
    SILENCE_S,
    Block,
    BlockLacking,
    FolderSource,
    publish_copies,
    published,
    read_header,
)
from orrery.elastic.types import ElasticError
from orrery.manifest.publish import make_folder
from orrery.runtime.timing import scaled

POLL_S = 0.2
RETRY_S = 5.0
HANDSHAKE_S = 5.0
MAX_STRANGERS = 64  # unfinished TLS handshakes
READY_S = 60.0  # maximum start-up time, plus `bind_s`
NICE = 10  # peers' requests must not slow the trainer
_BLOCK = re.compile(r"/block/([0-9a-f]{64})")


class SnapshotServer(http.server.ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 128

    def __init__(self, folder: Path, host: str, port: int, certificates: Certificates) -> None:
        self._folder, self._tls = folder, certificates.server()
        self._blocks: dict[str, tuple[Path, Block]] = {}
        self._indexed: set[tuple[Path, int]] = set()
        self._indexing = threading.Lock()
        self._strangers = Strangers(MAX_STRANGERS)
        super().__init__((host, port), _Handler)

    def newest(self) -> Path | None:
        return next(reversed(published(self._folder)), None)

    def find(self, sha256: str) -> bytes:
        with self._indexing:
            # Compare modification times, because --rewind repeats rounds.
            found = published(self._folder)
            present = {(path, (path / HEADER).stat().st_mtime_ns) for path in found}
            if present != self._indexed:
                self._blocks = {
                    block.sha256: (path, block)
                    for path in found
                    for block in read_header(path).blocks()
                }
                self._indexed = present
        if sha256 not in self._blocks:
            raise BlockLacking(sha256)
        path, block = self._blocks[sha256]
        return FolderSource(path).read(block)

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(HANDSHAKE_S)
        with suppress(OSError):
            try:
                # Raise if the peer is gone, because `wrap_socket` would leak the socket.
                request.getpeername()
                wrapped = self._tls.wrap_socket(request, server_side=True)
            finally:
                self._strangers.leave(client_address[0])
            with wrapped:
                wrapped.settimeout(SILENCE_S)
                _Handler(wrapped, client_address, self)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self._strangers.enter(client_address[0])


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: SnapshotServer

    def do_GET(self) -> None:
        body = None
        with suppress(BlockLacking, ElasticError, OSError):
            if self.path == "/newest" and (newest := self.server.newest()) is not None:
                body = msgspec.json.encode(read_header(newest))
            elif found := _BLOCK.fullmatch(self.path):
                body = self.server.find(found[1])
        self.send_response(http.HTTPStatus.NOT_FOUND if body is None else http.HTTPStatus.OK)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, format: str, *args: object) -> None:
        """Log no requests."""


class KeeperOptions(msgspec.Struct, frozen=True):
    folder: str  # in shared memory
    keep: int = 2
    host: str = ""  # "" to serve no peers
    port: int = 0
    certificates: tuple[str, str, str] = ("", "", "")  # paths of authority, certificate, key
    linger_s: float = 3600.0
    bind_s: float = 60.0  # wait for a previous keeper, perhaps hashing, to free the port


class SnapshotKeeper:
    """Start a keeper, which outlives the `with` block. Raise ElasticError if its port is taken."""

    def __init__(self, options: KeeperOptions) -> None:
        self._options = options
        self.process = _start(options, subprocess.PIPE)
        if reason := _failure(self.process, scaled(READY_S) + options.bind_s):
            self.process.kill()
            self.process.wait()
            self.__exit__()
            raise ElasticError(
                f"--listen: port {options.port} of {options.host}, for snapshots, cannot be used "
                f"({reason}); free it, or listen on another port"
            )

    def copied(self) -> None:
        """Tell the keeper of a new copy. Restart it if it has ended."""
        if self.process.poll() is not None:
            self.__exit__()
            options = msgspec.structs.replace(self._options, bind_s=0.0)
            self.process = _start(options, subprocess.DEVNULL)
        _tell(self.process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()


def _start(options: KeeperOptions, stdout: int) -> "subprocess.Popen[bytes]":
    text = msgspec.json.encode(options).decode()
    return subprocess.Popen(
        [sys.executable, "-m", "orrery.elastic.keeper", text],
        stdin=subprocess.PIPE,
        stdout=stdout,
        start_new_session=True,
    )


def _failure(process: "subprocess.Popen[bytes]", within_s: float) -> str:
    """Return why the keeper cannot serve, or "" if it can or is silent for `within_s`."""
    assert process.stdout is not None
    with process.stdout as answers:
        if not select.select([answers], [], [], within_s)[0]:
            return ""
        return (answers.readline() or b"its process has ended").decode().strip()


def _tell(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.write(b"\n")
        process.stdin.flush()


class _Door:
    def __init__(self, options: KeeperOptions) -> None:
        self._options = options
        self._server: SnapshotServer | None = None

    def open(self) -> None:
        """Start the server, unless it runs or lacks a host. Raise OSError if the port is taken."""
        options = self._options
        if self._server is None and options.host:
            files = Certificates(*(Path(each) for each in options.certificates))
            self._server = SnapshotServer(Path(options.folder), options.host, options.port, files)
            threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


def keep(options: KeeperOptions) -> None:
    os.nice(NICE)
    folder = Path(options.folder)
    make_folder(folder)
    lock = _take_over(folder)
    door = _Door(options)

    def work() -> None:
        publish_copies(folder, options.keep)
        door.open()

    def is_over() -> bool:
        return _has_successor(folder, lock)

    with suppress(BrokenPipeError):
        os.write(1, f"{_opened(door, options.bind_s)}\n".encode())
    _serve_lines(work, is_over)
    end_s = time.monotonic() + options.linger_s
    while time.monotonic() < end_s and not is_over():
        time.sleep(POLL_S)
    door.close()
    lock.close()


def _opened(door: _Door, within_s: float) -> str:
    """Return "" once the server runs, or the error if the port stays taken for `within_s`."""
    end_s = time.monotonic() + within_s
    while True:
        try:
            door.open()
            return ""
        except OSError as error:
            if time.monotonic() > end_s:
                return str(error)
        time.sleep(POLL_S)


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


def _has_successor(folder: Path, lock: Any) -> bool:
    has_lock = os.fstat(lock.fileno()).st_nlink > 0
    return not has_lock or (folder / ".successor").exists()


def main() -> None:
    keep(msgspec.json.decode(sys.argv[1], type=KeeperOptions))


if __name__ == "__main__":
    main()
