"""Dial and accept connections between sites: mutual TLS, then a HELLO frame each way.

A relay is a site that forwards encrypted bytes between two other sites.
"""

import contextlib
import errno
import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from orrery.elastic.certificates import Certificates
from orrery.elastic.connection import Header, Kind
from orrery.elastic.types import ElasticError
from orrery.runtime.timing import scaled

log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0  # time limit per socket call
MAX_STRANGERS = 32  # maximum unfinished handshakes
RETRY_S = 0.2
UNSENT = 1 << 17  # maximum unsent bytes. Other connections take the next frames.
CONGESTION = b"bbr"  # keeps its rate under random loss
WINDOW = 8 << 20  # send buffer in bytes, for 0.4 Gb/s at 100 ms round trip
KERNEL = Path("/proc/sys/net")
CHUNK = 1 << 18
WAIT_S = 60.0  # a relay's maximum wait for a pair's second site
Pair = tuple[int, int, int, int]  # (epoch, lower rank, higher rank, lane)


class Strangers:
    """Count unfinished handshakes: at most `most`, and half of them from one address."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._by_address: Counter[str] = Counter()

    def enter(self, address: str) -> bool:
        with self._lock:
            total, own = self._by_address.total(), self._by_address[address]
            if total >= self._most or own >= self._most // 2:
                return False
            self._by_address[address] += 1
            return True

    def leave(self, address: str) -> None:
        with self._lock:
            self._by_address[address] -= 1
            self._by_address = +self._by_address


class Handshakes:
    """Make connections. `arrived(tls, hello)` gets accepted connections and must answer `hello`."""

    def __init__(
        self, certificates: Certificates, arrived: Callable[[ssl.SSLSocket, Header], None]
    ) -> None:
        self._server, self._client = certificates.server(), certificates.client()
        self._arrived, self._relay = arrived, Relay()
        self._listener: socket.socket | None = None
        self._strangers = Strangers(MAX_STRANGERS)

    def listen(self, host: str, port: int) -> int:
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
        """Return a connection to rank `peer`. Raise OSError on failure, or after `end_s`.

        `place`: address of the peer or, with `is_relay`, of a relay that both sites dial.
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
                sock, (address, *_) = listener.accept()
            except OSError as error:
                if listener.fileno() < 0 or error.errno == errno.EINVAL:  # `close` was called
                    return
                log.warning("links: cannot accept a connection: %s", error)
                time.sleep(RETRY_S)
                continue
            if not self._strangers.enter(address):
                sock.close()
                continue
            threading.Thread(target=self._meet, args=(sock, address), daemon=True).start()

    def _meet(self, sock: socket.socket, address: str) -> None:
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
            (tls or sock).close()  # `tls` owns the file descriptor
            return
        finally:
            self._strangers.leave(address)
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
    """Enlarge the send buffer to WINDOW bytes or the kernel's maximum.

    Skip this if the kernel's tuning reaches that size. setsockopt ends the tuning and doubles the
    given size (socket(7)).
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
        # Raise if the peer is gone: `wrap_socket` would leak the socket.
        sock.getpeername()
        return context.wrap_socket(sock, server_side=is_server)
    except BaseException:
        sock.close()
        raise


class Relay:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[tuple[Pair, int], tuple[float, socket.socket]] = {}
        self._joined: set[socket.socket] = set()
        self._is_closed = False

    def add(self, pair: Pair, source: int, sock: socket.socket) -> None:
        """Forward bytes between `sock`, from rank `source`, and the pair's other site."""
        other = pair[1] + pair[2] - source
        with self._lock:
            now_s = time.monotonic()
            old = [key for key, (since_s, _) in self._waiting.items() if since_s < now_s - WAIT_S]
            for key in {*old, (pair, source)} & self._waiting.keys():
                self._waiting.pop(key)[1].close()
            if self._is_closed:
                sock.close()
                return
            if (pair, other) not in self._waiting:
                self._waiting[pair, source] = now_s, sock
                return
            ends = sock, self._waiting.pop((pair, other))[1]
            self._joined |= set(ends)
        for one, two in (ends, ends[::-1]):
            name = f"relay-{pair[1]}-{pair[2]}"
            threading.Thread(target=self._pass, args=(one, two), name=name, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        view = memoryview(bytearray(CHUNK))
        with contextlib.suppress(OSError):
            while count := source.recv_into(view):
                target.sendall(view[:count])
        with self._lock:
            is_last = target not in self._joined
            self._joined -= {source, target}
        _shut(source, target)
        if is_last:
            source.close()
            target.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for _, sock in self._waiting.values():
                sock.close()
            self._waiting = {}
            _shut(*self._joined)


def plain(tls: ssl.SSLSocket) -> socket.socket:
    """End TLS and return the socket. The peer must call this too."""
    timeout_s = tls.gettimeout()
    tls.unwrap()
    sock = socket.socket(fileno=tls.detach())
    sock.settimeout(timeout_s)
    return sock


def _shut(*sockets: socket.socket) -> None:
    for sock in sockets:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
