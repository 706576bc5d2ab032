"""Move bytes from buffers ("buckets") of trainer ranks ("sources") to engine ranks ("targets").

- `nccl`: a process group sends messages (gloo on CPUs). If both GPUs are on one host, the target
  instead reads the buckets by CUDA IPC.
- `nixl`: the target reads the buckets over NIXL and UCX.
- The first NCCL message between two ranks blocks until both join, so a thread runs it for at most
  ROUND_S seconds.
"""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from orrery.manifest.errors import OrreryError
from orrery.runtime.network import interface, name_interface, name_ucx_devices
from orrery.runtime.timing import scaled
from orrery.wire.weight_wire.coordinator import StoreConnection
from orrery.wire.weight_wire.leases import ROUND_S, WireFailed
from orrery.wire.weight_wire.plan import Location, TransferPlan

FORM_S = 30.0  # limit for a gloo group to connect
POLL_S = 0.0002
NEVER = timedelta(days=30)  # NCCL's watchdog must not end the process

T = TypeVar("T")


Wait = Callable[[], None]
"""Wait until a message has arrived. Raise WireFailed, naming the peer, if it does not.

Until then, the source must not overwrite the sent bytes, and the target must not read its buffer.
"""


class GroupLink:
    def __init__(
        self, store: dist.Store, generation: int, rank: int, names: list[str], device: torch.device
    ) -> None:
        """Join group number `generation`. With gloo, raise WireFailed if a rank is missing."""
        self._names, self._device = names, device
        self._met: set[int] = set()
        store = dist.PrefixStore(f"group/{generation}", store)
        name_interface()
        if device.type == "cuda":
            handling = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
            before = os.environ.get(handling)
            os.environ[handling] = "0"  # a peer's death must not end this process
            try:
                self._group = dist.distributed_c10d.ProcessGroupNCCL(store, rank, len(names), NEVER)
            finally:
                if before is None:
                    del os.environ[handling]
                else:
                    os.environ[handling] = before
        else:
            limit = timedelta(seconds=scaled(FORM_S))
            try:
                self._group = dist.ProcessGroupGloo(store, rank, len(names), limit)
            except RuntimeError as error:
                raise WireFailed(
                    f"weight wire: {names[rank]} cannot form group {generation} of {len(names)} "
                    f"ranks ({_first_line(error)})"
                ) from error

    def send(self, message: Tensor, peer: int, number: int) -> Wait:
        return self._start(lambda: self._group.send([message], peer, number), peer, "take")

    def receive(self, message: Tensor, peer: int, number: int) -> Wait:
        return self._start(lambda: self._group.recv([message], peer, number), peer, "send")

    def _start(self, message: Callable[[], dist.Work], peer: int, verb: str) -> Wait:
        try:
            if self._device.type == "cpu" or peer in self._met:
                return partial(self._wait, message(), peer, verb)
            stream = torch.cuda.current_stream(self._device)

            def on_our_stream() -> dist.Work:
                with torch.cuda.device(self._device), torch.cuda.stream(stream):
                    return message()

            work = within(scaled(ROUND_S), on_our_stream)
            self._met.add(peer)
            return partial(self._wait, work, peer, verb)
        except RuntimeError as error:
            raise self._failed(peer, verb, error) from error

    def _wait(self, work: dist.Work, peer: int, verb: str) -> None:
        try:
            self._await(work)
        except RuntimeError as error:
            raise self._failed(peer, verb, error) from error

    def _await(self, work: dist.Work) -> None:
        limit_s = scaled(ROUND_S)
        if self._device.type == "cpu":
            work.wait(timedelta(seconds=limit_s))
            return
        end = time.monotonic() + limit_s
        while not work.is_completed():
            if time.monotonic() > end:
                raise RuntimeError(f"no message within {limit_s:g} s")
            time.sleep(POLL_S)
        work.wait()

    def _failed(self, peer: int, verb: str, error: Exception) -> WireFailed:
        return WireFailed(
            f"weight wire: {self._names[peer]} did not {verb} its slices ({_first_line(error)}). "
            "Read its log"
        )

    def close(self) -> None:
        """Abort the group, so that waiting peers get an error."""
        if self._group is not None and hasattr(self._group, "abort"):
            self._group.abort()
        self._group = None


def within(limit_s: float, call: Callable[[], T]) -> T:
    """Run `call` in a thread. Raise RuntimeError after `limit_s` seconds."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="weight-wire-meets", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        raise RuntimeError(f"no result within {limit_s:g} s")
    return results[0]


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


class MessageReady(msgspec.Struct):
    side: int
    offset: int
    num_bytes: int


class Reader(Protocol):
    def read(self, side: int, offset: int, into: Tensor, free: torch.cuda.Event | None) -> None:
        """Fill `into` (u8) from byte `offset` of bucket `side` (0 or 1), after event `free`."""

    def close(self) -> None: ...


class PullSender:
    """Announce messages in the store, and wait until targets have read them."""

    def __init__(
        self,
        store: StoreConnection,
        generation: int,
        source: int,
        names: Sequence[str],
        device: torch.device,
        offer: str | None = None,
    ) -> None:
        self._store, self._names, self._device, self._offer = store, names, device, offer
        self._key = f"pull/{generation}/{source}"
        self._count: dict[int, int] = defaultdict(int)
        self._announced: set[str] = set()

    def send(self, side: int, target: int, offset: int, num_bytes: int) -> Wait:
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        key = f"{self._key}.{target}/{self._count[target]}"
        self._count[target] += 1
        self._announced.add(key)
        self._store.put(f"{key}/full", MessageReady(side, offset, num_bytes))
        return partial(self._await_read, key, self._names[target])

    def _await_read(self, key: str, target: str) -> None:
        self._store.get(f"{key}/read", bool, f"{target}'s acknowledgement of its slices", ROUND_S)
        self._forget(key)

    def close(self) -> None:
        for key in list(self._announced):
            self._forget(key)
        if self._offer is not None:
            self._store.forget(self._offer)

    def _forget(self, key: str) -> None:
        self._announced.discard(key)
        self._store.forget(f"{key}/full", f"{key}/read")


class PullReceiver:
    def __init__(
        self, store: StoreConnection, generation: int, target: int, readers: dict[int, Reader]
    ) -> None:
        self._store, self._readers = store, readers
        self._generation, self._target = generation, target
        self._count: dict[int, int] = defaultdict(int)

    def receive(self, source: int, into: Tensor) -> Wait:
        key = f"pull/{self._generation}/{source}.{self._target}/{self._count[source]}"
        self._count[source] += 1
        free = None
        if into.is_cuda:
            free = torch.cuda.Event()
            free.record()
        return partial(self._read, key, source, into, free)

    def _read(self, key: str, source: int, into: Tensor, free: torch.cuda.Event | None) -> None:
        what = f"trainer {source}'s announcement of its slices"
        ready = self._store.get(f"{key}/full", MessageReady, what, ROUND_S)
        self._readers[source].read(ready.side, ready.offset, into, free)
        self._store.put(f"{key}/read", True)


class IpcHandle(msgspec.Struct):
    """A bucket's handle, from `torch.UntypedStorage._share_cuda_` (torch 2.13)."""

    memory: bytes
    num_bytes: int
    offset_bytes: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_needed: bool


def is_shared(source: Location, target: Location) -> bool:
    return source.device == target.device == "cuda" and source.host == target.host


def offer_ipc(
    store: StoreConnection, generation: int, source: int, buckets: Sequence[Tensor]
) -> str:
    key = f"ipc/{generation}/{source}"
    store.put(key, [handle_of(bucket) for bucket in buckets])
    return key


def handle_of(bucket: Tensor) -> IpcHandle:
    _, *described = bucket.untyped_storage()._share_cuda_()
    return IpcHandle(*described)


def open_handle(handle: IpcHandle, num_bytes: int, device: torch.device) -> Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    return rebuild_cuda_tensor(
        Tensor,
        (num_bytes,),
        (1,),
        0,
        torch.UntypedStorage,
        torch.uint8,
        device.index or 0,
        handle.memory,
        handle.num_bytes,
        handle.offset_bytes,
        False,
        handle.counter,
        handle.counter_offset,
        handle.event,
        handle.event_needed,
    )


class IpcReader:
    def __init__(
        self, store: StoreConnection, generation: int, source: int, device: torch.device
    ) -> None:
        what = f"trainer {source}'s bucket handles"
        handles = store.get(f"ipc/{generation}/{source}", list[IpcHandle], what)
        num_bytes = store.address.bucket_bytes
        self._buckets = [open_handle(handle, num_bytes, device) for handle in handles]
        self._stream = torch.cuda.Stream(device)

    def read(self, side: int, offset: int, into: Tensor, free: torch.cuda.Event | None) -> None:
        if free is not None:
            self._stream.wait_event(free)
        with torch.cuda.stream(self._stream):
            into.copy_(self._buckets[side][offset : offset + into.numel()])
        self._stream.synchronize()

    def close(self) -> None:
        self._buckets = []


# NIXL

PROGRESS_US = 20_000  # longest sleep of NIXL's progress thread
MEMORY = {"cpu": "DRAM", "cuda": "VRAM"}


class NixlAgent(msgspec.Struct):
    metadata: bytes
    memory: str
    device: int
    addresses: tuple[int, ...]


def load_nixl() -> Any:
    try:
        import nixl._api
    except ImportError as error:
        raise OrreryError(
            f"transport.weights 'nixl': NIXL cannot be loaded ({error}). "
            "Install the nixl version in locks/, or set transport.weights to 'nccl'"
        ) from error
    return nixl._api


def wait_for_progress() -> None:
    """Make NIXL's progress thread sleep. Call this before making an agent.

    `nixl_agent` sets `pthrDelay` to 0 (seen in 1.5.1), so an idle process uses a CPU core. Remove
    this when `nixl_agent_config` takes the delay.
    """
    import nixl._api

    bindings: Any = nixl._api.nixlBind
    config = bindings.nixlAgentConfig
    if hasattr(config, "orrery"):
        return

    class WaitingConfig(config):  # type: ignore[misc, valid-type]
        orrery = True

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, PROGRESS_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = WaitingConfig


class RegisteredBuckets:
    def __init__(self, name: str, buckets: Sequence[Tensor]) -> None:
        api = load_nixl()
        if buckets[0].device.type == "cpu":
            # By default UCX listens on all interfaces.
            os.environ.setdefault("UCX_NET_DEVICES", interface())
            wait_for_progress()
        else:
            name_ucx_devices()
        self.buckets = list(buckets)
        self.memory, self.device = MEMORY[buckets[0].device.type], buckets[0].device.index or 0
        self.agent: Any = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        regions = [(b.data_ptr(), b.nbytes, self.device, "") for b in buckets]
        self._registration = self.agent.register_memory(regions, self.memory)

    def described(self) -> NixlAgent:
        addresses = tuple(bucket.data_ptr() for bucket in self.buckets)
        return NixlAgent(self.agent.get_agent_metadata(), self.memory, self.device, addresses)

    def close(self) -> None:
        self.agent.deregister_memory(self._registration)


def offer_nixl(
    store: StoreConnection, generation: int, source: int, registered: RegisteredBuckets
) -> str:
    key = f"nixl/{generation}/{source}"
    store.put(key, registered.described())
    return key


class NixlReader:
    def __init__(
        self, store: StoreConnection, generation: int, source: int, own: RegisteredBuckets
    ) -> None:
        self._own, self._source = own, source
        what = f"trainer {source}'s bucket addresses"
        self._remote = store.get(f"nixl/{generation}/{source}", NixlAgent, what)
        with self._reaching():
            name = own.agent.add_remote_agent(self._remote.metadata)
        self._name = name.decode() if isinstance(name, bytes) else name

    def read(self, side: int, offset: int, into: Tensor, free: torch.cuda.Event | None) -> None:
        if free is not None:
            free.synchronize()
        with self._reaching():
            self._read(side, offset, into)

    def close(self) -> None:
        self._own.agent.remove_remote_agent(self._name)

    def _read(self, side: int, offset: int, into: Tensor) -> None:
        agent, own, remote = self._own.agent, self._own, self._remote
        here = (into.data_ptr(), into.nbytes, own.device)
        there = (remote.addresses[side] + offset, into.nbytes, remote.device)
        handle = agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs([here], own.memory),
            agent.get_xfer_descs([there], remote.memory),
            self._name,
        )
        try:
            state, end = agent.transfer(handle), time.monotonic() + scaled(ROUND_S)
            while state == "PROC" and time.monotonic() <= end:
                time.sleep(POLL_S)
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise RuntimeError(f"the read ended in state {state}")
        finally:
            agent.release_xfer_handle(handle)

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise WireFailed(
                f"weight wire: slices of trainer {self._source} cannot be read over NIXL "
                f"({error}). Read logs/trainer.{self._source}.log"
            ) from error


class SenderLink:
    """Connect a source to targets. Targets in `pulling` read its buckets. `group` serves others."""

    def __init__(
        self,
        opened: ExitStack,
        pull_sender: PullSender,
        pulling: set[int],
        group: GroupLink | None,
        buckets: Sequence[Tensor],
        num_sources: int,
    ) -> None:
        self._pull, self._pulling, self._group = pull_sender, pulling, group
        self._buckets, self._num_sources = buckets, num_sources
        self.close = opened.close

    def send(self, side: int, number: int, target: int, offset: int, num_bytes: int) -> Wait:
        if target in self._pulling:
            return self._pull.send(side, target, offset, num_bytes)
        assert self._group is not None
        message = self._buckets[side][offset : offset + num_bytes]
        return self._group.send(message, self._num_sources + target, number)


class ReceiverLink:
    """Connect a target to sources. It reads buckets of `pulled` sources. `group` serves others."""

    def __init__(
        self, opened: ExitStack, pull: PullReceiver, pulled: set[int], group: GroupLink | None
    ) -> None:
        self._pull, self._pulled, self._group = pull, pulled, group
        self.close = opened.close

    def receive(self, number: int, source: int, into: Tensor) -> Wait:
        """Receive into `into` (u8), after earlier GPU work on `into`."""
        if source in self._pulled:
            return self._pull.receive(source, into)
        assert self._group is not None
        if into.is_cuda:
            torch.cuda.current_stream().synchronize()
        return self._group.receive(into, source, number)


def make_sender_link(
    kind: str,
    store: StoreConnection,
    generation: int,
    rank: int,
    plan: TransferPlan,
    buckets: Sequence[Tensor],
    device: torch.device,
) -> SenderLink:
    place, num_targets = plan.holdings[rank].place, len(plan.members)
    near = {t for t, member in enumerate(plan.members) if is_shared(place, member.place)}
    pulling = set(range(num_targets)) if kind == "nixl" else near
    with ExitStack() as opened:
        offer = None
        if kind == "nixl":
            name = f"trainer-{rank}-{generation}-{store.address.name}"
            registered = RegisteredBuckets(name, buckets)
            opened.callback(registered.close)
            offer = offer_nixl(store, generation, rank, registered)
        elif near:
            offer = offer_ipc(store, generation, rank, buckets)
        target_names = plan.ranks[len(plan.holdings) :]
        pull_sender = PullSender(store, generation, rank, target_names, device, offer)
        opened.callback(pull_sender.close)
        group = _group(opened, kind, store, generation, rank, plan, device)
        return SenderLink(
            opened.pop_all(), pull_sender, pulling, group, buckets, len(plan.holdings)
        )


def make_receiver_link(
    kind: str,
    store: StoreConnection,
    generation: int,
    target: int,
    plan: TransferPlan,
    buckets: Sequence[Tensor],
    device: torch.device,
) -> ReceiverLink:
    place = plan.members[target].place
    sources = sorted({source for _, messages in plan.of_target(target) for source in messages})
    readers: dict[int, Reader] = {}
    with ExitStack() as opened:
        if kind == "nixl":
            name = f"engine-{target}-{generation}-{store.address.name}"
            registered = RegisteredBuckets(name, buckets)
            opened.callback(registered.close)
            for source in sources:
                readers[source] = NixlReader(store, generation, source, registered)
                opened.callback(readers[source].close)
        else:
            for source in sources:
                if is_shared(plan.holdings[source].place, place):
                    readers[source] = IpcReader(store, generation, source, device)
                    opened.callback(readers[source].close)
        rank = len(plan.holdings) + target
        group = _group(opened, kind, store, generation, rank, plan, device)
        pull_receiver = PullReceiver(store, generation, target, readers)
        return ReceiverLink(opened.pop_all(), pull_receiver, set(readers), group)


def _group(
    opened: ExitStack,
    kind: str,
    store: StoreConnection,
    generation: int,
    rank: int,
    plan: TransferPlan,
    device: torch.device,
) -> GroupLink | None:
    pairs = ((one.place, other.place) for one in plan.holdings for other in plan.members)
    if kind == "nixl" or all(is_shared(*pair) for pair in pairs):
        return None
    group = GroupLink(store.store, generation, rank, plan.ranks, device)
    opened.callback(group.close)
    return group
