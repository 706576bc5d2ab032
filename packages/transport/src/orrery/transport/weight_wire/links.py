"""Links: how bytes get from a source's bucket into a target's, a message a round and pair. One file a kind.

- `peers`: sends and receives of a process group (nccl on GPU, gloo on CPU): kind `nccl`.
- `ipc`: the target maps the source's buckets: kind `nccl` too, where both are GPUs of one host.
- `nixl`: the target reads out of the source's buckets: kind `nixl`.

A source's link has `send(side, number, target, offset, num_bytes)`, which says that this part of its bucket `side` is round `number`'s
message; a target's has `receive(number, source, message, into)`. Both give something to `wait` for: until then the source's part must not
be overwritten, and the target's not read. What a target's device was told to do with `into` before is done before it is overwritten.
`close` gives a link up; whoever waits at the other end hears of it.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

import torch

from orrery.transport.weight_wire import ipc, nixl
from orrery.transport.weight_wire.ipc import IpcReader
from orrery.transport.weight_wire.meeting import Meeting
from orrery.transport.weight_wire.nixl import NixlReader, Registered
from orrery.transport.weight_wire.peers import Peers
from orrery.transport.weight_wire.plan import Plan
from orrery.transport.weight_wire.pulls import PullSource, PullTarget, Reader
from orrery.transport.weight_wire.slices import Message


class OnItsWay(Protocol):
    """A message."""

    def wait(self) -> None:
        """Until it is there. Raises WireFailed naming who did not send or take it."""


class SourceLink(Protocol):
    def send(
        self, side: int, number: int, target: int, offset: int, num_bytes: int
    ) -> OnItsWay: ...
    def close(self) -> None: ...


class TargetLink(Protocol):
    def receive(
        self, number: int, source: int, message: Message, into: torch.Tensor
    ) -> OnItsWay: ...
    def close(self) -> None: ...


class _Sending:
    """A source's end, over whichever way leads to each target; `opened` is what it closes."""

    def __init__(
        self,
        opened: ExitStack,
        pull: PullSource,
        pulling: set[int],
        peers: Peers | None,
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

    def send(self, side: int, number: int, target: int, offset: int, num_bytes: int) -> OnItsWay:
        if target in self._pulling:
            return self._pull.send(side, number, target, offset, num_bytes)
        assert self._peers is not None
        return self._peers.send(
            self._buckets[side][offset : offset + num_bytes], self._num_sources + target, number
        )


class _Receiving:
    """A target's end; `opened` is what it closes."""

    def __init__(
        self, opened: ExitStack, pull: PullTarget, pulled: set[int], peers: Peers | None
    ) -> None:
        self._pull, self._pulled, self._peers = pull, pulled, peers
        self.close = opened.close

    def receive(self, number: int, source: int, message: Message, into: torch.Tensor) -> OnItsWay:
        if source in self._pulled:
            return self._pull.receive(source, into)
        assert self._peers is not None
        if into.is_cuda:
            torch.cuda.current_stream().synchronize()
        return self._peers.receive(into, source, number)


def make_source_link(
    kind: str,
    meeting: Meeting,
    generation: int,
    rank: int,
    plan: Plan,
    buckets: Sequence[torch.Tensor],
    device: torch.device,
) -> SourceLink:
    place, num_targets = plan.holdings[rank].place, len(plan.members)
    near = {
        target for target, member in enumerate(plan.members) if ipc.is_shared(place, member.place)
    }
    pulling = set(range(num_targets)) if kind == "nixl" else near
    with ExitStack() as opened:  # where one end cannot be made, those before it are closed
        offer = None
        if kind == "nixl":
            registered = Registered(f"trainer-{rank}-{generation}-{meeting.address.name}", buckets)
            opened.callback(registered.close)
            offer = nixl.offer(meeting, generation, rank, registered)
        elif near:
            offer = ipc.offer(meeting, generation, rank, buckets)
        pull = PullSource(
            meeting, generation, rank, plan.ranks[len(plan.holdings) :], device, offer
        )
        opened.callback(pull.close)
        peers = (
            Peers(meeting.store, generation, rank, plan.ranks, device)
            if _needs_peers(kind, plan)
            else None
        )
        if peers is not None:
            opened.callback(peers.close)
        return _Sending(opened.pop_all(), pull, pulling, peers, buckets, len(plan.holdings))


def make_target_link(
    kind: str,
    meeting: Meeting,
    generation: int,
    target: int,
    plan: Plan,
    buckets: Sequence[torch.Tensor],
    device: torch.device,
) -> TargetLink:
    place = plan.members[target].place
    sources = sorted({source for _, messages in plan.of_target(target) for source in messages})
    readers: dict[int, Reader] = {}
    with ExitStack() as opened:
        if kind == "nixl":
            registered = Registered(f"engine-{target}-{generation}-{meeting.address.name}", buckets)
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
            Peers(meeting.store, generation, len(plan.holdings) + target, plan.ranks, device)
            if _needs_peers(kind, plan)
            else None
        )
        if peers is not None:
            opened.callback(peers.close)
        return _Receiving(
            opened.pop_all(), PullTarget(meeting, generation, target, readers), set(readers), peers
        )


def _needs_peers(kind: str, plan: Plan) -> bool:
    """Whether any two ranks of the group must send to one another; all its ranks answer alike."""
    return kind != "nixl" and not all(
        ipc.is_shared(one.place, other.place) for one in plan.holdings for other in plan.members
    )
