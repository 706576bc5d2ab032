"""How trainer ranks and engine ranks of a direct wire meet, agree on who takes part, and agree that something is over.

- Trainer rank 0 serves one TCPStore, on its role's own address and nowhere else, as long as it lives; `wire.json` in the wire's folder
  gives its address. Only its owner can enter the folder. `wire.json` holds a secret that is never
  sent.
- A TCPStore has no authentication. So each value carries an HMAC-SHA256 of its key and content
  under that secret, which is checked before decoding. A stranger at the port can read the values,
  which are not secret, and can stop the run. It cannot forge a value.
- Values are msgpack structures and raw numbers: nothing is pickled.
- A *take* is one version going to a set of engines. The orchestrator numbers takes; every rank of every engine arrives with the number.
  When all are there, rank 0 says go, with the members in order and the number of the group that they form.
- A group with the same members as before is the same group. With other members, or where any end has given it up, a new one is formed.
- Every wait has a deadline and a name. Those within a take end with it.
- What has been read by all whom it concerns is removed from the store.
"""

import contextlib
import hmac
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist

from orrery.manifest.publish import write_atomic
from orrery.observe.deadline import scaled
from orrery.transport import nfs
from orrery.transport.weight_wire.leases import (
    ADDRESS,
    Transfer,
    TransferFailed,
    WireFailed,
    read_transfer,
    transfer_path,
)
from orrery.transport.weight_wire.plan import Holding, TensorInfo

MEET_S = 120.0  # for ranks of one role to come, or to answer
FOREVER_S = 10.0**7  # waits for work have no deadline; the end of the store ends them
LOOK_S = 0.5  # after this a wait within a take looks whether that is still on
POLL_S = 0.02
MAC_BYTES = 32

T = TypeVar("T")


class WireAddress(msgspec.Struct):
    """`wire.json`."""

    host: str
    port: int
    name: str  # of this wire, and no other; not secret
    secret: str  # authenticates what stands in the store; never sent
    kind: str
    num_sources: int
    bucket_bytes: int


class Arrival(msgspec.Struct):
    """A rank of an engine has come for a take."""

    take: int
    claim: int
    engine: str
    rank: int
    world_size: int
    member: str
    generation: int  # of the group that it is in, -1 where it has given it up


class TransferOrder(msgspec.Struct):
    """Rank 0's answer to a take: who goes, as which group; or why nobody does. `end`: there will be no more."""

    take: int
    claim: int = -1
    version: int = -1
    generation: int = -1
    members: tuple[str, ...] = ()
    error: str = ""
    end: bool = False


class TransferResult(msgspec.Struct):
    """What came of an order, from one trainer rank."""

    error: str = ""
    parts: dict[str, float] = {}


@dataclass
class PartTimer:
    """Seconds by what they were spent on."""

    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, begin: float) -> float:
        """`begin` to now goes to `name`; now."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - begin
        return now


class StoreConnection:
    """One thread's connection to the store. Not to be shared between threads: a wait keeps the connection.

    Waits within `during` end also where the take is given up.
    """

    def __init__(self, store: dist.Store, address: WireAddress) -> None:
        self.address, self.store = address, store
        self._take: Path | None = None

    @contextlib.contextmanager
    def during(self, take: Path | None) -> Iterator[None]:
        """`take` is the file that is there while the take is on (`claims`)."""
        before, self._take = self._take, take
        try:
            yield
        finally:
            self._take = before

    def put(self, key: str, value: Any) -> None:
        self.put_raw(key, msgspec.msgpack.encode(value))

    def put_raw(self, key: str, content: bytes) -> None:
        self.store.set(key, self._mac(key, content) + content)

    def _mac(self, key: str, content: bytes) -> bytes:
        return hmac.digest(self.address.secret.encode(), key.encode() + b"\0" + content, "sha256")

    def get(self, key: str, kind: type[T], what: str, within_s: float = MEET_S) -> T:
        """Wait for `key`. Raises WireFailed naming `what` after `within_s` (scaled), if the store is gone, or if the value is forged."""
        return msgspec.msgpack.decode(self.raw(key, what, within_s), type=kind)

    def _await(self, key: str, what: str, within_s: float) -> None:
        limit_s = scaled(within_s)
        end = time.monotonic() + limit_s
        try:
            try:
                self.store.wait(
                    [key],
                    timedelta(seconds=limit_s if self._take is None else min(limit_s, LOOK_S)),
                )
            except dist.DistStoreError:
                while not self.store.check([key]):
                    if self._take is not None and not self._take.exists():
                        raise WireFailed(
                            f"weight wire: no word of {what} until the take was given up"
                        ) from None
                    if time.monotonic() >= end:
                        raise WireFailed(
                            f"weight wire: no word of {what} within {limit_s:g} s; read logs/trainer.0.log"
                        ) from None
                    time.sleep(POLL_S)
        except (dist.DistNetworkError, RuntimeError) as error:
            raise WireFailed(
                f"weight wire: no word of {what} and trainer 0 is gone; read logs/trainer.0.log"
            ) from error

    def raw(self, key: str, what: str, within_s: float = MEET_S) -> bytes:
        """The bytes that stand at `key`, as `get` waits for them."""
        self._await(key, what, within_s)
        sealed = bytes(self.store.get(key))
        mac, content = sealed[:MAC_BYTES], sealed[MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(key, content)):
            raise WireFailed(
                f"weight wire: what stands at {key!r} ({what}) was not written by a role of this run; another program reaches port "
                f"{self.address.port} of {self.address.host}; keep strangers off the run's network, then run again"
            )
        return content

    def tensors(self) -> list[TensorInfo]:
        return self.get("tensors", list[TensorInfo], "trainer 0, which tensors there are")

    def holdings(self) -> list[Holding]:
        """Of every trainer rank, in order."""
        return [
            self.get(f"holding/{rank}", Holding, f"trainer {rank}, what it holds")
            for rank in range(self.address.num_sources)
        ]

    def order(self, number: int) -> TransferOrder:
        return self.get(f"order/{number}", TransferOrder, "trainer 0, its next order", FOREVER_S)

    def arrive(self, arrival: Arrival) -> None:
        self.put(f"arrival/{self.store.add('arrivals', 1)}", arrival)

    def forget(self, *keys: str) -> None:
        for key in keys:
            with contextlib.suppress(RuntimeError):
                self.store.delete_key(key)


def serve(
    folder: Path, host: str, kind: str, num_sources: int, bucket_bytes: int
) -> tuple[dist.Store, WireAddress]:
    """Open the store on `host`, and say so in the folder; keep the store while the wire lives."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    # A bound socket handed over keeps the store off all other interfaces.
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


def find(folder: Path, within_s: float = MEET_S) -> WireAddress:
    """The address in `folder`, once it is there."""
    end = time.monotonic() + scaled(within_s)
    while (content := nfs.read(folder / ADDRESS)) is None:
        if time.monotonic() > end:
            raise WireFailed(
                f"{folder / ADDRESS}: not there within {scaled(within_s):g} s; trainer 0 writes it, read logs/trainer.0.log"
            )
        time.sleep(0.02)
    return msgspec.json.decode(content, type=WireAddress)


def join(address: WireAddress) -> StoreConnection:
    """A connection of one's own."""
    try:
        store = dist.TCPStore(
            address.host,
            address.port,
            None,
            False,
            timeout=timedelta(seconds=scaled(MEET_S)),
            wait_for_workers=False,
        )
    except (dist.DistStoreError, dist.DistNetworkError, RuntimeError) as error:
        raise WireFailed(
            f"weight wire: nobody answers at {address.host}:{address.port}; trainer 0 is gone, read logs/trainer.0.log"
        ) from error
    return StoreConnection(store, address)


def this_host() -> str:
    """The same text for all processes that share this machine's memory, and no other's."""
    return f"{socket.gethostname()}/{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


ARRIVAL_S = 120.0  # for all ranks of all engines of a take, once the first has come
DONE_S = 300.0  # for the other trainer ranks to have sent


class Coordinator:
    """Belongs to one thread."""

    def __init__(
        self, meeting: StoreConnection, folder: Path, admit: Callable[[Transfer], str]
    ) -> None:
        """`admit` says why a take may not begin, or "" where it has begun."""
        self._meeting, self._folder, self._admit = meeting, folder, admit
        self._num_arrivals = self._answered = 0
        self._generation = -1
        self._members: tuple[str, ...] = ()
        self._member: dict[tuple[str, int], str] = {}  # by engine and rank, the newest

    def next(self) -> TransferOrder:
        """Wait for the next take; the order that it leads to, which the engines have been given too."""
        arrived: dict[tuple[str, int], Arrival] = {}
        taking: Transfer | None = None
        while True:
            try:
                arrival = self._next_arrival(taking)
            except WireFailed:
                if taking is None:
                    raise
                missing = ", ".join(self._absent(taking.engines, arrived)) + " did not come"
                is_on = transfer_path(self._folder, taking.take, taking.claim).exists()
                until = "" if is_on else " before the take was given up"
                return self._answer(
                    TransferOrder(taking.take, version=taking.version, error=missing + until)
                )
            if arrival.take < 0:
                return TransferOrder(-1, end=True)
            if arrival.take <= self._answered or (
                taking is not None and arrival.take < taking.take
            ):
                continue  # who comes as late sees that its take is over
            if taking is None or arrival.take > taking.take:
                try:
                    arrived, taking = (
                        {},
                        read_transfer(transfer_path(self._folder, arrival.take, arrival.claim)),
                    )
                except TransferFailed:
                    return self._answer(TransferOrder(arrival.take, error="it was given up"))
                assert taking is not None
            arrived[arrival.engine, arrival.rank] = arrival
            if not self._absent(taking.engines, arrived):
                ordered = [
                    arrived[engine, rank]
                    for engine in taking.engines
                    for rank in range(arrived[engine, 0].world_size)
                ]
                return self._answer(self._order(taking, ordered))

    def gather(self, order: TransferOrder, mine: TransferResult, num_ranks: int) -> TransferResult:
        """What came of an order over all trainer ranks: the first error, the longest seconds."""
        every = [mine]
        for rank in range(1, num_ranks):
            key = f"done/{order.take}/{rank}"
            every.append(
                self._meeting.get(key, TransferResult, f"trainer {rank}, that it has sent", DONE_S)
            )
            self._meeting.forget(key)
        error = next((done.error for done in every if done.error), "")
        if error:
            self._members = ()  # whatever the next take's members are, they form a new group
        keys = {key for done in every for key in done.parts}
        return TransferResult(
            error, {key: max(done.parts.get(key, 0.0) for done in every) for key in sorted(keys)}
        )

    def _next_arrival(self, taking: Transfer | None) -> Arrival:
        key = f"arrival/{self._num_arrivals + 1}"
        with self._meeting.during(
            transfer_path(self._folder, taking.take, taking.claim) if taking is not None else None
        ):
            arrival = self._meeting.get(
                key, Arrival, "engines", FOREVER_S if taking is None else ARRIVAL_S
            )
        self._num_arrivals += 1
        who = arrival.engine, arrival.rank
        self._meeting.forget(key)
        if self._member.get(who, arrival.member) != arrival.member:  # an incarnation that has ended
            self._meeting.forget(f"member/{self._member[who]}")
        self._member[who] = arrival.member
        return arrival

    def _order(self, taking: Transfer, arrived: list[Arrival]) -> TransferOrder:
        if refusal := self._admit(taking):
            return TransferOrder(taking.take, version=taking.version, error=refusal)
        members = tuple(each.member for each in arrived)
        if members != self._members or any(each.generation != self._generation for each in arrived):
            self._generation, self._members = self._generation + 1, members
        return TransferOrder(taking.take, taking.claim, taking.version, self._generation, members)

    def _answer(self, order: TransferOrder) -> TransferOrder:
        """Who waits for the answer to an earlier take sees that it is over."""
        self._meeting.put(f"go/{order.take}", order)
        self._meeting.forget(f"go/{self._answered}")
        self._answered = order.take
        return order

    @staticmethod
    def _absent(engines: tuple[str, ...], arrived: dict[tuple[str, int], Arrival]) -> list[str]:
        sizes = {engine: each.world_size for (engine, _), each in arrived.items()}
        return [
            f"{engine} (rank {rank})"
            for engine in engines
            for rank in range(sizes.get(engine, 1))
            if (engine, rank) not in arrived
        ]
