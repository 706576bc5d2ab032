"""Send micro-batches over TCP to receivers that hold a ticket.

- A ticket has two random secrets. It is sent over the authenticated control socket.
- The receiver sends the first secret and a byte offset. The sender answers with the second secret
  and the bytes from that offset on.
- Bytes are not encrypted or signed, so the network must be private.
"""

import asyncio
import hmac
import logging
import secrets
import socket
import struct
import sys
from dataclasses import dataclass

import msgspec
import numpy as np

from orrery.wire.columns import ColumnLayout, MicroBatch, chunks, segments

CHUNK_BYTES = 1 << 20
SECRET_BYTES = 32
TICKETS_A_RANK = 2  # for the current and next micro-batch
MAX_UNKNOWN = 64  # connections without a ticket
KNOCK_S = 5.0
ACCEPT_AGAIN_S = 0.2
_KNOCK = struct.Struct(f"<{SECRET_BYTES}sQ")
_UNSHARED = 2  # references to an unused buffer: list and getrefcount

log = logging.getLogger(__name__)


class Ticket(msgspec.Struct, frozen=True):
    port: int
    knock: bytes
    answer: bytes


@dataclass
class _TicketedBatch:
    step: int
    ticket: Ticket
    micro_batch: MicroBatch
    layout: ColumnLayout
    stream: "asyncio.Task[None] | None" = None


class BulkSender:
    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.num_foreign = 0
        self._ticketed: dict[int, list[_TicketedBatch]] = {}
        self._unknown: dict[asyncio.Task[None], None] = {}
        self._streams: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    def issue(self, rank: int, step: int, micro_batch: MicroBatch, layout: ColumnLayout) -> Ticket:
        if self._accepting is None:
            self._accepting = asyncio.create_task(self._accept(), name="rollout wire, bulk")
        knock, answer = secrets.token_bytes(SECRET_BYTES), secrets.token_bytes(SECRET_BYTES)
        ticket = Ticket(self.port, knock, answer)
        held = self._ticketed.setdefault(rank, [])
        held.append(_TicketedBatch(step, ticket, micro_batch, layout))
        while len(held) > TICKETS_A_RANK:
            stream = held.pop(0).stream
            if stream is not None:
                stream.cancel()
        return ticket

    def forget(self, rank: int, up_to_step: int) -> None:
        held = self._ticketed.get(rank, [])
        for each in [each for each in held if each.step <= up_to_step]:
            held.remove(each)

    def close(self) -> None:
        for task in [self._accepting, *self._unknown, *self._streams]:
            if task is not None:
                task.cancel()
        self._ticketed.clear()
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                log.warning("rollout wire: cannot accept a connection (%s)", error)
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            connection.setblocking(False)
            if len(self._unknown) >= MAX_UNKNOWN:
                oldest = next(iter(self._unknown))
                del self._unknown[oldest]
                oldest.cancel()
                self._count_foreign()
            task = asyncio.create_task(self._serve(connection))
            self._unknown[task] = None
            self._streams.add(task)
            task.add_done_callback(self._streams.discard)
            task.add_done_callback(lambda task: self._unknown.pop(task, None))
            await asyncio.sleep(0)  # let other tasks run if `sock_accept` never waits

    async def _serve(self, connection: socket.socket) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        with connection:
            try:
                async with asyncio.timeout(KNOCK_S):
                    knock = await _exactly(connection, _KNOCK.size)
                secret, offset = _KNOCK.unpack(knock) if knock else (b"", 0)
                found = self._find(secret)
                if found is None:
                    self._count_foreign()
                    return
                self._unknown.pop(task, None)
                if found.stream is not None:
                    found.stream.cancel()
                found.stream = task
                await loop.sock_sendall(connection, found.ticket.answer)
                for chunk in chunks(segments(found.micro_batch, found.layout), CHUNK_BYTES):
                    if offset < len(chunk):
                        await loop.sock_sendall(connection, chunk[offset:])
                    offset = max(0, offset - len(chunk))
            except (OSError, TimeoutError):
                if task in self._unknown:
                    self._count_foreign()
                return

    def _find(self, secret: bytes) -> _TicketedBatch | None:
        for held in self._ticketed.values():
            for each in held:
                if hmac.compare_digest(each.ticket.knock, secret):
                    return each
        return None

    def _count_foreign(self) -> None:
        self.num_foreign += 1
        if self.num_foreign.bit_count() == 1:  # log only powers of two
            log.warning(
                "rollout wire: closed a connection to port %d that showed no ticket (%d so far)",
                self.port,
                self.num_foreign,
            )


async def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    loop, got = asyncio.get_running_loop(), b""
    while len(got) < num_bytes:
        part = await loop.sock_recv(connection, num_bytes - len(got))
        if not part:
            return b""
        got += part
    return got


def fetch(host: str, ticket: Ticket, offset: int, into: memoryview, silence_s: float) -> int:
    """Fill `into` from byte `offset` on. Return the first missing byte's offset.

    Stop early if the connection fails or sends no byte for `silence_s` seconds.
    """
    try:
        with socket.create_connection((host, ticket.port), timeout=silence_s) as connection:
            connection.sendall(_KNOCK.pack(ticket.knock, offset))
            answer = bytearray()
            while len(answer) < SECRET_BYTES:
                part = connection.recv(SECRET_BYTES - len(answer))
                if not part:
                    return offset
                answer += part
            if not hmac.compare_digest(answer, ticket.answer):
                return offset
            while offset < len(into):
                received = connection.recv_into(into[offset:])
                if not received:
                    break
                offset += received
    except OSError as error:
        log.warning(
            "rollout wire: the connection to %s:%d failed (%s); asking again",
            host,
            ticket.port,
            error,
        )
    return offset


class BufferPool:
    """Reusable receive buffers. Allocating a buffer would take as long as filling it."""

    def __init__(self) -> None:
        self._buffers: list[np.ndarray] = []

    def take(self, num_bytes: int) -> np.ndarray:
        """Return uint8 [num_bytes], uninitialized."""
        for index in range(len(self._buffers)):
            is_free = sys.getrefcount(self._buffers[index]) == _UNSHARED
            if is_free and len(self._buffers[index]) >= num_bytes:
                return self._buffers[index][:num_bytes]
        buffer = np.empty(num_bytes, dtype=np.uint8)
        self._buffers = [*self._buffers[-1:], buffer]
        return buffer[:num_bytes]
