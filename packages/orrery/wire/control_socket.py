"""Connect trainer ranks (ZeroMQ DEALER) securely to the orchestrator (ROUTER).

Both ends derive their CurveZMQ keys from the run's token, so no secret is sent.
"""

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Union

import msgspec
import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from orrery.manifest.errors import OrreryError
from orrery.runtime.token import derived_key

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

log = logging.getLogger(__name__)


def authenticate(socket: Any, is_sender: bool) -> None:
    """Make `socket` refuse peers without the token. Raise OrreryError if pyzmq lacks CURVE."""
    if not zmq.has("curve"):
        raise OrreryError(
            "pyzmq: it was built without CURVE, with which the rollout wire authenticates peers. "
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
    """The orchestrator's ROUTER socket. `num_foreign` counts refused peers and messages."""

    def __init__(self, host: str, port: int) -> None:
        self.num_foreign = 0
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # unlimited: a full queue drops messages
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
        """Queue a message. Drop it if `peer` has disconnected."""
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
                self._count_foreign("a message that is no request of this protocol")

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
            log.warning("rollout wire: turned away %s (%d so far)", why, self.num_foreign)
