"""Exchange frames with a peer over one TLS connection, by a reader and a sender thread.

A lock guards the TLS object, because OpenSSL allows no concurrent calls.
"""

import contextlib
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

MAGIC = b"ORX1"
LAYOUT = struct.Struct("<4s16sqqHHBBHIQ")
MAX_BYTES = 1 << 28
SLICE = 1 << 17  # maximum bytes per acquisition of the TLS lock
SLAB = 1 << 23  # bytes per allocation. numpy uses huge pages from 4 MiB up.
FLUSH_S = 5.0  # time limit to send queued frames after `close`


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
        """Receive a frame without payload. Return its header, or None for other data."""
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
    """A queue of frames that any connection to the peer may send."""

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
    """Connection number `lane` of several to the same peer.

    `heard_s`: monotonic time of the last received bytes. `ready`: newest round that the peer began.
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
        """Let both threads end after queued frames are sent, or after FLUSH_S."""
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
        self._threads[0].join()  # the reader thread still uses the socket
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
                    raise OSError("closed before the peer took all frames") from None

    def _poll(self, event: int) -> None:
        poll = select.poll()
        poll.register(self._tls.fileno(), event)
        poll.poll(1000 * self._ping_s)
