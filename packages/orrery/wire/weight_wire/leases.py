"""Lease a policy version for its transfer over a direct wire (NCCL or NIXL). Needs no torch.

The orchestrator leases a version from trainer rank 0. The next optimizer step waits until the lease
is released or the version is sent. Lost, late and duplicate messages do no harm.
"""

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq

from orrery.manifest.errors import RunFailed
from orrery.runtime.timing import scaled
from orrery.wire.sockets import NOT_OF_THE_PROTOCOL, ControlSocket, dealer

# vLLM passes on only the text of errors, so these phrases identify them.
ELSEWHERE = "failed elsewhere"
GONE = "can no longer be had"
ROUND_S = 60.0  # limit of one round (`plan`)
LEASE_S = 120.0  # limit for the trainer's answer
REPEAT_S = 1.0
STOP_S = 0.2


class WireFailed(RunFailed):
    """A transfer of weights failed."""


class TransferFailed(WireFailed):
    """A transfer failed because of another process. A retry may succeed."""

    def __init__(self, transfer: int, why: object) -> None:
        super().__init__(f"transfer {transfer} {ELSEWHERE}: {why}")


class Published(msgspec.Struct, frozen=True, omit_defaults=True):
    """A policy version for engines.

    - `fingerprints`: by Hugging Face's tensor name. `digest` is their hash.
    - `canary`: log-probs of a test prompt's tokens after the first, or empty.
    - `transfer`: the transfer's number on a direct wire, or 0.
    """

    version: int
    path: str
    fingerprints: dict[str, int]
    digest: str
    canary: tuple[float, ...] = ()
    transfer: int = 0

    @property
    def folder(self) -> Path:
        return Path(self.path)


class LeaseRequest(msgspec.Struct, frozen=True, tag="lease"):
    session: str  # random, one per orchestrator process
    number: int
    version: int | None = None  # None: release the lease
    engines: tuple[str, ...] = ()


class LeaseReport(msgspec.Struct, frozen=True, tag="leased"):
    session: str = ""
    number: int = 0
    transfer: int = 0  # 0: no transfer
    refusal: str = ""


class Transfer(msgspec.Struct, frozen=True):
    """A transfer. Later transfers have higher numbers."""

    number: int
    version: int
    engines: tuple[str, ...]


class LeaseTable:
    """Trainer rank 0's only lease, and its transfer. Thread-safe."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._open: int | None = None  # version that transfers may read
        self._is_accepting = False
        self._request = LeaseRequest("", 0)
        self._report = LeaseReport()
        self._leased: int | None = None
        self._num_transfers = 0
        self._is_sent = self._is_busy = False

    @property
    def report(self) -> LeaseReport:
        with self.changed:
            return self._report

    def open(self, version: int) -> None:
        with self.changed:
            self._open, self._is_accepting = version, True

    def apply(self, request: LeaseRequest) -> LeaseReport:
        """Apply a request, unless it is late or repeated. Return the newest report."""
        with self.changed:
            is_same = request.session == self._request.session
            if is_same and request.number <= self._request.number:
                return self._report
            version, transfer, refusal = request.version, 0, ""
            is_renewed = is_same and version == self._leased
            self._request, self._leased = request, None
            if version is not None and version == self._open and (is_renewed or self._is_accepting):
                self._leased = version
                if request.engines:
                    self._num_transfers += 1
                    transfer, self._is_sent = self._num_transfers, False
            elif version is not None:
                refusal = f"version {version} {GONE}"
            self._report = LeaseReport(request.session, request.number, transfer, refusal)
            self.changed.notify_all()
            return self._report

    def transfer(self, number: int) -> Transfer | None:
        with self.changed:
            request = self._request
            if number != self._report.transfer or request.version is None:
                return None
            return Transfer(number, request.version, request.engines)

    def admit(self, transfer: Transfer) -> str:
        """Start the transfer and return "", or return why not."""
        with self.changed:
            if transfer.version != self._open:
                return f"version {transfer.version} {GONE}"
            if transfer.number != self._report.transfer:
                return "it was given up"
            self._is_busy = True
            return ""

    def finish(self, number: int = 0, is_sent: bool = False) -> None:
        with self.changed:
            self._is_busy = False
            if is_sent and number == self._report.transfer:
                self._is_sent = True
            self.changed.notify_all()

    def settle(self, version: int, limit_s: float, check: Callable[[], object]) -> None:
        """Refuse new leases. Wait for the current lease to end, calling `check` meanwhile.

        Raise WireFailed after `limit_s` seconds.
        """
        end = time.perf_counter() + limit_s
        with self.changed:
            self._is_accepting = False
            while self._is_busy or (self._leased is not None and not self._is_sent):
                check()
                if time.perf_counter() > end:
                    raise WireFailed(
                        f"weight wire: version {version} is still leased after {limit_s:g} s. "
                        "Read logs/orchestrator.0.log"
                    )
                self.changed.wait(STOP_S)
            self._open = None


class LeaseListener:
    def __init__(
        self, url: str, apply: Callable[[LeaseRequest], LeaseReport], report: LeaseReport
    ) -> None:
        self._url, self._apply, self._report = url, apply, report
        self.failure: BaseException | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weight-wire-leases", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(scaled(10.0))

    def _run(self) -> None:
        decode = msgspec.msgpack.Decoder(LeaseRequest).decode
        context = zmq.Context()
        try:
            socket = dealer(context, self._url)
            told_s = -REPEAT_S
            while not self._stopping.is_set():
                if time.monotonic() >= told_s + REPEAT_S:
                    told_s = time.monotonic()
                    self._tell(socket)
                if not socket.poll(int(1000 * STOP_S)):
                    continue
                try:
                    request = decode(socket.recv())
                except NOT_OF_THE_PROTOCOL:
                    continue
                self._report = self._apply(request)
                self._tell(socket)
        except BaseException as error:
            self.failure = error
        finally:
            context.destroy(linger=0)

    def _tell(self, socket: zmq.Socket) -> None:
        with contextlib.suppress(zmq.Again):
            socket.send(msgspec.msgpack.encode(self._report), zmq.NOBLOCK)


class LeaseClient:
    def __init__(self, send: Callable[[LeaseRequest], object]) -> None:
        self._send = send
        self._request = LeaseRequest(secrets.token_hex(8), 0)
        self._report = LeaseReport()
        self._changed = asyncio.Event()

    @classmethod
    def over(cls, socket: ControlSocket) -> "LeaseClient":
        trainer = b""

        def send(request: LeaseRequest) -> None:
            if trainer:
                socket.post_soon(trainer, request)

        def handle(peer: bytes, report: LeaseReport) -> None:
            nonlocal trainer
            trainer = peer
            client.reported(report)

        client = cls(send)
        socket.route(LeaseReport, handle)
        return client

    async def start_transfer(
        self, published: Published, engines: Sequence[str]
    ) -> Published | None:
        """Lease the version and start its transfer to `engines`. End the previous transfer.

        Return `published` with the transfer's number, or None if the version is gone. Raise
        WireFailed if the trainer does not answer. Call `release` after the transfer.
        """
        request = self._want(published.version, tuple(engines))
        try:
            async with asyncio.timeout(scaled(LEASE_S)):
                while self._report.number != request.number:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise WireFailed(
                f"weight wire: trainer 0 did not answer the lease of version {published.version} "
                f"within {scaled(LEASE_S):g} s. Read logs/trainer.0.log"
            ) from error
        if not self._report.transfer:
            return None
        return msgspec.structs.replace(published, transfer=self._report.transfer)

    def abandon(self, leased: Published) -> None:
        is_newest = self._report.number == self._request.number
        if is_newest and leased.transfer == self._report.transfer:
            self._want(leased.version)

    def release(self) -> None:
        self._want(None)

    def reported(self, report: LeaseReport) -> None:
        request = self._request
        if (report.session, report.number) != (request.session, request.number):
            self._send(request)
            return
        if self._report.number != report.number:
            self._report = report
            self._changed.set()

    def _want(self, version: int | None, engines: tuple[str, ...] = ()) -> LeaseRequest:
        request = LeaseRequest(self._request.session, self._request.number + 1, version, engines)
        self._request = request
        self._send(request)
        return request
