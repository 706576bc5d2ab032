"""Rollouts over ZeroMQ: ROUTER in the orchestrator, DEALER in each trainer rank; bytes of micro-batches beside it (`bulk`).

- Both ends derive both CurveZMQ key pairs from the run's token. Neither the token nor the sender's
  public key is ever sent. A peer without the token cannot finish the handshake, and libzmq hands
  none of its bytes to this process.
- libzmq refuses frames above MAX_ASK_BYTES or MAX_HEAD_BYTES before it allocates them.
- A receiver sends `Ask(step, rank, micro_step)`; `micro_step` −1 asks for the batch's head. The answer to a micro-batch is
  its layout and a ticket, with which the receiver fetches the bytes into one buffer, which is the packed micro-batch.
- Credit: a receiver has at most two micro-batches asked for, and the sender holds them as references to their parts.
- An ask is repeated until it is answered, so a lost connection heals. If its bytes stop in the
  middle, the new ask has a new number. The sender answers an ask once per connection. Messages that
  do not decode are counted.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.transport.buffers import BufferPool
from orrery.transport.column_bytes import Layout, columns_from, layout_of
from orrery.transport.columns import Columns
from orrery.transport.rollout_wire.bulk import BulkSender, Ticket, fetch
from orrery.transport.rollout_wire.contract import Batch, ReceivedBatch
from orrery.transport.token import derived_key

PROTOCOL = 2
MAX_ASK_BYTES = 4096
MAX_HEAD_BYTES = 64 << 20
ASK_AGAIN_S = 2.0
FETCH_AGAIN_S = 0.1
SILENCE_S = 10.0  # without bytes; then the receiver asks for the rest on a new connection
HANDSHAKE_S = 5.0
NUM_HANDSHAKES = 5  # failures in a row; then the other end is not this run's orchestrator
_HEAD = -1
_NOT_OF_THE_PROTOCOL = (
    msgspec.MsgspecError,
    RecursionError,
    ValueError,
)  # the last two: deep nesting, bad UTF-8

log = logging.getLogger(__name__)


class Ask(msgspec.Struct, tag="ask"):
    protocol: int
    rank: int
    step: int
    micro_step: int
    number: int
    received: int  # the last step that this receiver has whole, −1 before the first


class Done(msgspec.Struct, tag="done"):
    """This rank has everything of `step`."""

    protocol: int
    rank: int
    step: int


class BatchHead(msgspec.Struct, tag="batch"):
    number: int
    step: int
    num_micro_batches: int
    totals: dict[str, int | float]
    info: dict[str, Any]


class MicroBatchHead(msgspec.Struct, tag="micro_batch"):
    number: int
    step: int
    micro_step: int
    layout: Layout
    ticket: Ticket


class Refusal(msgspec.Struct, tag="refusal"):
    number: int
    reason: str


_encode = msgspec.msgpack.Encoder().encode
_to_sender = msgspec.msgpack.Decoder(Ask | Done)
_to_receiver = msgspec.msgpack.Decoder(BatchHead | MicroBatchHead | Refusal)


def _authenticate(socket: Any, is_sender: bool) -> None:
    """Restrict `socket` to peers with the run's token. Raises OrreryError if pyzmq lacks CURVE."""
    if not zmq.has("curve"):
        raise OrreryError(
            "pyzmq: it was built without CURVE, and the rollout wire lets nobody in without it; install pyzmq's own wheel"
        )
    secret_keys = {
        role: z85.encode(derived_key(f"rollout wire {PROTOCOL}, {role}"))
        for role in ("sender", "receiver")
    }
    mine = secret_keys["sender" if is_sender else "receiver"]
    socket.curve_secretkey, socket.curve_publickey = mine, zmq.curve_public(mine)
    if is_sender:
        socket.curve_server = True
    else:
        socket.curve_serverkey = zmq.curve_public(secret_keys["sender"])
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_ASK_BYTES if is_sender else MAX_HEAD_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))


_TURNED_AWAY = "and was turned away: the token is not this run's; both processes must be of one attempt; does another program listen there?"
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ZmqSender:
    """See `contract.RolloutSender`."""

    def __init__(self, run_dir: Path, host: str, port: int, num_ranks: int, keep: int = 1) -> None:
        self.num_ranks = num_ranks
        self._num_ignored = 0
        self._keep = keep
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(
            zmq.SNDHWM, 0
        )  # credit bounds what is queued; a full queue would drop
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            _authenticate(self._socket, is_sender=True)
            self._monitor = self._socket.get_monitor_socket(_HANDSHAKE_FAILED)
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OrreryError(
                f"rollout wire: cannot listen on {host}:{port} ({error}); choose a free port"
            ) from error
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._bulk = BulkSender(host)
        self.url = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._held: dict[int, Batch] = {}
        self._missing: dict[int, set[int]] = {}  # step -> ranks that have not acknowledged it
        self._last_taken: int | None = None  # by `send`, perhaps still waiting for room
        self._last_held: int | None = None
        self._wanted = -1
        self._waiting: dict[int, tuple[bytes, Ask]] = {}  # rank → peer, newest open ask
        self._answered: dict[
            int, tuple[bytes, int]
        ] = {}  # rank → peer, number of the last answered ask
        self._changed = asyncio.Condition()
        self._server: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def num_foreign(self) -> int:
        """The number of refused peers and ignored messages."""
        return self._num_ignored + self._bulk.num_foreign

    async def send(self, batch: Batch) -> None:
        batch.check(self.num_ranks, self._last_taken)
        self._last_taken = batch.step
        await self._until(lambda: len(self._held) < self._keep)
        self._held[batch.step] = batch
        self._missing[batch.step] = set(range(self.num_ranks))
        self._last_held = batch.step
        for peer, ask in list(self._waiting.values()):
            await self._answer(peer, ask)

    async def wanted(self, at_least: int = -1) -> int:
        await self._until(lambda: self._wanted >= at_least)
        return self._wanted

    async def drained(self, deadline_s: float | None) -> None:
        try:
            await asyncio.wait_for(self._until(lambda: not self._held), deadline_s)
        except TimeoutError:
            late = "; ".join(
                f"batch {step} by trainer rank {', '.join(map(str, sorted(ranks)))}"
                for step, ranks in self._missing.items()
            )
            raise RunFailed(
                f"rollout wire: waited {deadline_s:g} s for batches to be received: {late}; read logs/trainer.*.log"
            ) from None

    def close(self) -> None:
        for task in (self._server, self._watcher):
            if task is not None:
                task.cancel()
        self._bulk.close()
        self._held.clear()
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    async def _until(self, condition: Callable[[], bool]) -> None:
        if self._server is None:
            self._server = asyncio.create_task(self._serve(), name="rollout wire")
            self._watcher = asyncio.create_task(
                self._watch_handshakes(), name="rollout wire, handshakes"
            )
        async with self._changed:
            while True:
                if self._server.done():
                    cause = None if self._server.cancelled() else self._server.exception()
                    raise RunFailed(
                        f"rollout wire: the sender at {self.url} is closed ({cause or 'by close'})"
                    ) from cause
                if condition():
                    return
                await self._changed.wait()

    async def _serve(self) -> None:
        try:
            while True:
                peer, *parts = await self._socket.recv_multipart()
                message = self._read(parts)
                if message is None:
                    continue
                if isinstance(message, Done):
                    self._acknowledge(message.rank, message.step)
                else:
                    self._wanted = max(self._wanted, message.step)
                    self._acknowledge(message.rank, message.received)
                    if self._answered.get(message.rank) != (peer, message.number):
                        await self._answer(peer, message)
                async with self._changed:
                    self._changed.notify_all()
        finally:
            async with self._changed:
                self._changed.notify_all()

    async def _watch_handshakes(self) -> None:
        while True:
            await recv_monitor_message(self._monitor)
            self._count_foreign("a peer that does not hold this run's token")

    def _read(self, parts: list[bytes]) -> "Ask | Done | None":
        """The message, or None for one that is not of this protocol."""
        try:
            message = _to_sender.decode(parts[0]) if len(parts) == 1 else None
        except _NOT_OF_THE_PROTOCOL:
            message = None
        if (
            message is None
            or message.protocol != PROTOCOL
            or not 0 <= message.rank < self.num_ranks
        ):
            self._count_foreign("a message that is no ask of this protocol")
            return None
        return message

    def _count_foreign(self, why: str) -> None:
        self._num_ignored += 1
        if self._num_ignored.bit_count() == 1:  # 1, 2, 4, 8, …: a flood must not fill the disk
            log.warning("rollout wire: turned away %s (%d so far)", why, self._num_ignored)

    def _acknowledge(self, rank: int, up_to_step: int) -> None:
        self._bulk.forget(rank, up_to_step)
        for step in [step for step in self._held if step <= up_to_step]:
            self._missing[step].discard(rank)
            if not self._missing[step]:
                del self._held[step], self._missing[step]

    async def _answer(self, peer: bytes, ask: Ask) -> None:
        self._waiting.pop(ask.rank, None)
        batch = self._held.get(ask.step)
        skipped = [
            step for step in self._held if step < ask.step and ask.rank in self._missing[step]
        ]
        if skipped:
            answer: Any = Refusal(
                ask.number,
                f"batch {skipped[0]} comes first; trainer and orchestrator disagree about the next step",
            )
        elif batch is None:
            if self._last_held is None or ask.step > self._last_held:
                self._waiting[ask.rank] = (peer, ask)
                return
            answer = Refusal(
                ask.number, f"batch {ask.step} is gone, the wire is at batch {self._last_held}"
            )
        elif ask.micro_step == _HEAD:
            answer = BatchHead(
                ask.number, batch.step, len(batch.micro_batches[ask.rank]), batch.totals, batch.info
            )
        elif not 0 <= ask.micro_step < len(batch.micro_batches[ask.rank]):
            answer = Refusal(
                ask.number,
                f"batch {ask.step} has no micro-batch {ask.micro_step} on rank {ask.rank}",
            )
        else:
            micro_batch = batch.micro_batches[ask.rank][ask.micro_step]
            try:
                layout = layout_of(micro_batch)
            except ValueError as error:
                refusal = Refusal(ask.number, f"it cannot be sent: {error}")
                await self._post(peer, refusal)
                raise OrreryError(
                    f"batch {ask.step}: micro-batch {ask.micro_step} of rank {ask.rank} cannot be sent: {error}"
                ) from error
            ticket = self._bulk.issue(ask.rank, batch.step, micro_batch, layout)
            answer = MicroBatchHead(ask.number, batch.step, ask.micro_step, layout, ticket)
        await self._post(peer, answer)
        self._answered[ask.rank] = (peer, ask.number)

    async def _post(self, peer: bytes, message: Any) -> None:
        """Queue one message; a peer that has gone will ask again under a new identity."""
        try:
            await self._socket.send_multipart([peer, _encode(message)], copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise


class ZmqReceiver:
    """See `contract.RolloutReceiver`."""

    def __init__(self, run_dir: Path, url: str, rank: int) -> None:
        self.rank = rank
        self.url = url
        self._host = urlsplit(url).hostname or ""
        self._number = 0
        self._received = -1
        self._buffers = BufferPool()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # waiting asks are small and few; see `_send`
        self._socket.setsockopt(zmq.LINGER, 500)  # lets the last `Done` out
        try:
            _authenticate(self._socket, is_sender=False)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._monitor = self._socket.get_monitor_socket(
            _HANDSHAKE_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        self._num_failed_handshakes = 0
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(url)

    def receive(self, step: int, deadline_s: float) -> ReceivedBatch:
        head = self._await(self._ask(step, _HEAD), BatchHead, deadline_s)
        count = head.num_micro_batches
        if count == 0:
            self._done(step)
        return ReceivedBatch(
            step, self.rank, count, head.totals, head.info, self._stream(step, count, deadline_s)
        )

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()

    def _stream(self, step: int, num_micro_batches: int, deadline_s: float) -> Iterator[Columns]:
        ask = self._ask(step, 0) if num_micro_batches else None
        for micro_step in range(num_micro_batches):
            assert ask is not None
            head = self._await(ask, MicroBatchHead, deadline_s)
            if head.micro_step != micro_step:
                raise RunFailed(
                    f"{self._who(ask)} got micro-batch {head.micro_step} instead; sender and receiver differ in version"
                )
            following = (
                self._ask(step, micro_step + 1) if micro_step + 1 < num_micro_batches else None
            )
            columns = self._gather(ask, head, deadline_s)
            if following is None:
                self._done(
                    step
                )  # before the yield: a reader that stops at the last micro-batch has everything
            ask = following
            yield columns

    def _done(self, step: int) -> None:
        self._received = step
        with contextlib.suppress(RunFailed):  # the next ask raises it
            self._send(
                Done(PROTOCOL, self.rank, step), f"trainer rank {self.rank} has batch {step}"
            )

    def _send(self, message: Ask | Done, who: str) -> None:
        try:
            self._socket.send(_encode(message), zmq.NOBLOCK)
        except zmq.Again:  # libzmq gave up: the peer does not speak its protocol
            raise RunFailed(f"{who} {_TURNED_AWAY}") from None

    def _ask(self, step: int, micro_step: int) -> Ask:
        self._number += 1
        ask = Ask(PROTOCOL, self.rank, step, micro_step, self._number, self._received)
        self._send(ask, self._who(ask))
        return ask

    def _await(
        self, ask: Ask, kind: type[BatchHead] | type[MicroBatchHead], deadline_s: float
    ) -> Any:
        """Return the head that answers `ask`; skip heads of older asks."""
        start = asked = time.monotonic()
        while True:
            frame = self._next(ask, min(start + deadline_s, asked + ASK_AGAIN_S))
            now = time.monotonic()
            if frame is None:
                if now >= start + deadline_s:
                    raise RunFailed(
                        f"{self._who(ask)}, but nothing came within {deadline_s:g} s; read logs/orchestrator.0.log"
                    )
                self._send(ask, self._who(ask))
                asked = now
            else:
                try:
                    message = _to_receiver.decode(frame.buffer)
                except _NOT_OF_THE_PROTOCOL as error:
                    raise RunFailed(
                        f"{self._who(ask)}, but got bytes that are no answer ({error}); are both of one version?"
                    ) from error
                if message.number not in (ask.number, 0):
                    continue
                if isinstance(message, Refusal):
                    raise RunFailed(f"{self._who(ask)} and was refused: {message.reason}")
                if type(message) is not kind or message.step != ask.step:
                    raise RunFailed(
                        f"{self._who(ask)}, but got {type(message).__name__} of batch {message.step}"
                    )
                return message

    def _gather(self, ask: Ask, head: MicroBatchHead, deadline_s: float) -> Columns:
        """The chunks of one micro-batch, gathered into one buffer, as columns."""
        try:
            head.layout.check()
        except ValueError as error:
            raise RunFailed(f"{self._who(ask)}, but its layout is damaged: {error}") from error
        buffer = self._buffers.take(head.layout.num_bytes)
        filled, moved = 0, time.monotonic()
        while True:
            reached = fetch(
                self._host, head.ticket, filled, buffer.data, min(SILENCE_S, deadline_s)
            )
            if reached == len(buffer):
                break
            now = time.monotonic()
            moved = now if reached > filled else moved
            filled = reached
            if now >= moved + deadline_s:
                raise RunFailed(
                    f"{self._who(ask)}, but after {filled} of {len(buffer)} bytes nothing came for {deadline_s:g} s; "
                    "read logs/orchestrator.0.log"
                )
            time.sleep(FETCH_AGAIN_S)
            ask = self._ask(
                ask.step, ask.micro_step
            )  # under a new number: the sender answers each number once
            head = self._await(ask, MicroBatchHead, moved + deadline_s - now)
            if head.layout.num_bytes != len(buffer):
                raise RunFailed(
                    f"{self._who(ask)}, but it has {head.layout.num_bytes} bytes now and had {len(buffer)} before"
                )
        try:
            return columns_from(head.layout, buffer)
        except ValueError as error:
            raise RunFailed(f"{self._who(ask)}, but it does not decode: {error}") from error

    def _next(self, ask: Ask, until: float) -> zmq.Frame | None:
        """Return the next message, or None at `until`.

        Raises RunFailed if the peer at the URL is not this run's orchestrator.
        """
        while True:
            ready = dict(self._poller.poll(max(0, int((until - time.monotonic()) * 1000) + 1)))
            if self._monitor in ready:
                self._count_handshake(ask, recv_monitor_message(self._monitor)["event"])
            if self._socket in ready:
                return self._socket.recv_multipart(copy=False)[-1]
            if not ready:
                return None

    def _count_handshake(self, ask: Ask, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._num_failed_handshakes = 0
            return
        self._num_failed_handshakes += 1
        if (
            event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            or self._num_failed_handshakes >= NUM_HANDSHAKES
        ):
            raise RunFailed(f"{self._who(ask)} {_TURNED_AWAY}")

    def _who(self, ask: Ask) -> str:
        what = (
            f"batch {ask.step}"
            if ask.micro_step == _HEAD
            else f"micro-batch {ask.micro_step} of batch {ask.step}"
        )
        return f"trainer rank {self.rank} asked the orchestrator at {self.url} for {what}"
