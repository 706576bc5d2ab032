"""Relay the encrypted bytes of a pair of sites through a third site.

- Both sites dial the relay, authenticate over TLS, name their pair, and end this TLS session.
- The relay then joins the two TCP connections. The sites run their own TLS over them.
"""

import contextlib
import socket
import ssl
import threading
import time

CHUNK = 1 << 18
WAIT_S = 60.0  # longest wait for the pair's second site
Pair = tuple[int, int, int, int]  # epoch, lower rank, higher rank, lane


class Relay:
    """Join connections in pairs. If a waiting site dials again, use only its new connection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[tuple[Pair, int], tuple[float, socket.socket]] = {}
        self._joined: set[socket.socket] = set()
        self._is_closed = False

    def add(self, pair: Pair, source: int, sock: socket.socket) -> None:
        """Join `sock`, from rank `source`, with the pair's other connection, once both exist."""
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
    """End a connection's TLS session at both ends. Return the connection's plain socket."""
    timeout_s = tls.gettimeout()
    tls.unwrap()
    sock = socket.socket(fileno=tls.detach())
    sock.settimeout(timeout_s)
    return sock


def _shut(*sockets: socket.socket) -> None:
    for sock in sockets:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
