"""Serve snapshots to peers, and fetch a snapshot from several peers at once.

Over HTTPS with mutual TLS, `/newest` returns the newest header, and `/block/SHA256` a block.
"""

import http.client
import http.server
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from orrery.elastic.certificates import Certificates
from orrery.elastic.handshake import Strangers
from orrery.elastic.snapshots import (
    HEADER,
    Block,
    BlockLacking,
    FetchFailed,
    FolderSource,
    StateSnapshot,
    assemble,
    check_header,
    published,
    read_header,
)
from orrery.elastic.types import ElasticError

HANDSHAKE_S = 5.0
SILENCE_S = 20.0
ANSWER_S = 300.0  # time limit of a whole HTTP response
MAX_STRANGERS = 64  # maximum unfinished TLS handshakes
POLL_S = 0.2
LANES = 2  # connections per peer, to receive a block while hashing another
MAX_HEADER_BYTES = 64 << 20
# a deeply nested header raises RecursionError
BAD_HEADER = (OSError, ValueError, RecursionError, msgspec.MsgspecError, ElasticError)
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
            # A run that is set back publishes rounds again, so compare modification times.
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
                # Raise if the peer is gone: `wrap_socket` would leak the socket.
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
        """Disable logging."""


class PeerSource:
    def __init__(self, peer: str, certificates: Certificates) -> None:
        self.name, self.num_bytes = peer, 0  # bytes of received blocks
        address, _, port = peer.rpartition(":")
        self._connection = http.client.HTTPSConnection(
            address, int(port), timeout=SILENCE_S, context=certificates.client()
        )

    def newest(self) -> StateSnapshot | None:
        body = self._get("/newest", MAX_HEADER_BYTES)
        if body is None:
            return None
        header = msgspec.json.decode(body, type=StateSnapshot)
        check_header(header, self.name)
        return header

    def read(self, block: Block) -> bytes:
        body = self._get(f"/block/{block.sha256}", block.size)
        if body is None:
            raise BlockLacking(block.sha256)
        self.num_bytes += len(body)
        return body

    def close(self) -> None:
        self._connection.close()

    def _get(self, path: str, most: int) -> bytes | None:
        """Return the body of `path`, or None if missing. Raise ValueError above `most` bytes."""
        try:
            self._connection.request("GET", path)
            with _limited(self._connection.sock):
                answer = self._connection.getresponse()
                size = int(answer.headers.get("Content-Length", -1))
                if not 0 <= size <= most:
                    raise ValueError(f"{size} bytes instead of at most {most}")
                if len(body := answer.read(size)) < size:
                    raise ConnectionResetError(f"closed after {len(body)} of {size} bytes")
        except http.client.HTTPException as error:
            raise OSError(str(error) or type(error).__name__) from error
        return body if answer.status == http.HTTPStatus.OK else None


@contextmanager
def _limited(sock: socket.socket) -> Iterator[None]:
    """Shut down `sock` if the `with` block exceeds ANSWER_S."""
    timer = threading.Timer(ANSWER_S, _shut, (sock,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def fetch_state(
    peers: Callable[[], Sequence[str]],
    wanted: Callable[[], tuple[int, str]],
    folder: Path,
    certificates: Certificates,
    deadline_s: float,
) -> Path:
    """Fetch the newest committed state from all peers. Return the snapshot's folder.

    `peers` returns ADDRESS:PORT of snapshot servers. `wanted` returns the last round's (number,
    digest). Raise FetchFailed after `deadline_s` without a new block, or if all peers are past
    the wanted round.
    """
    end_s, reason, num_fetched = time.monotonic() + deadline_s, "no peer is live", 0
    while True:
        number, digest = wanted()
        sources, headers, is_gone = [], [], False
        for peer in peers():
            source = PeerSource(peer, certificates)
            try:
                header = source.newest()
            except BAD_HEADER as error:
                reason = f"{peer}: {error or type(error).__name__}"
                source.close()
                continue
            sources.append(source)
            if header is None or (header.round, header.digest) != (number, digest):
                is_gone |= header is not None and header.round > number
                has = f"round {header.round}" if header else "no snapshot"
                reason = f"{peer} has {has}, and the log is at round {number}"
            else:
                headers.append(header)
                sources += [PeerSource(peer, certificates) for _ in range(LANES - 1)]
        try:
            if headers:
                return assemble(headers[0], folder, sources)
        except FetchFailed as error:
            reason, num_fetched = str(error), num_fetched + error.num_fetched
            if error.num_fetched:
                end_s = time.monotonic() + deadline_s
        finally:
            for source in sources:
                source.close()
        time.sleep(POLL_S)
        is_gone = is_gone and not headers and wanted() == (number, digest)
        if is_gone or time.monotonic() >= end_s:
            raise FetchFailed(
                f"recovery: no state of round {number} from other sites ({reason}); check that "
                "they run and that their recovery port is open, then join again",
                num_fetched,
            )
