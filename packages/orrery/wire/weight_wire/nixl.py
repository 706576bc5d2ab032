"""The wire `nixl`: engine ranks read the trainer ranks' registered buckets (NIXL over UCX).

NIXL (https://github.com/ai-dynamo/nixl) uses RDMA, shared memory or TCP. Both ends register their
buckets once for each group of ranks. A source publishes its NIXL metadata and its buckets'
addresses in the wire's store.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from orrery.manifest.errors import OrreryError
from orrery.runtime.network import interface, name_ucx_devices
from orrery.runtime.timing import scaled
from orrery.wire.weight_wire.coordinator import StoreConnection
from orrery.wire.weight_wire.leases import ROUND_S, WireFailed

POLL_S = 0.0002
PROGRESS_US = 20_000  # longest sleep of NIXL's progress thread, which traffic wakes
MEMORY = {"cpu": "DRAM", "cuda": "VRAM"}


class NixlAgent(msgspec.Struct):
    metadata: bytes
    memory: str
    device: int
    addresses: tuple[int, ...]  # the buckets' memory addresses


def load() -> Any:
    """Return NIXL's Python API. Raises OrreryError if it cannot load."""
    try:
        import nixl._api
    except ImportError as error:
        raise OrreryError(
            f"transport.weights 'nixl': NIXL cannot be loaded here ({error}); "
            "install the nixl version of locks/, or set transport.weights to 'nccl'"
        ) from error
    return nixl._api


def wait_for_progress() -> None:
    """Patch NIXL so that the progress thread of a CPU process sleeps. Call before making an agent.

    `nixl_agent` sets `pthrDelay` to 0, so the thread of every idle process polls on a whole core.
    Seen with 1.5.1. Remove this when `nixl_agent_config` takes the delay. Raises ImportError
    without NIXL.
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
    def __init__(self, name: str, buckets: Sequence[torch.Tensor]) -> None:
        api = load()
        if buckets[0].device.type == "cpu":
            os.environ.setdefault("UCX_NET_DEVICES", interface())  # UCX would listen on all of them
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


def offer(
    store: StoreConnection, generation: int, source: int, registered: RegisteredBuckets
) -> str:
    """Publish this source's buckets. Return the key."""
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

    def read(
        self, side: int, offset: int, into: torch.Tensor, free: torch.cuda.Event | None
    ) -> None:
        if free is not None:
            free.synchronize()
        with self._reaching():
            self._read(side, offset, into)

    def close(self) -> None:
        self._own.agent.remove_remote_agent(self._name)

    def _read(self, side: int, offset: int, into: torch.Tensor) -> None:
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
                raise RuntimeError(f"it ended in state {state}")
        finally:
            agent.release_xfer_handle(handle)

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Turn NIXL's errors, which share only the class Exception, into WireFailed."""
        try:
            yield
        except Exception as error:
            raise WireFailed(
                f"weight wire: slices of trainer {self._source} cannot be read over NIXL "
                f"({error}); read logs/trainer.{self._source}.log"
            ) from error
