"""Rollouts over ZeroMQ: ROUTER in the orchestrator, DEALER in each trainer rank.

- A receiver sends `Ask(step, rank, micro_step)`; `micro_step` −1 asks for the batch's head. The answer to a micro-batch is
  its layout, then chunks of the run of bytes, each a message of its own: `[ask number, offset | bytes]`.
- Credit: a receiver has at most two micro-batches asked for; inside one, the chunks that it has not read wait in the
  sender as references to the parts, so neither end holds more than two micro-batches, and the sender holds no copy.
- The gathering copy is the receiver's: chunks land in one buffer, which is the packed micro-batch.
- An ask is repeated until it is answered, and under a new number where its chunks stop in the middle, so a lost connection
  heals; an ask that was answered on the same connection is not answered twice. Messages that do not decode, or carry
  another run's token, are counted and never believed.
"""

import asyncio
import hmac
import logging
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.transport.buffers import BufferPool
from orrery.transport.column_bytes import Layout, chunks, columns_from, layout_of, segments
from orrery.transport.columns import Columns
from orrery.transport.rollout_wire.contract import Batch, ReceivedBatch
from orrery.transport.token import run_token

PROTOCOL = 1
CHUNK_BYTES = 1 << 20
RECEIVE_AHEAD_CHUNKS = 16
ASK_AGAIN_S = 2.0
_HEAD = -1
_CHUNK = struct.Struct("<QQ")  # ask number, offset in the run of bytes

log = logging.getLogger(__name__)


class Ask(msgspec.Struct, tag="ask"):
    protocol: int
    token: str
    rank: int
    step: int
    micro_step: int
    number: int
    received: int  # the last step that this receiver has whole, −1 before the first


class Done(msgspec.Struct, tag="done"):
    """This rank has everything of `step`."""

    protocol: int
    token: str
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


class Refusal(msgspec.Struct, tag="refusal"):
    number: int
    reason: str


_encode = msgspec.msgpack.Encoder().encode
_to_sender = msgspec.msgpack.Decoder(Ask | Done)
_to_receiver = msgspec.msgpack.Decoder(BatchHead | MicroBatchHead | Refusal)


class ZmqSender:
    """See `contract.RolloutSender`."""

    def __init__(self, run_dir: Path, host: str, port: int, num_ranks: int, keep: int = 1) -> None:
        self.num_ranks = num_ranks
        self.num_foreign = 0
        self._keep = keep
        self._token = run_token()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # credit bounds what is queued; a full queue would drop
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OrreryError(f"rollout wire: cannot listen on {host}:{port} ({error}); choose a free port") from error
        self.url = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._held: dict[int, Batch] = {}
        self._missing: dict[int, set[int]] = {}  # step -> ranks that have not acknowledged it
        self._last_taken: int | None = None  # by `send`, perhaps still waiting for room
        self._last_held: int | None = None
        self._wanted = -1
        self._waiting: dict[bytes, Ask] = {}  # peer -> its newest ask that nothing answers yet
        self._answered: dict[bytes, int] = {}  # peer -> number of its last answered ask
        self._changed = asyncio.Condition()
        self._server: asyncio.Task[None] | None = None

    async def send(self, batch: Batch) -> None:
        batch.check(self.num_ranks, self._last_taken)
        self._last_taken = batch.step
        await self._until(lambda: len(self._held) < self._keep)
        self._held[batch.step] = batch
        self._missing[batch.step] = set(range(self.num_ranks))
        self._last_held = batch.step
        for peer, ask in list(self._waiting.items()):
            await self._answer(peer, ask)

    async def wanted(self, at_least: int = -1) -> int:
        await self._until(lambda: self._wanted >= at_least)
        return self._wanted

    async def drained(self, deadline_s: float | None) -> None:
        try:
            await asyncio.wait_for(self._until(lambda: not self._held), deadline_s)
        except TimeoutError:
            late = "; ".join(f"batch {step} by trainer rank {', '.join(map(str, sorted(ranks)))}" for step, ranks in self._missing.items())
            raise RunFailed(f"rollout wire: waited {deadline_s:g} s for batches to be received: {late}; read logs/trainer.*.log") from None

    def close(self) -> None:
        if self._server is not None:
            self._server.cancel()
        self._held.clear()
        self._context.destroy(linger=0)

    async def _until(self, condition: Callable[[], bool]) -> None:
        if self._server is None:
            self._server = asyncio.create_task(self._serve(), name="rollout wire")
        async with self._changed:
            while True:
                if self._server.done():
                    cause = None if self._server.cancelled() else self._server.exception()
                    raise RunFailed(f"rollout wire: the sender at {self.url} is closed ({cause or 'by close'})") from cause
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
                if not hmac.compare_digest(message.token.encode(), self._token.encode()):
                    self._count_foreign("carries another run's token")
                    refusal = Refusal(getattr(message, "number", 0), "the token is not this run's; both processes must be of one attempt")
                    await self._post(peer, [_encode(refusal)])
                    continue
                if isinstance(message, Done):
                    self._acknowledge(message.rank, message.step)
                else:
                    self._wanted = max(self._wanted, message.step)
                    self._acknowledge(message.rank, message.received)
                    if self._answered.get(peer) != message.number:
                        await self._answer(peer, message)
                async with self._changed:
                    self._changed.notify_all()
        finally:
            async with self._changed:
                self._changed.notify_all()

    def _read(self, parts: list[bytes]) -> "Ask | Done | None":
        """The message, or None for one that is not of this protocol."""
        try:
            message = _to_sender.decode(parts[0]) if len(parts) == 1 else None
        except msgspec.DecodeError:
            message = None
        if message is None or message.protocol != PROTOCOL or not 0 <= message.rank < self.num_ranks:
            self._count_foreign("is no ask of this protocol")
            return None
        return message

    def _count_foreign(self, why: str) -> None:
        self.num_foreign += 1
        log.warning("rollout wire: ignored a message that %s (%d so far)", why, self.num_foreign)

    def _acknowledge(self, rank: int, up_to_step: int) -> None:
        for step in [step for step in self._held if step <= up_to_step]:
            self._missing[step].discard(rank)
            if not self._missing[step]:
                del self._held[step], self._missing[step]

    async def _answer(self, peer: bytes, ask: Ask) -> None:
        self._waiting.pop(peer, None)
        batch = self._held.get(ask.step)
        skipped = [step for step in self._held if step < ask.step and ask.rank in self._missing[step]]
        if skipped:
            answer: Any = Refusal(ask.number, f"batch {skipped[0]} comes first; trainer and orchestrator disagree about the next step")
        elif batch is None:
            if self._last_held is None or ask.step > self._last_held:
                self._waiting[peer] = ask
                return
            answer = Refusal(ask.number, f"batch {ask.step} is gone, the wire is at batch {self._last_held}")
        elif ask.micro_step == _HEAD:
            answer = BatchHead(ask.number, batch.step, len(batch.micro_batches[ask.rank]), batch.totals, batch.info)
        elif not 0 <= ask.micro_step < len(batch.micro_batches[ask.rank]):
            answer = Refusal(ask.number, f"batch {ask.step} has no micro-batch {ask.micro_step} on rank {ask.rank}")
        else:
            micro_batch = batch.micro_batches[ask.rank][ask.micro_step]
            try:
                layout = layout_of(micro_batch)
            except ValueError as error:
                refusal = Refusal(ask.number, f"it cannot be sent: {error}")
                await self._post(peer, [_encode(refusal)])
                raise OrreryError(f"batch {ask.step}: micro-batch {ask.micro_step} of rank {ask.rank} cannot be sent: {error}") from error
            await self._post(peer, [_encode(MicroBatchHead(ask.number, batch.step, ask.micro_step, layout))])
            offset = 0
            for chunk in chunks(segments(micro_batch, layout), CHUNK_BYTES):
                await self._post(peer, [_CHUNK.pack(ask.number, offset), chunk])
                offset += len(chunk)
            self._answered[peer] = ask.number
            return
        await self._post(peer, [_encode(answer)])
        self._answered[peer] = ask.number

    async def _post(self, peer: bytes, parts: list[Any]) -> None:
        """Queue one message; a peer that has gone will ask again under a new identity."""
        try:
            await self._socket.send_multipart([peer, *parts], copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._waiting.pop(peer, None)
            self._answered.pop(peer, None)


class ZmqReceiver:
    """See `contract.RolloutReceiver`."""

    def __init__(self, run_dir: Path, url: str, rank: int) -> None:
        self.rank = rank
        self.url = url
        self._token = run_token()
        self._number = 0
        self._received = -1
        self._buffers = BufferPool()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 500)  # lets the last `Done` out
        self._socket.setsockopt(zmq.RCVHWM, RECEIVE_AHEAD_CHUNKS)
        self._socket.connect(url)

    def receive(self, step: int, deadline_s: float) -> ReceivedBatch:
        head = self._await(self._ask(step, _HEAD), BatchHead, deadline_s)
        count = head.num_micro_batches
        if count == 0:
            self._done(step)
        return ReceivedBatch(step, self.rank, count, head.totals, head.info, self._stream(step, count, deadline_s))

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _stream(self, step: int, num_micro_batches: int, deadline_s: float) -> Iterator[Columns]:
        ask = self._ask(step, 0) if num_micro_batches else None
        for micro_step in range(num_micro_batches):
            assert ask is not None
            head = self._await(ask, MicroBatchHead, deadline_s)
            if head.micro_step != micro_step:
                raise RunFailed(f"{self._who(ask)} got micro-batch {head.micro_step} instead; sender and receiver differ in version")
            following = self._ask(step, micro_step + 1) if micro_step + 1 < num_micro_batches else None
            columns = self._gather(ask, head, deadline_s)
            if following is None:
                self._done(step)  # before the yield: a reader that stops at the last micro-batch has everything
            ask = following
            yield columns

    def _done(self, step: int) -> None:
        self._received = step
        self._socket.send(_encode(Done(PROTOCOL, self._token, self.rank, step)))

    def _ask(self, step: int, micro_step: int) -> Ask:
        self._number += 1
        ask = Ask(PROTOCOL, self._token, self.rank, step, micro_step, self._number, self._received)
        self._socket.send(_encode(ask))
        return ask

    def _await(self, ask: Ask, kind: type[BatchHead] | type[MicroBatchHead], deadline_s: float) -> Any:
        """The head that answers `ask`; heads and chunks of older asks are passed over."""
        start = asked = time.monotonic()
        while True:
            parts = self._next(min(start + deadline_s, asked + ASK_AGAIN_S))
            now = time.monotonic()
            if parts is None:
                if now >= start + deadline_s:
                    raise RunFailed(f"{self._who(ask)}, but nothing came within {deadline_s:g} s; read logs/orchestrator.0.log")
                self._socket.send(_encode(ask))
                asked = now
            elif len(parts) == 1:
                try:
                    message = _to_receiver.decode(parts[0].buffer)
                except msgspec.DecodeError as error:
                    raise RunFailed(
                        f"{self._who(ask)}, but got bytes that are no answer ({error}); does another program listen there?"
                    ) from error
                if message.number not in (ask.number, 0):
                    continue
                if isinstance(message, Refusal):
                    raise RunFailed(f"{self._who(ask)} and was refused: {message.reason}")
                if type(message) is not kind or message.step != ask.step:
                    raise RunFailed(f"{self._who(ask)}, but got {type(message).__name__} of batch {message.step}")
                return message

    def _gather(self, ask: Ask, head: MicroBatchHead, deadline_s: float) -> Columns:
        """The chunks of one micro-batch, gathered into one buffer, as columns."""
        try:
            head.layout.check()
        except ValueError as error:
            raise RunFailed(f"{self._who(ask)}, but its layout is damaged: {error}") from error
        buffer = self._buffers.take(head.layout.num_bytes)
        numbers, filled = {ask.number}, 0
        moved = asked = time.monotonic()
        while filled < len(buffer):
            parts = self._next(min(moved + deadline_s, asked + ASK_AGAIN_S))
            if parts is None:
                asked = time.monotonic()
                if asked >= moved + deadline_s:
                    raise RunFailed(
                        f"{self._who(ask)}, but after {filled} of {len(buffer)} bytes nothing came for {deadline_s:g} s; "
                        "read logs/orchestrator.0.log"
                    )
                numbers.add(self._ask(ask.step, ask.micro_step).number)  # a new one: the sender answers each number once
                continue
            if len(parts) != 2 or len(parts[0]) != _CHUNK.size:
                continue
            number, offset = _CHUNK.unpack(parts[0].buffer)
            if number not in numbers or offset < filled:  # of an older ask, or here already
                continue
            chunk = parts[1].buffer
            if offset != filled or filled + len(chunk) > len(buffer):
                raise RunFailed(f"{self._who(ask)}, but a chunk at byte {offset} came where byte {filled} was next")
            buffer[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
            moved = asked = time.monotonic()
        try:
            return columns_from(head.layout, buffer)
        except ValueError as error:
            raise RunFailed(f"{self._who(ask)}, but it does not decode: {error}") from error

    def _next(self, until: float) -> list[zmq.Frame] | None:
        """The parts of the next message, or None at `until`."""
        timeout_ms = max(0, int((until - time.monotonic()) * 1000) + 1)
        if not self._socket.poll(timeout_ms):
            return None
        return self._socket.recv_multipart(copy=False)

    def _who(self, ask: Ask) -> str:
        what = f"batch {ask.step}" if ask.micro_step == _HEAD else f"micro-batch {ask.micro_step} of batch {ask.step}"
        return f"trainer rank {self.rank} asked the orchestrator at {self.url} for {what}"
