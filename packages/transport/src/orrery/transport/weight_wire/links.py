"""Links: how bytes get from a source's bucket into a target's, a message a round and pair. One file a kind.

- `peers`: sends and receives of a process group (nccl on GPU, gloo on CPU): kind `nccl`.
- `ipc`: the target maps the source's buckets: kind `nccl` too, where both are GPUs of one host.
- `nixl`: the target reads out of the source's buckets: kind `nixl`.

A source's link has `send(side, number, target, offset, num_bytes)`, which says that this part of its bucket `side` is round `number`'s
message; a target's has `receive(number, source, message, into)`. Both give something to `wait` for: until then the source's part must not
be overwritten, and the target's not read. What a target's device was told to do with `into` before is done before it is overwritten.
`close` gives a link up; whoever waits at the other end hears of it.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from orrery.observe.deadline import scaled
from orrery.observe.network import name_interface
from orrery.transport.weight_wire import nixl
from orrery.transport.weight_wire import pull as ipc
from orrery.transport.weight_wire.coordinator import StoreConnection
from orrery.transport.weight_wire.leases import ROUND_S, WireFailed
from orrery.transport.weight_wire.nixl import NixlReader, RegisteredBuckets
from orrery.transport.weight_wire.plan import SliceMessage, TransferPlan
from orrery.transport.weight_wire.pull import IpcReader, PullReceiver, PullSender, Reader


class InFlight(Protocol):
    """A message."""

    def wait(self) -> None:
        """Until it is there. Raises WireFailed naming who did not send or take it."""


class SenderLink(Protocol):
    def send(
        self, side: int, number: int, target: int, offset: int, num_bytes: int
    ) -> InFlight: ...
    def close(self) -> None: ...


class ReceiverLink(Protocol):
    def receive(
        self, number: int, source: int, message: SliceMessage, into: torch.Tensor
    ) -> InFlight: ...
    def close(self) -> None: ...


FORM_S = 30.0  # for a group's ranks to connect, all of which have just come
POLL_S = 0.0002
NEVER = timedelta(days=30)  # nccl's own watchdog would end the process

T = TypeVar("T")


class GroupLink:
    """One rank's end."""

    def __init__(
        self, store: dist.Store, generation: int, rank: int, names: list[str], device: torch.device
    ) -> None:
        """`names` are what error sentences call the ranks of the group, this one (`rank`) among them. Waits until all are there."""
        self._names, self._device = names, device
        self._met: set[int] = set()
        store = dist.PrefixStore(f"group/{generation}", store)
        name_interface()
        if device.type == "cuda":
            handling = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
            before = os.environ.get(handling)
            os.environ[handling] = (
                "0"  # a peer's death is ours to handle; nccl's answer is to end this process too
            )
            try:
                self._group = dist.distributed_c10d.ProcessGroupNCCL(store, rank, len(names), NEVER)
            finally:
                os.environ.pop(handling) if before is None else os.environ.update(
                    {handling: before}
                )
        else:
            try:
                self._group = dist.ProcessGroupGloo(
                    store, rank, len(names), timedelta(seconds=scaled(FORM_S))
                )
            except RuntimeError as error:
                raise WireFailed(
                    f"weight wire: {names[rank]} cannot form group {generation} of {len(names)} ranks ({_first(error)})"
                ) from error

    def send(self, message: Tensor, peer: int, number: int) -> "PendingMessage":
        return PendingMessage(
            self,
            self._start(lambda: self._group.send([message], peer, number), peer, "take"),
            peer,
            "take",
        )

    def receive(self, message: Tensor, peer: int, number: int) -> "PendingMessage":
        return PendingMessage(
            self,
            self._start(lambda: self._group.recv([message], peer, number), peer, "send"),
            peer,
            "send",
        )

    def _start(self, message: Callable[[], dist.Work], peer: int, verb: str) -> dist.Work:
        try:
            if self._device.type == "cpu" or peer in self._met:
                return message()
            stream = torch.cuda.current_stream(self._device)

            def on_our_stream() -> dist.Work:
                with torch.cuda.device(self._device), torch.cuda.stream(stream):
                    return message()

            work = within(scaled(ROUND_S), on_our_stream)
            self._met.add(peer)
            return work
        except RuntimeError as error:
            raise self.failed(peer, verb, error) from error

    def failed(self, peer: int, verb: str, error: Exception) -> WireFailed:
        return WireFailed(
            f"weight wire: {self._names[peer]} did not {verb} its slices ({_first(error)}); see its log"
        )

    def close(self) -> None:
        """Give the group up; whoever waits for this rank hears of it."""
        if self._group is not None and hasattr(self._group, "abort"):
            self._group.abort()
        self._group = None


class PendingMessage:
    """A message on its way."""

    def __init__(self, peers: GroupLink, work: dist.Work, peer: int, verb: str) -> None:
        self._peers, self._work, self._peer, self._verb = peers, work, peer, verb

    def wait(self) -> None:
        """Until it is over, on the device too. Raises WireFailed naming the peer."""
        limit_s = scaled(ROUND_S)
        try:
            if self._peers._device.type == "cpu":
                self._work.wait(timedelta(seconds=limit_s))
                return
            end = time.monotonic() + limit_s
            while not self._work.is_completed():
                if time.monotonic() > end:
                    raise RuntimeError(f"{limit_s:g} s are over")
                time.sleep(POLL_S)
            self._work.wait()
        except RuntimeError as error:
            raise self._peers.failed(self._peer, self._verb, error) from error


def within(limit_s: float, call: Callable[[], T]) -> T:
    """What `call` gives, in a thread of its own. Raises what it raises, or RuntimeError after `limit_s`; then the thread goes on alone."""
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
        raise RuntimeError(f"{limit_s:g} s are over")
    return results[0]


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


class _Sending:
    """A source's end, over whichever way leads to each target; `opened` is what it closes."""

    def __init__(
        self,
        opened: ExitStack,
        pull: PullSender,
        pulling: set[int],
        peers: GroupLink | None,
        buckets: Sequence[torch.Tensor],
        num_sources: int,
    ) -> None:
        self._pull, self._pulling, self._peers, self._buckets, self._num_sources = (
            pull,
            pulling,
            peers,
            buckets,
            num_sources,
        )
        self.close = opened.close

    def send(self, side: int, number: int, target: int, offset: int, num_bytes: int) -> InFlight:
        if target in self._pulling:
            return self._pull.send(side, number, target, offset, num_bytes)
        assert self._peers is not None
        return self._peers.send(
            self._buckets[side][offset : offset + num_bytes], self._num_sources + target, number
        )


class _Receiving:
    """A target's end; `opened` is what it closes."""

    def __init__(
        self, opened: ExitStack, pull: PullReceiver, pulled: set[int], peers: GroupLink | None
    ) -> None:
        self._pull, self._pulled, self._peers = pull, pulled, peers
        self.close = opened.close

    def receive(
        self, number: int, source: int, message: SliceMessage, into: torch.Tensor
    ) -> InFlight:
        if source in self._pulled:
            return self._pull.receive(source, into)
        assert self._peers is not None
        if into.is_cuda:
            torch.cuda.current_stream().synchronize()
        return self._peers.receive(into, source, number)


def make_sender_link(
    kind: str,
    meeting: StoreConnection,
    generation: int,
    rank: int,
    plan: TransferPlan,
    buckets: Sequence[torch.Tensor],
    device: torch.device,
) -> SenderLink:
    place, num_targets = plan.holdings[rank].place, len(plan.members)
    near = {
        target for target, member in enumerate(plan.members) if ipc.is_shared(place, member.place)
    }
    pulling = set(range(num_targets)) if kind == "nixl" else near
    with ExitStack() as opened:  # where one end cannot be made, those before it are closed
        offer = None
        if kind == "nixl":
            registered = RegisteredBuckets(
                f"trainer-{rank}-{generation}-{meeting.address.name}", buckets
            )
            opened.callback(registered.close)
            offer = nixl.offer(meeting, generation, rank, registered)
        elif near:
            offer = ipc.offer(meeting, generation, rank, buckets)
        pull = PullSender(
            meeting, generation, rank, plan.ranks[len(plan.holdings) :], device, offer
        )
        opened.callback(pull.close)
        peers = (
            GroupLink(meeting.store, generation, rank, plan.ranks, device)
            if _needs_peers(kind, plan)
            else None
        )
        if peers is not None:
            opened.callback(peers.close)
        return _Sending(opened.pop_all(), pull, pulling, peers, buckets, len(plan.holdings))


def make_receiver_link(
    kind: str,
    meeting: StoreConnection,
    generation: int,
    target: int,
    plan: TransferPlan,
    buckets: Sequence[torch.Tensor],
    device: torch.device,
) -> ReceiverLink:
    place = plan.members[target].place
    sources = sorted({source for _, messages in plan.of_target(target) for source in messages})
    readers: dict[int, Reader] = {}
    with ExitStack() as opened:
        if kind == "nixl":
            registered = RegisteredBuckets(
                f"engine-{target}-{generation}-{meeting.address.name}", buckets
            )
            opened.callback(registered.close)
            for source in sources:
                readers[source] = NixlReader(meeting, generation, source, registered)
                opened.callback(readers[source].close)
        else:
            for source in sources:
                if ipc.is_shared(plan.holdings[source].place, place):
                    readers[source] = IpcReader(meeting, generation, source, device)
                    opened.callback(readers[source].close)
        peers = (
            GroupLink(meeting.store, generation, len(plan.holdings) + target, plan.ranks, device)
            if _needs_peers(kind, plan)
            else None
        )
        if peers is not None:
            opened.callback(peers.close)
        return _Receiving(
            opened.pop_all(),
            PullReceiver(meeting, generation, target, readers),
            set(readers),
            peers,
        )


def _needs_peers(kind: str, plan: TransferPlan) -> bool:
    """Whether any two ranks of the group must send to one another; all its ranks answer alike."""
    return kind != "nixl" and not all(
        ipc.is_shared(one.place, other.place) for one in plan.holdings for other in plan.members
    )
