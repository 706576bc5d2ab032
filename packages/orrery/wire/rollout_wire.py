"""Send batches from the orchestrator to the trainer's ranks.

- A rank (receiver) sends `BatchAsk(step, rank, micro_step)`. The orchestrator (sender) answers once
  the batch exists, so ranks can join or restart at any time.
- The answer to `micro_step` −1 holds the batch's totals and info. Other answers hold a ticket for
  the micro-batch (`sockets.py`).
- Ranks repeat unanswered asks. Repeats on one connection get one answer.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.wire.columns import ColumnLayout, Columns, MicroBatch, columns_from, layout_of
from orrery.wire.sockets import (
    HANDSHAKE_FAILED,
    NOT_OF_THE_PROTOCOL,
    PROTOCOL,
    BufferPool,
    BulkSender,
    ControlSocket,
    Ticket,
    authenticate,
    fetch,
)

ASK_AGAIN_S = 2.0
FETCH_AGAIN_S = 0.1
SILENCE_S = 10.0  # longest silence before a rank reconnects
NUM_HANDSHAKES = 5  # consecutive failed handshakes that raise RunFailed
_HEAD = -1


@dataclass(frozen=True)
class Batch:
    """One optimizer step's data.

    - `micro_batches[rank][micro_step]`: equally many per rank. Arrays must not change until all
      ranks acknowledge the batch.
    - `totals` (token counts for the loss) and `info`: JSON values.
    """

    step: int
    micro_batches: Sequence[Sequence[MicroBatch]]
    totals: dict[str, int | float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    def check(self, num_ranks: int, after_step: int | None) -> None:
        counts = [len(of_rank) for of_rank in self.micro_batches]
        if len(counts) != num_ranks or len(set(counts)) != 1:
            raise OrreryError(
                f"batch {self.step}: the ranks have {counts} micro-batches; "
                f"expected {num_ranks} ranks with equal counts"
            )
        if after_step is not None and self.step <= after_step:
            raise OrreryError(
                f"batch {self.step}: the wire already took batch {after_step}; steps must increase"
            )


@dataclass(frozen=True)
class ReceivedBatch:
    """One rank's part of a batch. Iteration fetches the data, and works once."""

    step: int
    rank: int
    num_micro_batches: int
    totals: dict[str, int | float]
    info: dict[str, Any]
    micro_batches: Iterator[Columns]

    def __iter__(self) -> Iterator[Columns]:
        return self.micro_batches


class BatchAsk(msgspec.Struct, tag="ask"):
    protocol: int
    rank: int
    step: int
    micro_step: int
    number: int
    received: int  # newest received step, or −1


class Acknowledgement(msgspec.Struct, tag="done"):
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
    layout: ColumnLayout
    ticket: Ticket


class Refusal(msgspec.Struct, tag="refusal"):
    number: int
    reason: str


Answer = BatchHead | MicroBatchHead | Refusal

_encode = msgspec.msgpack.Encoder().encode
_to_receiver = msgspec.msgpack.Decoder(Answer)


_TURNED_AWAY = (
    "and was refused: the orchestrator has the token of another attempt. Restart the stage. "
    "If that does not help, another program listens there"
)


class RolloutSender:
    """Send batches to all trainer ranks. Use one event loop only."""

    def __init__(self, host: str, port: int, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.control = ControlSocket(host, port)
        for kind in (BatchAsk, Acknowledgement):
            self.control.route(kind, self._handle)
        self._bulk = BulkSender(host)
        self.url = self.control.url
        self._held: dict[int, Batch] = {}
        self._missing: dict[int, set[int]] = {}
        self._last_taken: int | None = None
        self._last_held: int | None = None
        self._wanted = -1
        self._waiting: dict[int, tuple[bytes, BatchAsk]] = {}
        self._answered: dict[int, tuple[bytes, int]] = {}
        self._changed = asyncio.Condition()

    @property
    def num_foreign(self) -> int:
        return self.control.num_foreign + self._bulk.num_foreign

    async def send(self, batch: Batch) -> None:
        """Wait until all ranks have earlier batches, then send in the background."""
        batch.check(self.num_ranks, self._last_taken)
        self._last_taken = batch.step
        await self._until(lambda: not self._held)
        self._held[batch.step] = batch
        self._missing[batch.step] = set(range(self.num_ranks))
        self._last_held = batch.step
        for peer, ask in list(self._waiting.values()):
            await self._answer(peer, ask)

    async def wanted(self, at_least: int = -1) -> int:
        """Wait until a rank asks for step `at_least` or later. Return the newest step asked for."""
        await self._until(lambda: self._wanted >= at_least)
        return self._wanted

    async def drained(self, deadline_s: float | None) -> None:
        """Wait until ranks have all batches. Raise RunFailed after `deadline_s` (None: never)."""
        try:
            await asyncio.wait_for(self._until(lambda: not self._held), deadline_s)
        except TimeoutError:
            late = "; ".join(
                f"batch {step} by trainer rank {', '.join(map(str, sorted(ranks)))}"
                for step, ranks in self._missing.items()
            )
            raise RunFailed(
                f"rollout wire: waited {deadline_s:g} s for batches to be received: {late}. "
                "Read logs/trainer.*.log"
            ) from None

    def close(self) -> None:
        self._bulk.close()
        self._held.clear()
        self.control.close()

    async def _until(self, condition: Callable[[], bool]) -> None:
        server = self.control.start(self._notify)
        async with self._changed:
            while True:
                if server.done():
                    cause = None if server.cancelled() else server.exception()
                    raise RunFailed(
                        f"rollout wire: the sender at {self.url} is closed ({cause or 'by close'})"
                    ) from cause
                if condition():
                    return
                await self._changed.wait()

    async def _handle(self, peer: bytes, message: BatchAsk | Acknowledgement) -> bool:
        if not self._is_ours(message):
            return False
        if isinstance(message, Acknowledgement):
            self._acknowledge(message.rank, message.step)
        else:
            self._wanted = max(self._wanted, message.step)
            self._acknowledge(message.rank, message.received)
            if self._answered.get(message.rank) != (peer, message.number):
                await self._answer(peer, message)
        await self._notify()
        return True

    def _is_ours(self, message: BatchAsk | Acknowledgement) -> bool:
        return message.protocol == PROTOCOL and 0 <= message.rank < self.num_ranks

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _acknowledge(self, rank: int, up_to_step: int) -> None:
        self._bulk.forget(rank, up_to_step)
        for step in [step for step in self._held if step <= up_to_step]:
            self._missing[step].discard(rank)
            if not self._missing[step]:
                del self._held[step], self._missing[step]

    async def _answer(self, peer: bytes, ask: BatchAsk) -> None:
        self._waiting.pop(ask.rank, None)
        try:
            answer = self._answer_to(ask)
        except OrreryError as error:
            reason = f"it cannot be sent: {error.__cause__ or error}"
            await self.control.post(peer, Refusal(ask.number, reason))
            raise
        if answer is None:
            self._waiting[ask.rank] = (peer, ask)
            return
        await self.control.post(peer, answer)
        self._answered[ask.rank] = (peer, ask.number)

    def _answer_to(self, ask: BatchAsk) -> Answer | None:
        step, rank, number = ask.step, ask.rank, ask.number
        for other in self._held:
            if other < step and rank in self._missing[other]:
                reason = "trainer and orchestrator disagree about the next step"
                return Refusal(number, f"batch {other} comes first; {reason}")
        batch = self._held.get(step)
        if batch is None:
            if self._last_held is None or step > self._last_held:
                return None
            return Refusal(number, f"that batch is removed, the newest batch is {self._last_held}")
        micro_batches = batch.micro_batches[rank]
        if ask.micro_step == _HEAD:
            return BatchHead(number, step, len(micro_batches), batch.totals, batch.info)
        if not 0 <= ask.micro_step < len(micro_batches):
            reason = f"batch {step} has no micro-batch {ask.micro_step} on rank {rank}"
            return Refusal(number, reason)
        micro_batch = micro_batches[ask.micro_step]
        try:
            layout = layout_of(micro_batch)
        except ValueError as error:
            raise OrreryError(
                f"batch {step}: micro-batch {ask.micro_step} of rank {rank} cannot be sent: {error}"
            ) from error
        ticket = self._bulk.issue(rank, step, micro_batch, layout)
        return MicroBatchHead(number, step, ask.micro_step, layout, ticket)


class RolloutReceiver:
    """Receive one rank's parts of batches. All calls block."""

    def __init__(self, url: str, rank: int) -> None:
        self.rank = rank
        self.url = url
        self._host = urlsplit(url).hostname or ""
        self._number = 0
        self._received = -1
        self._buffers = BufferPool()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # no limit: `_send` fails on a full queue
        self._socket.setsockopt(zmq.LINGER, 500)
        try:
            authenticate(self._socket, is_sender=False)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        events = HANDSHAKE_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._monitor = self._socket.get_monitor_socket(events)
        self._num_failed_handshakes = 0
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(url)

    def receive(self, step: int, deadline_s: float) -> ReceivedBatch:
        """Return this rank's part of batch `step`, or raise RunFailed.

        `deadline_s` limits each wait for the sender, also during iteration.
        """
        head = self._await(self._ask(step, _HEAD), BatchHead, deadline_s)
        count = head.num_micro_batches
        if count == 0:
            self._done(step)
        stream = self._stream(step, count, deadline_s)
        return ReceivedBatch(step, self.rank, count, head.totals, head.info, stream)

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
                    f"{self._asked(ask)} got micro-batch {head.micro_step} instead. "
                    "Check that trainer and orchestrator run the same code"
                )
            is_last = micro_step + 1 == num_micro_batches
            following = None if is_last else self._ask(step, micro_step + 1)
            columns = self._gather(ask, head, deadline_s)
            if is_last:
                self._done(step)  # before `yield`: the caller may stop iterating
            ask = following
            yield columns

    def _done(self, step: int) -> None:
        self._received = step
        done = Acknowledgement(PROTOCOL, self.rank, step)
        with contextlib.suppress(RunFailed):  # the next `_ask` raises this error
            self._send(done, f"trainer rank {self.rank} has batch {step}")

    def _send(self, message: BatchAsk | Acknowledgement, asked: str) -> None:
        try:
            self._socket.send(_encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise RunFailed(f"{asked} {_TURNED_AWAY}") from None

    def _ask(self, step: int, micro_step: int) -> BatchAsk:
        self._number += 1
        ask = BatchAsk(PROTOCOL, self.rank, step, micro_step, self._number, self._received)
        self._send(ask, self._asked(ask))
        return ask

    def _await(
        self, ask: BatchAsk, kind: type[BatchHead] | type[MicroBatchHead], deadline_s: float
    ) -> Any:
        start = last_asked = time.monotonic()
        while True:
            frame = self._next(ask, min(start + deadline_s, last_asked + ASK_AGAIN_S))
            if frame is None:
                last_asked = time.monotonic()
                if last_asked >= start + deadline_s:
                    raise RunFailed(
                        f"{self._asked(ask)}, but got no answer within {deadline_s:g} s. "
                        "Read logs/orchestrator.0.log"
                    )
                self._send(ask, self._asked(ask))
                continue
            try:
                message = _to_receiver.decode(frame.buffer)
            except NOT_OF_THE_PROTOCOL as error:
                raise RunFailed(
                    f"{self._asked(ask)}, but got bytes that are no answer ({error}). "
                    "Check that trainer and orchestrator run the same code"
                ) from error
            if message.number not in (ask.number, 0):
                continue
            if isinstance(message, Refusal):
                raise RunFailed(f"{self._asked(ask)} and was refused: {message.reason}")
            if type(message) is not kind or message.step != ask.step:
                name = type(message).__name__
                raise RunFailed(f"{self._asked(ask)}, but got {name} of batch {message.step}")
            return message

    def _gather(self, ask: BatchAsk, head: MicroBatchHead, deadline_s: float) -> Columns:
        try:
            head.layout.check()
        except ValueError as error:
            raise RunFailed(f"{self._asked(ask)}, but its layout is damaged: {error}") from error
        buffer = self._buffers.take(head.layout.num_bytes)
        filled, moved = 0, time.monotonic()
        silence_s = min(SILENCE_S, deadline_s)
        while True:
            reached = fetch(self._host, head.ticket, filled, buffer.data, silence_s)
            if reached == len(buffer):
                break
            now = time.monotonic()
            moved = now if reached > filled else moved
            filled = reached
            if now >= moved + deadline_s:
                raise RunFailed(
                    f"{self._asked(ask)}, but after {filled} of {len(buffer)} bytes no byte came "
                    f"for {deadline_s:g} s. Read logs/orchestrator.0.log"
                )
            time.sleep(FETCH_AGAIN_S)
            ask = self._ask(ask.step, ask.micro_step)
            head = self._await(ask, MicroBatchHead, moved + deadline_s - now)
            if head.layout.num_bytes != len(buffer):
                raise RunFailed(
                    f"{self._asked(ask)}, but its size changed from {len(buffer)} to "
                    f"{head.layout.num_bytes} bytes"
                )
        try:
            return columns_from(head.layout, buffer)
        except ValueError as error:
            raise RunFailed(f"{self._asked(ask)}, but its data is damaged: {error}") from error

    def _next(self, ask: BatchAsk, until: float) -> zmq.Frame | None:
        while True:
            ready = dict(self._poller.poll(max(0, int((until - time.monotonic()) * 1000) + 1)))
            if self._monitor in ready:
                self._count_handshake(ask, recv_monitor_message(self._monitor)["event"])
            if self._socket in ready:
                return self._socket.recv_multipart(copy=False)[-1]
            if not ready:
                return None

    def _count_handshake(self, ask: BatchAsk, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._num_failed_handshakes = 0
            return
        self._num_failed_handshakes += 1
        is_foreign = event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        if is_foreign or self._num_failed_handshakes >= NUM_HANDSHAKES:
            raise RunFailed(f"{self._asked(ask)} {_TURNED_AWAY}")

    def _asked(self, ask: BatchAsk) -> str:
        what = f"batch {ask.step}"
        if ask.micro_step != _HEAD:
            what = f"micro-batch {ask.micro_step} of {what}"
        return f"trainer rank {self.rank} asked the orchestrator at {self.url} for {what}"
