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
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist

from orrery.manifest.publish import write_atomic
from orrery.observe.deadline import scaled
from orrery.transport import nfs
from orrery.transport.weight_wire.claims import ADDRESS
from orrery.transport.weight_wire.contract import WireFailed
from orrery.transport.weight_wire.slices import Box

MEET_S = 120.0  # for ranks of one role to come, or to answer
FOREVER_S = 10.0**7  # waits for work have no deadline; the end of the store ends them
LOOK_S = 0.5  # after this a wait within a take looks whether that is still on
POLL_S = 0.02
MAC_BYTES = 32

T = TypeVar("T")


class Address(msgspec.Struct):
    """`wire.json`."""

    host: str
    port: int
    name: str  # of this wire, and no other; not secret
    secret: str  # authenticates what stands in the store; never sent
    kind: str
    num_sources: int
    bucket_bytes: int


class Tensor(msgspec.Struct, frozen=True):
    """One tensor of the checkpoint as it travels."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name of it


class Place(msgspec.Struct, frozen=True):
    """Where a rank's memory is: two ranks of one `host` may map one another's."""

    host: str
    device: str  # "cpu" or "cuda"


class Holding(msgspec.Struct):
    """What a trainer rank holds."""

    place: Place
    boxes: dict[str, Box]


class Member(msgspec.Struct):
    """What a rank of an engine needs, and who it is."""

    engine: str
    rank: int
    place: Place
    needs: dict[str, tuple[Box, ...]]


class Arrival(msgspec.Struct):
    """A rank of an engine has come for a take."""

    take: int
    claim: int
    engine: str
    rank: int
    world_size: int
    member: str
    generation: int  # of the group that it is in, -1 where it has given it up


class Order(msgspec.Struct):
    """Rank 0's answer to a take: who goes, as which group; or why nobody does. `end`: there will be no more."""

    take: int
    claim: int = -1
    version: int = -1
    generation: int = -1
    members: tuple[str, ...] = ()
    error: str = ""
    end: bool = False


class Done(msgspec.Struct):
    """What came of an order, from one trainer rank."""

    error: str = ""
    parts: dict[str, float] = {}


class Meeting:
    """One thread's connection to the store. Not to be shared between threads: a wait keeps the connection.

    Waits within `during` end also where the take is given up.
    """

    def __init__(self, store: dist.Store, address: Address) -> None:
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

    def tensors(self) -> list[Tensor]:
        return self.get("tensors", list[Tensor], "trainer 0, which tensors there are")

    def holdings(self) -> list[Holding]:
        """Of every trainer rank, in order."""
        return [
            self.get(f"holding/{rank}", Holding, f"trainer {rank}, what it holds")
            for rank in range(self.address.num_sources)
        ]

    def order(self, number: int) -> Order:
        return self.get(f"order/{number}", Order, "trainer 0, its next order", FOREVER_S)

    def arrive(self, arrival: Arrival) -> None:
        self.put(f"arrival/{self.store.add('arrivals', 1)}", arrival)

    def forget(self, *keys: str) -> None:
        for key in keys:
            with contextlib.suppress(RuntimeError):
                self.store.delete_key(key)


def serve(
    folder: Path, host: str, kind: str, num_sources: int, bucket_bytes: int
) -> tuple[dist.Store, Address]:
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
    address = Address(
        host, port, secrets.token_hex(8), secrets.token_hex(32), kind, num_sources, bucket_bytes
    )
    write_atomic(folder / ADDRESS, msgspec.json.encode(address))
    return store, address


def find(folder: Path, within_s: float = MEET_S) -> Address:
    """The address in `folder`, once it is there."""
    end = time.monotonic() + scaled(within_s)
    while (content := nfs.read(folder / ADDRESS)) is None:
        if time.monotonic() > end:
            raise WireFailed(
                f"{folder / ADDRESS}: not there within {scaled(within_s):g} s; trainer 0 writes it, read logs/trainer.0.log"
            )
        time.sleep(0.02)
    return msgspec.json.decode(content, type=Address)


def join(address: Address) -> Meeting:
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
    return Meeting(store, address)


def this_host() -> str:
    """The same text for all processes that share this machine's memory, and no other's."""
    return f"{socket.gethostname()}/{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
