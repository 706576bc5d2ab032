"""The link of a collective wire: messages between two ranks of one process group, nccl between GPUs and gloo between CPUs.

- The group is our own, beside whatever groups torch or vLLM have in the process; its ranks are sources first, then targets.
- nccl gives each pair a communicator and a stream of its own, so a rank's messages to several peers travel at the same time.
- Who waits for a peer that has died gets an error: from gloo at once, from nccl at the deadline, after which the group is given up.
- nccl makes a pair's communicator within the pair's first message, and there it waits for the other end for as long as that takes: on a
  peer that ends in this moment, for ever. So first messages are a thread's matter, which is left behind at the deadline.
"""

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from orrery.observe.deadline import scaled
from orrery.observe.network import name_interface
from orrery.transport.weight_wire.contract import ROUND_S, WireFailed

FORM_S = 30.0  # for a group's ranks to connect, all of which have just come
POLL_S = 0.0002
NEVER = timedelta(days=30)  # nccl's own watchdog would end the process

T = TypeVar("T")


class Peers:
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

    def send(self, message: Tensor, peer: int, number: int) -> "Sent":
        return Sent(
            self,
            self._start(lambda: self._group.send([message], peer, number), peer, "take"),
            peer,
            "take",
        )

    def receive(self, message: Tensor, peer: int, number: int) -> "Sent":
        return Sent(
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


class Sent:
    """A message on its way."""

    def __init__(self, peers: Peers, work: dist.Work, peer: int, verb: str) -> None:
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
