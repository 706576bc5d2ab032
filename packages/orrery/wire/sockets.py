"""Connect trainer ranks to the orchestrator: a control socket, and TCP for bulk data.

- Control: ZeroMQ, ROUTER at the orchestrator, DEALER at ranks. Both ends derive CurveZMQ keys from
  the run's token, so no secret is sent.
- Bulk: a ticket from the control socket has two random secrets. The receiver sends the first and a
  byte offset. The sender answers with the second and the micro-batch's bytes from there.
- Bulk bytes are not encrypted or signed, so the network must be private.
"""

import asyncio
import contextlib
import hmac
import inspect
import logging
import secrets
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Union

import msgspec
import numpy as np
import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from orrery.manifest.errors import OrreryError
from orrery.runtime.network import derived_key
from orrery.wire.columns import ColumnLayout, MicroBatch, chunks, segments

PROTOCOL = 3
MAX_ASK_BYTES = 4096  # largest message to the orchestrator
MAX_HEAD_BYTES = 64 << 20  # largest message to a rank
HANDSHAKE_S = 5.0
# RecursionError: deep nesting. ValueError: bad UTF-8.
NOT_OF_THE_PROTOCOL = (msgspec.MsgspecError, RecursionError, ValueError)
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
CHUNK_BYTES = 1 << 20
SECRET_BYTES = 32
TICKETS_A_RANK = 2  # for the current and next micro-batch
MAX_UNKNOWN = 64  # most connections without a ticket
KNOCK_S = 5.0
ACCEPT_AGAIN_S = 0.2
_KNOCK = struct.Struct(f"<{SECRET_BYTES}sQ")
_UNSHARED = 2  # references to a free buffer, by the pool and `getrefcount`

log = logging.getLogger(__name__)


def authenticate(socket: Any, is_sender: bool) -> None:
    """Make `socket` refuse peers without the run token. Raise OrreryError if pyzmq lacks CURVE."""
    if not zmq.has("curve"):
        raise OrreryError(
            "pyzmq: built without CURVE, so the rollout wire cannot authenticate peers. "
            "Install the wheel of pyzmq from PyPI"
        )
    secret_keys = {
        role: z85.encode(derived_key(f"rollout wire {PROTOCOL}, {role}"))
        for role in ("sender", "receiver")
    }
    own = secret_keys["sender" if is_sender else "receiver"]
    socket.curve_secretkey, socket.curve_publickey = own, zmq.curve_public(own)
    if is_sender:
        socket.curve_server = True
    else:
        socket.curve_serverkey = zmq.curve_public(secret_keys["sender"])
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_ASK_BYTES if is_sender else MAX_HEAD_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))


def dealer(context: zmq.Context, url: str) -> zmq.Socket:
    socket = context.socket(zmq.DEALER)
    authenticate(socket, is_sender=False)
    socket.connect(url)
    return socket


class ControlSocket:
    """The orchestrator's control socket. `num_foreign` counts refused peers and messages."""

    def __init__(self, host: str, port: int) -> None:
        self.num_foreign = 0
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # unlimited, because a full queue blocks `post`
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            authenticate(self._socket, is_sender=True)
            self._monitor = self._socket.get_monitor_socket(HANDSHAKE_FAILED)
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OrreryError(
                f"rollout wire: cannot listen on {host}:{port} ({error}). Choose a free port"
            ) from error
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.url = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._handlers: dict[type, Callable[[bytes, Any], Any]] = {}
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()
        self._at_end: Callable[[], Awaitable[object]] | None = None
        self.server: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._posts: set[asyncio.Task[None]] = set()

    def route(self, kind: type[msgspec.Struct], handle: Callable[[bytes, Any], Any]) -> None:
        """Pass messages of `kind` to `handle(peer, message)`, which returns False to refuse one."""
        self._handlers[kind] = handle
        self._decoder = msgspec.msgpack.Decoder(Union[tuple(self._handlers)])  # noqa: UP007

    def start(self, at_end: Callable[[], Awaitable[object]] | None = None) -> "asyncio.Task[None]":
        self._at_end = at_end or self._at_end
        if self.server is None:
            self.server = asyncio.create_task(self._serve(), name="control socket")
            name = "control socket, handshakes"
            self._watcher = asyncio.create_task(self._watch_handshakes(), name=name)
        return self.server

    async def post(self, peer: bytes, message: msgspec.Struct) -> None:
        """Send a message. Drop it if `peer` has disconnected."""
        try:
            await self._socket.send_multipart([peer, msgspec.msgpack.encode(message)], copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def post_soon(self, peer: bytes, message: msgspec.Struct) -> None:
        task = asyncio.create_task(self.post(peer, message))
        self._posts.add(task)
        task.add_done_callback(self._posts.discard)

    def close(self) -> None:
        for task in (self.server, self._watcher, *self._posts):
            if task is not None:
                task.cancel()
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    async def _serve(self) -> None:
        try:
            await self._serve_messages()
        finally:
            if self._at_end is not None:
                await self._at_end()

    async def _serve_messages(self) -> None:
        while True:
            peer, *parts = await self._socket.recv_multipart()
            message = self.read(parts)
            is_ours = None if message is None else self._handlers[type(message)](peer, message)
            if inspect.isawaitable(is_ours):
                is_ours = await is_ours
            if message is None or is_ours is False:
                self._count_foreign("a message that does not follow this protocol")

    def read(self, parts: list[bytes]) -> msgspec.Struct | None:
        if len(parts) == 1:
            with contextlib.suppress(*NOT_OF_THE_PROTOCOL):
                message: msgspec.Struct = self._decoder.decode(parts[0])
                return message
        return None

    async def _watch_handshakes(self) -> None:
        while True:
            await recv_monitor_message(self._monitor)
            self._count_foreign("a peer that does not hold this run's token")

    def _count_foreign(self, why: str) -> None:
        self.num_foreign += 1
        if self.num_foreign.bit_count() == 1:
            log.warning("rollout wire: refused %s (%d so far)", why, self.num_foreign)


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
                "rollout wire: closed a connection to port %d without a ticket (%d so far)",
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
    """Fill `into` from byte `offset` on. Return the offset reached.

    Stop early if the connection fails or is silent for `silence_s` seconds.
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
    """Reuse buffers, because allocation takes as long as filling."""

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
