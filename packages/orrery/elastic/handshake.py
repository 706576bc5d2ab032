"""Dial and accept connections between sites: mutual TLS, then a HELLO frame in each direction.

A site without a listener dials all other sites. Two sites without listeners connect through a
relay, with TLS from end to end.
"""

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

from orrery.elastic.certificates import Certificates
from orrery.elastic.connection import Header, Kind
from orrery.elastic.relay import Relay, plain
from orrery.elastic.types import ElasticError
from orrery.runtime.timing import scaled

log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0  # time limit of each socket call, scaled
MAX_STRANGERS = 32  # most accepted connections with an unfinished handshake
UNSENT = 1 << 17  # most unsent bytes in the kernel, so that other connections can send the rest
CONGESTION = b"bbr"  # TCP congestion control that keeps its rate under random packet loss
WINDOW = 8 << 20  # bytes of a send buffer, enough for 0.4 Gb/s at a round trip of 100 ms
KERNEL = Path("/proc/sys/net")


class Handshakes:
    """Call `arrived(tls, hello)` for each accepted connection. `arrived` must answer `hello`."""

    def __init__(
        self, certificates: Certificates, arrived: Callable[[ssl.SSLSocket, Header], None]
    ) -> None:
        self._server, self._client = certificates.server(), certificates.client()
        self._arrived, self._relay = arrived, Relay()
        self._listener: socket.socket | None = None
        self._strangers = threading.BoundedSemaphore(MAX_STRANGERS)

    def listen(self, host: str, port: int) -> int:
        """Accept connections in a thread. Return the port. Raise ElasticError if it is in use."""
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            raise ElasticError(
                f"trainer.elastic: cannot listen on {host}:{port} ({error.strerror}); "
                "choose a free port"
            ) from error
        args = (self._listener,)
        threading.Thread(target=self._accept, args=args, name="links-accept", daemon=True).start()
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        self._relay.close()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def dial(
        self, place: tuple[str, int], hello: Header, peer: int, is_relay: bool, end_s: float
    ) -> ssl.SSLSocket:
        """Return a connection to rank `peer`. Raise OSError on failure.

        `place` is the peer's address. With `is_relay`, it is the address of a relay that the peer
        dials too. Wait until `end_s`, because the peer may begin its epoch later.
        """
        tls = _wrapped(socket.create_connection(place, scaled(HANDSHAKE_S)), self._client, False)
        try:
            if not is_relay:
                return _greeted(tls, hello, end_s)
            sock = plain(_greeted(tls, hello._replace(kind=Kind.RELAY, piece=peer), end_s))
            if hello.source < peer:
                tls = _wrapped(sock, self._client, is_server=False)
                return _greeted(tls, hello, end_s)
            tls = _wrapped(sock, self._server, is_server=True)
            found = Header.read(tls)
            if found is None or found._replace(round=hello.round) != hello._replace(source=peer):
                raise ConnectionResetError("closed in its handshake")
            tls.sendall(hello.pack())
            return tls
        except BaseException:
            tls.close()
            raise

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            if not self._strangers.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._meet, args=(sock,), daemon=True).start()

    def _meet(self, sock: socket.socket) -> None:
        tls = None
        try:
            sock.settimeout(scaled(HANDSHAKE_S))
            tls = _wrapped(sock, self._server, is_server=True)
            hello = Header.read(tls)
            if hello is not None and hello.kind == Kind.RELAY:
                tls.sendall(hello._replace(kind=Kind.HELLO).pack())
                first, last = sorted((hello.source, hello.piece))
                pair = hello.epoch, first, last, hello.lane
                self._relay.add(pair, hello.source, plain(tls))
                return
        except OSError as error:
            log.info("links: turned away a connection: %s", error)
            (tls or sock).close()  # `tls` has taken over the descriptor
            return
        finally:
            self._strangers.release()
        if hello is None or hello.kind != Kind.HELLO:
            tls.close()
        else:
            self._arrived(tls, hello)


def _greeted(tls: ssl.SSLSocket, first: Header, end_s: float) -> ssl.SSLSocket:
    tls.sendall(first.pack())
    tls.settimeout(max(1.0, end_s - time.monotonic()))
    answer = Header.read(tls)
    if answer is None or answer.kind != Kind.HELLO:
        raise ConnectionResetError("closed in its handshake")
    return tls


def widen(sock: socket.socket) -> None:
    """Give `sock` a send buffer of up to WINDOW bytes if the kernel's own limit is lower.

    The kernel doubles a size set by a program and then stops tuning the buffer (socket(7)).
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        tuned = int((KERNEL / "ipv4/tcp_wmem").read_text().split()[2])
        most = min(WINDOW, 2 * int((KERNEL / "core/wmem_max").read_text()))
        if tuned < most:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, most // 2)


def _wrapped(sock: socket.socket, context: ssl.SSLContext, is_server: bool) -> ssl.SSLSocket:
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
        widen(sock)
        with contextlib.suppress(OSError):  # the kernel may lack BBR
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION)
        sock.getpeername()  # raises if the peer has gone; `wrap_socket` would leak the socket
        return context.wrap_socket(sock, server_side=is_server)
    except BaseException:
        sock.close()
        raise
