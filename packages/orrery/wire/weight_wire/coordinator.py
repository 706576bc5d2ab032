"""Let trainer and engine ranks agree when a transfer begins and ends.

- Trainer rank 0 serves a TCPStore. The private file `wire.json` has its address and a secret.
- TCPStore does not authenticate, so each value carries an HMAC-SHA256 with the secret.
- When all engine ranks ("members") are ready, rank 0 publishes an order. Its "generation" numbers
  the process group, and increases only after a failure or if members change.
"""

import contextlib
import hmac
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist

from orrery.manifest.publish import write_atomic
from orrery.runtime.timing import scaled
from orrery.wire import nfs
from orrery.wire.weight_wire.leases import LeaseTable, Transfer, WireFailed
from orrery.wire.weight_wire.plan import Holding, Member, TensorInfo

ADDRESS = "wire.json"
CURRENT = "current"
ARRIVALS = "arrivals"  # queue of `Arrival`s
MEET_S = 120.0  # limit for another rank's value
FOREVER_S = 10.0**7  # limit for the next transfer
ARRIVAL_S = 120.0  # limit for the next ready engine rank
DONE_S = 300.0  # limit for a trainer rank's result
LOOK_S = 0.5  # a wait polls `is_over` after this
POLL_S = 0.02
MAC_BYTES = 32

T = TypeVar("T")


class WireAddress(msgspec.Struct):
    host: str
    port: int
    name: str
    secret: str  # authenticates the store's values
    kind: str
    num_sources: int
    bucket_bytes: int


class Arrival(msgspec.Struct):
    """Notice of a ready engine rank. A negative `transfer` ends trainer rank 0's sending thread."""

    transfer: int
    engine: str
    rank: int
    world_size: int
    member: str
    generation: int  # number of the rank's process group, or −1


class TransferOrder(msgspec.Struct):
    transfer: int
    version: int = -1
    generation: int = -1
    members: tuple[str, ...] = ()
    error: str = ""
    end: bool = False


class TransferResult(msgspec.Struct):
    error: str = ""
    parts: dict[str, float] = {}


@dataclass
class PartTimer:
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, begin: float) -> float:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - begin
        return now


class StoreConnection:
    """A connection to the store. Waits block it, so each thread needs its own."""

    def __init__(self, store: dist.Store, address: WireAddress) -> None:
        self.address, self.store = address, store
        self._transfer: int | None = None

    @contextlib.contextmanager
    def during(self, transfer: int | None) -> Iterator[None]:
        """Make waits inside this context raise WireFailed once `transfer` is over."""
        before, self._transfer = self._transfer, transfer
        try:
            yield
        finally:
            self._transfer = before

    def put(self, key: str, value: Any) -> None:
        self.put_raw(key, msgspec.msgpack.encode(value))

    def put_raw(self, key: str, content: bytes) -> None:
        self.store.set(key, self._sealed(key, content))

    def _sealed(self, key: str, content: bytes) -> bytes:
        return self._mac(key, content) + content

    def _mac(self, key: str, content: bytes) -> bytes:
        return hmac.digest(self.address.secret.encode(), key.encode() + b"\0" + content, "sha256")

    def get(self, key: str, kind: type[T], what: str, within_s: float = MEET_S) -> T:
        """Wait for `key` and decode its value.

        Raise WireFailed, naming `what`, after `scaled(within_s)` seconds, or if the value is forged
        or the store is gone.
        """
        return msgspec.msgpack.decode(self.raw(key, what, within_s), type=kind)

    def raw(self, key: str, what: str, within_s: float = MEET_S) -> bytes:
        self._await(key, what, within_s)
        return self._open(key, bytes(self.store.get(key)), what)

    def is_over(self, transfer: int) -> bool:
        content = self._open(CURRENT, bytes(self.store.get(CURRENT)), "the current transfer")
        current = msgspec.msgpack.decode(content, type=int)
        return current != transfer or self.store.check([f"failed/{transfer}"])

    def _open(self, key: str, sealed: bytes, what: str) -> bytes:
        mac, content = sealed[:MAC_BYTES], sealed[MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(key, content)):
            raise WireFailed(
                f"weight wire: the value of {key!r} ({what}) was not written by a role of this "
                f"run; another program can reach port {self.address.port} of {self.address.host}. "
                "Close the port to it and run again"
            )
        return content

    def _await(self, key: str, what: str, within_s: float) -> None:
        limit_s = scaled(within_s)
        end = time.monotonic() + limit_s
        first_s = limit_s if self._transfer is None else min(limit_s, LOOK_S)
        try:
            try:
                self.store.wait([key], timedelta(seconds=first_s))
            except dist.DistStoreError:
                while not self.store.check([key]):
                    if self._transfer is not None and self.is_over(self._transfer):
                        raise WireFailed(
                            f"weight wire: {what} did not arrive before the transfer was given up"
                        ) from None
                    if time.monotonic() >= end:
                        raise WireFailed(
                            f"weight wire: {what} did not arrive within {limit_s:g} s. "
                            "Read logs/trainer.0.log"
                        ) from None
                    time.sleep(POLL_S)
        except (dist.DistNetworkError, RuntimeError) as error:
            raise WireFailed(
                f"weight wire: {what} did not arrive, since trainer 0 has ended. "
                "Read logs/trainer.0.log"
            ) from error

    def tensors(self) -> list[TensorInfo]:
        return self.get("tensors", list[TensorInfo], "trainer 0's list of tensors")

    def holdings(self) -> list[Holding]:
        return [
            self.get(f"holding/{rank}", Holding, f"trainer {rank}'s list of slices")
            for rank in range(self.address.num_sources)
        ]

    def members(self, order: TransferOrder) -> list[Member]:
        return [
            self.get(f"member/{name}", Member, "an engine rank's list of needed slices")
            for name in order.members
        ]

    def order(self, number: int) -> TransferOrder:
        return self.get(f"order/{number}", TransferOrder, "trainer 0's next order", FOREVER_S)

    def arrive(self, arrival: Arrival) -> None:
        # One operation: a killed rank leaves no partial arrival.
        self.store.queue_push(ARRIVALS, self._sealed(ARRIVALS, msgspec.msgpack.encode(arrival)))

    def next_arrival(self, within_s: float) -> Arrival:
        """Wait for the next arrival and remove it. Raise WireFailed like `get`."""
        what = "the arrival of an engine rank"
        self._await(ARRIVALS, what, within_s)
        content = self._open(ARRIVALS, bytes(self.store.queue_pop(ARRIVALS, False)), what)
        return msgspec.msgpack.decode(content, type=Arrival)

    def forget(self, *keys: str) -> None:
        for key in keys:
            with contextlib.suppress(RuntimeError):
                self.store.delete_key(key)


def serve_store(
    folder: Path, host: str, kind: str, num_sources: int, bucket_bytes: int
) -> tuple[dist.Store, WireAddress]:
    """Serve a store on `host` until the caller drops it. Write its address into `folder`."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    # Pass an open socket, because TCPStore's default listens on all interfaces.
    store = dist.TCPStore(
        host,
        port,
        None,
        True,
        timeout=timedelta(seconds=scaled(MEET_S)),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    address = WireAddress(
        host, port, secrets.token_hex(8), secrets.token_hex(32), kind, num_sources, bucket_bytes
    )
    write_atomic(folder / ADDRESS, msgspec.json.encode(address))
    return store, address


def find_wire(folder: Path, within_s: float = MEET_S) -> WireAddress:
    """Wait for `wire.json` in `folder`. Raise WireFailed after `scaled(within_s)` seconds."""
    end = time.monotonic() + scaled(within_s)
    while (content := nfs.read(folder / ADDRESS)) is None:
        if time.monotonic() > end:
            raise WireFailed(
                f"{folder / ADDRESS}: trainer 0 did not write it within {scaled(within_s):g} s. "
                "Read logs/trainer.0.log"
            )
        time.sleep(POLL_S)
    return msgspec.json.decode(content, type=WireAddress)


def connect(address: WireAddress) -> StoreConnection:
    timeout = timedelta(seconds=scaled(MEET_S))
    try:
        store = dist.TCPStore(
            address.host, address.port, None, False, timeout=timeout, wait_for_workers=False
        )
    except (dist.DistStoreError, dist.DistNetworkError, RuntimeError) as error:
        raise WireFailed(
            f"weight wire: no process answers at {address.host}:{address.port}, "
            "so trainer 0 has ended. Read logs/trainer.0.log"
        ) from error
    return StoreConnection(store, address)


def fail_transfer(folder: Path, transfer: int) -> None:
    """Make waits for the transfer fail. Raise WireFailed or RuntimeError if the store is gone."""
    connect(find_wire(folder, LOOK_S)).put(f"failed/{transfer}", True)


def this_host() -> str:
    """Return hostname and boot id. If equal, processes can share memory."""
    return f"{socket.gethostname()}/{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


class Coordinator:
    def __init__(self, store: StoreConnection, leases: LeaseTable) -> None:
        self._store, self._leases = store, leases
        self._answered = 0
        self._generation = -1
        self._members: tuple[str, ...] = ()
        self._member: dict[tuple[str, int], str] = {}

    def next(self) -> TransferOrder:
        """Wait for a transfer's engine ranks. Publish and return its order."""
        arrived: dict[tuple[str, int], Arrival] = {}
        transfer: Transfer | None = None
        while True:
            try:
                arrival = self._next_arrival(transfer)
            except WireFailed:
                if transfer is None:
                    raise
                missing = ", ".join(_absent(transfer.engines, arrived)) + " did not arrive"
                is_over = self._store.is_over(transfer.number)
                until = " before the transfer was given up" if is_over else ""
                order = TransferOrder(transfer.number, version=transfer.version)
                order.error = missing + until
                return self._answer(order)
            number = arrival.transfer
            if number < 0:
                return TransferOrder(-1, end=True)
            if number <= self._answered or (transfer is not None and number < transfer.number):
                continue
            if transfer is None or number > transfer.number:
                arrived = {}
                transfer = self._leases.transfer(number)
                if transfer is None:
                    return self._answer(TransferOrder(number, error="the transfer was given up"))
            arrived[arrival.engine, arrival.rank] = arrival
            if not _absent(transfer.engines, arrived):
                ordered = [
                    arrived[engine, rank]
                    for engine in transfer.engines
                    for rank in range(arrived[engine, 0].world_size)
                ]
                return self._answer(self._order(transfer, ordered))

    def gather(self, order: TransferOrder, own: TransferResult, num_ranks: int) -> TransferResult:
        every = [own]
        for rank in range(1, num_ranks):
            key = f"done/{order.transfer}/{rank}"
            what = f"trainer {rank}'s result of the transfer"
            every.append(self._store.get(key, TransferResult, what, DONE_S))
            self._store.forget(key)
        error = next((result.error for result in every if result.error), "")
        if error:
            self._members = ()
        keys = sorted({key for result in every for key in result.parts})
        longest = {key: max(result.parts.get(key, 0.0) for result in every) for key in keys}
        return TransferResult(error, longest)

    def _next_arrival(self, transfer: Transfer | None) -> Arrival:
        number, within_s = (None, FOREVER_S) if transfer is None else (transfer.number, ARRIVAL_S)
        with self._store.during(number):
            arrival = self._store.next_arrival(within_s)
        rank = arrival.engine, arrival.rank
        if self._member.get(rank, arrival.member) != arrival.member:
            self._store.forget(f"member/{self._member[rank]}")
        self._member[rank] = arrival.member
        return arrival

    def _order(self, transfer: Transfer, arrived: list[Arrival]) -> TransferOrder:
        if refusal := self._leases.admit(transfer):
            return TransferOrder(transfer.number, version=transfer.version, error=refusal)
        members = tuple(each.member for each in arrived)
        if members != self._members or any(each.generation != self._generation for each in arrived):
            self._generation, self._members = self._generation + 1, members
        return TransferOrder(transfer.number, transfer.version, self._generation, members)

    def _answer(self, order: TransferOrder) -> TransferOrder:
        self._store.put(f"go/{order.transfer}", order)
        self._store.forget(f"go/{self._answered}")
        self._answered = order.transfer
        return order


def _absent(engines: tuple[str, ...], arrived: dict[tuple[str, int], Arrival]) -> list[str]:
    sizes = {engine: each.world_size for (engine, _), each in arrived.items()}
    return [
        f"{engine} (rank {rank})"
        for engine in engines
        for rank in range(sizes.get(engine, 1))
        if (engine, rank) not in arrived
    ]
