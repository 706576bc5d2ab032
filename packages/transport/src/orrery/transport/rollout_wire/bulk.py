"""Bulk bytes of a rollout wire: one plain TCP connection a micro-batch, opened by a ticket.

- The sender issues a `Ticket` over the wire's authenticated socket. Both ends then hold two random secrets.
- The receiver connects, sends the first secret and an offset. The sender answers with the second secret and the bytes from
  that offset on. Neither end reads anything from a peer that does not know its secret.
- A peer without a ticket can make the sender read `_KNOCK.size` bytes, for at most KNOCK_S, on one of MAX_UNKNOWN connections.
- A ticket dies with its micro-batch: a rank holds at most TICKETS_A_RANK, and none after it acknowledged the batch.
- The bytes are neither encrypted nor signed: like gradients and weights, they need a network that is the run's own.
"""

import asyncio
import hmac
import logging
import secrets
import socket
import struct
from dataclasses import dataclass

import msgspec

from orrery.transport.column_bytes import Layout, MicroBatch, chunks, segments

CHUNK_BYTES = 1 << 20
SECRET_BYTES = 32
TICKETS_A_RANK = 2  # for the micro-batch being received, and for the next one
MAX_UNKNOWN = 64  # connections that have not shown a ticket; one more closes the oldest
KNOCK_S = 5.0
ACCEPT_AGAIN_S = 0.2
_KNOCK = struct.Struct(f"<{SECRET_BYTES}sQ")  # the ticket's first secret, offset in the bytes

log = logging.getLogger(__name__)


class Ticket(msgspec.Struct, frozen=True):
    """The port that serves one micro-batch, and the secrets that the two ends show each other."""

    port: int
    knock: bytes
    answer: bytes


@dataclass
class _Transfer:
    step: int
    ticket: Ticket
    micro_batch: MicroBatch
    layout: Layout
    stream: "asyncio.Task[None] | None" = None


class BulkSender:
    """The sender's listener, at `host` on a port that the kernel chooses.

    `issue` needs a running event loop.
    """

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.num_foreign = 0
        self._transfers: dict[int, list[_Transfer]] = {}  # by rank, oldest first
        self._unknown: dict[
            asyncio.Task[None], None
        ] = {}  # connections that have not shown a ticket, oldest first
        self._streams: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    def issue(self, rank: int, step: int, micro_batch: MicroBatch, layout: Layout) -> Ticket:
        """Return a ticket for `micro_batch`; void the rank's oldest beyond TICKETS_A_RANK."""
        if self._accepting is None:
            self._accepting = asyncio.create_task(self._accept(), name="rollout wire, bulk")
        ticket = Ticket(
            self.port, secrets.token_bytes(SECRET_BYTES), secrets.token_bytes(SECRET_BYTES)
        )
        held = self._transfers.setdefault(rank, [])
        held.append(_Transfer(step, ticket, micro_batch, layout))
        while len(held) > TICKETS_A_RANK:
            self._void(held.pop(0))
        return ticket

    def forget(self, rank: int, up_to_step: int) -> None:
        """Void the tickets of batches that `rank` has acknowledged."""
        held = self._transfers.get(rank, [])
        for transfer in [transfer for transfer in held if transfer.step <= up_to_step]:
            held.remove(transfer)  # its stream has sent everything, or its reader has gone

    def close(self) -> None:
        for task in [self._accepting, *self._unknown, *self._streams]:
            if task is not None:
                task.cancel()
        self._transfers.clear()
        self._listener.close()

    def _void(self, transfer: _Transfer) -> None:
        if transfer.stream is not None:
            transfer.stream.cancel()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # the peer left, or no file descriptor is free
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
            await asyncio.sleep(0)  # `sock_accept` does not yield while connections are waiting

    async def _serve(self, connection: socket.socket) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        with connection:
            try:
                async with asyncio.timeout(KNOCK_S):
                    knock = await _exactly(connection, _KNOCK.size)
                secret, offset = _KNOCK.unpack(knock) if knock else (b"", 0)
                transfer = self._find(secret)
                if transfer is None:
                    self._count_foreign()
                    return
                self._unknown.pop(task, None)
                if transfer.stream is not None:
                    transfer.stream.cancel()  # its reader has come back on another connection
                transfer.stream = task
                await loop.sock_sendall(connection, transfer.ticket.answer)
                for chunk in chunks(segments(transfer.micro_batch, transfer.layout), CHUNK_BYTES):
                    if offset < len(chunk):
                        await loop.sock_sendall(connection, chunk[offset:])
                    offset = max(0, offset - len(chunk))
            except (OSError, TimeoutError):
                if task in self._unknown:
                    self._count_foreign()
                return  # a reader that still needs the bytes asks again

    def _find(self, secret: bytes) -> _Transfer | None:
        every = [transfer for held in self._transfers.values() for transfer in held]
        return next(
            (transfer for transfer in every if hmac.compare_digest(transfer.ticket.knock, secret)),
            None,
        )

    def _count_foreign(self) -> None:
        self.num_foreign += 1
        if self.num_foreign.bit_count() == 1:  # 1, 2, 4, 8, …: a flood must not fill the disk
            log.warning(
                "rollout wire: closed a connection to port %d that showed no ticket (%d so far)",
                self.port,
                self.num_foreign,
            )


async def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Return `num_bytes` from a non-blocking socket, or b"" if the connection ends before."""
    loop, got = asyncio.get_running_loop(), b""
    while len(got) < num_bytes:
        part = await loop.sock_recv(connection, num_bytes - len(got))
        if not part:
            return b""
        got += part
    return got


def fetch(host: str, ticket: Ticket, offset: int, into: memoryview, silence_s: float) -> int:
    """Fill `into` from `offset` on; return the offset that was reached.

    It is less than the end if the connection fails, ends or is silent for `silence_s`, or if the
    peer does not know the ticket.
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
