"""Connect two sites over mutual TLS, and exchange frames.

- Each end first sends a HELLO frame. A relay site forwards encrypted bytes between two others.
- A connection's reader and sender threads lock its TLS object, because OpenSSL allows no concurrent
  calls.
"""

import contextlib
import errno
import logging
import select
import socket
import ssl
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from orrery.elastic.certificates import Certificates
from orrery.elastic.types import ElasticError
from orrery.runtime.timing import scaled

log = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]
Pair = tuple[int, int, int, int]  # (epoch, lower rank, higher rank, lane)

MAGIC = b"ORX1"
LAYOUT = struct.Struct("<4s16sqqHHBBHIQ")
MAX_BYTES = 1 << 28
SLICE = 1 << 17  # bytes per lock acquisition
SLAB = 1 << 23  # bytes per allocation. numpy uses huge pages from 4 MiB up.
FLUSH_S = 5.0  # time to send queued frames after `close`
HANDSHAKE_S = 10.0  # timeout of each socket call in a handshake
MAX_STRANGERS = 32  # unfinished handshakes
RETRY_S = 0.2
UNSENT = 1 << 17  # limit of unsent bytes per socket, so that faster connections take more frames
CONGESTION = b"bbr"  # TCP's congestion control, fast under random loss
WINDOW = 8 << 20  # send buffer in bytes, for 0.4 Gb/s at 100 ms round trip
KERNEL = Path("/proc/sys/net")
CHUNK = 1 << 18
WAIT_S = 60.0  # a relay's wait for a pair's second site


class BadFrame(Exception):
    """A peer broke the protocol."""


class Slab:
    """Cut arrays from large allocations, to save page faults."""

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def take(self, size: int) -> Bytes:
        if size > len(self._free):
            self._free = np.empty(max(size, SLAB), np.uint8)
        taken, self._free = self._free[:size], self._free[-(-size // 64) * 64 :]
        return taken


class Kind(IntEnum):
    HELLO = 0
    DATA = 1
    PING = 2
    BROKEN = 3  # the round failed. `piece`: failed rank. Payload: reason.
    READY = 4  # the sender has begun the round
    RELAY = 5  # first frame to a relay. `piece`: rank to reach.
    PROBE = 6  # speed measurement. `hop` is 1 in the last frame.
    PROBED = 7  # answer to PROBE. `piece`: speed in Mb/s.


class Header(NamedTuple):
    run: bytes
    epoch: int
    round: int
    source: int
    shard: int
    kind: Kind
    lane: int
    hop: int
    piece: int
    length: int

    def pack(self) -> bytes:
        return LAYOUT.pack(MAGIC, *self)

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> "Header":
        magic, *fields = LAYOUT.unpack(data)
        header = cls(*fields)
        if magic != MAGIC or header.kind not in set(Kind) or header.length > MAX_BYTES:
            raise BadFrame("bytes that are no frame")
        return header

    @classmethod
    def read(cls, sock: ssl.SSLSocket) -> "Header | None":
        """Return the header of a frame without payload, or None for other data."""
        data = b""
        while len(data) < LAYOUT.size:
            if not (more := sock.recv(LAYOUT.size - len(data))):
                return None
            data += more
        with contextlib.suppress(BadFrame):
            header = cls.unpack(data)
            return header if header.length == 0 else None
        return None


class Frame(NamedTuple):
    source: int
    hop: int
    piece: int
    payload: Bytes


class FrameSink(Protocol):
    def ping(self, lane: int) -> Header: ...
    def admit(self, peer: "PeerConnection", header: Header) -> bool: ...
    def arrived(self, peer: "PeerConnection", header: Header, payload: Bytes) -> None: ...
    def lost(self, peer: "PeerConnection", reason: str, is_bad: bool) -> None: ...


class Backlog:
    """Queue of frames that all connections to a peer share."""

    def __init__(self) -> None:
        self.frames: deque[Sequence[bytes | memoryview]] = deque()
        self.wake = threading.Condition()

    def put(self, header: Header, payload: Bytes) -> int:
        frame = (header._replace(length=len(payload)).pack(), payload.data)
        with self.wake:
            self.frames.append(frame)
            self.wake.notify()
        return LAYOUT.size + len(payload)

    def clear(self) -> None:
        with self.wake:
            self.frames.clear()


class PeerConnection:
    """One connection (`lane`) of several to a peer.

    `heard_s`: monotonic time of the last received bytes. `ready`: newest round begun by the peer.
    """

    def __init__(
        self,
        tls: ssl.SSLSocket,
        sink: FrameSink,
        rank: int,
        lane: int,
        ping_s: float,
        backlog: Backlog,
    ) -> None:
        tls.setblocking(False)
        self.rank, self.lane, self.ready, self.is_closed = rank, lane, -1, False
        self.heard_s = time.monotonic()
        self._tls, self._sink, self._ping_s = tls, sink, ping_s
        self._tls_lock = threading.Lock()
        self._queue: deque[Sequence[bytes | memoryview]] = deque()
        self._backlog, self._wake = backlog.frames, backlog.wake
        self._closed_s = float("inf")
        self._threads = [
            threading.Thread(target=work, name=f"links-{rank}.{lane}{work.__name__}", daemon=True)
            for work in (self._read, self._send)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, header: Header, payload: Bytes, urgent: bool = False) -> None:
        """Queue a frame for this connection only, at the front if urgent."""
        frame = (header._replace(length=len(payload)).pack(), payload.data)
        with self._wake:
            self._queue.appendleft(frame) if urgent else self._queue.append(frame)
            self._wake.notify_all()

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def drop_queued(self) -> None:
        with self._wake:
            self._queue.clear()

    def close(self) -> None:
        """End both threads after queued frames are sent, or after FLUSH_S."""
        with self._wake:
            self.is_closed, self._closed_s = True, time.monotonic()
            self._wake.notify_all()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(FLUSH_S)

    def _end(self, reason: str, is_bad: bool = False) -> None:
        with self._wake:
            was_closed, self.is_closed = self.is_closed, True
            self._closed_s = min(self._closed_s, time.monotonic() - FLUSH_S)
            self._wake.notify_all()
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._tls, socket.SHUT_RDWR)  # wakes both threads
        if not was_closed:
            self._sink.lost(self, reason, is_bad)

    def _read(self) -> None:
        head, slab = bytearray(LAYOUT.size), Slab()
        try:
            while self._fill(memoryview(head)):
                header = Header.unpack(head)
                is_wanted = self._sink.admit(self, header)
                payload = slab.take(header.length)
                if header.length and not self._fill(payload.data):
                    break
                if is_wanted:
                    self._sink.arrived(self, header, payload)
            self._end("closed its connection")
        except ssl.SSLEOFError:
            self._end("closed its connection")
        except BadFrame as error:
            self._end(f"sent {error}", is_bad=True)
        except (OSError, ValueError) as error:  # ValueError: the socket is closed
            self._end(f"its connection broke ({error})")

    def _fill(self, view: memoryview) -> bool:
        done, size = 0, len(view)
        while done < size:
            begin, turn = done, min(done + SLICE, size)
            try:
                with self._tls_lock:
                    while done < turn:
                        if (count := self._tls.recv_into(view[done:])) == 0:
                            return False
                        done += count
            except ssl.SSLWantReadError:
                self._poll(select.POLLIN)
            if done > begin:
                self.heard_s = time.monotonic()
        return True

    def _send(self) -> None:
        try:
            while (frame := self._next()) is not None:
                for buffer in frame:
                    for start in range(0, len(buffer), SLICE):
                        self._write(memoryview(buffer)[start : start + SLICE])
            self._end("closed")
        except (OSError, ValueError) as error:
            self._end(f"its connection broke ({error})")
        self._threads[0].join()  # the reader still uses the socket
        self._tls.close()

    def _next(self) -> Sequence[bytes | memoryview] | None:
        end_s = time.monotonic() + self._ping_s
        with self._wake:
            while True:
                if frames := self._queue or self._backlog:
                    return frames.popleft()
                if self.is_closed:
                    return None
                if (left_s := end_s - time.monotonic()) <= 0:
                    return (self._sink.ping(self.lane).pack(),)
                self._wake.wait(left_s)

    def _write(self, view: memoryview) -> None:
        while True:
            try:
                with self._tls_lock:
                    self._tls.send(view)
                return
            except ssl.SSLWantWriteError:
                self._poll(select.POLLOUT)
                if time.monotonic() > self._closed_s + FLUSH_S:
                    raise OSError("closed before the peer received all frames") from None

    def _poll(self, event: int) -> None:
        poll = select.poll()
        poll.register(self._tls.fileno(), event)
        poll.poll(1000 * self._ping_s)


class Strangers:
    """Limit unfinished handshakes to `most`, half of it per address."""

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
    """Make TLS connections. `arrived(tls, hello)` must answer an accepted HELLO with HELLO."""

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

        `place`: address of the peer or, if `is_relay`, of the pair's relay.
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
            log.info("links: rejected a connection: %s", error)
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

    Do nothing if the kernel's automatic tuning, which setsockopt ends, reaches that size.
    setsockopt doubles the given size (socket(7)).
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
        # Raise if the peer is gone, because `wrap_socket` would leak the socket.
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
        """Forward bytes between `sock` (rank `source`) and the pair's other site."""
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
