"""The wire `nixl`: an engine rank reads slices out of a trainer rank's registered buckets, over RDMA where there is some (NIXL over UCX).

https://github.com/ai-dynamo/nixl. Both ends register their two buckets once a group; what they then need of one another, NIXL's own
metadata of an agent and the buckets' addresses, stands in the wire's store. Works between CPUs too (shared memory, or TCP).
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from orrery.manifest.errors import OrreryError
from orrery.observe.deadline import scaled
from orrery.observe.network import interface, name_ucx_devices
from orrery.transport.weight_wire.coordinator import StoreConnection
from orrery.transport.weight_wire.leases import ROUND_S, WireFailed

POLL_S = 0.0002
MEMORY = {"cpu": "DRAM", "cuda": "VRAM"}


class NixlAgent(msgspec.Struct):
    """What a source says of itself."""

    metadata: bytes
    memory: str
    device: int
    addresses: tuple[int, ...]  # of its buckets


def load() -> Any:
    """NIXL's Python API. Raises OrreryError where the package, or its build for this CUDA, is missing."""
    try:
        import nixl._api
    except ImportError as error:
        raise OrreryError(
            f"transport.weights 'nixl': NIXL cannot be loaded here ({error}); install nixl as locks/ has it, or set it to 'nccl'"
        ) from error
    return nixl._api


class RegisteredBuckets:
    """One process's agent with its buckets."""

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
        self._registration = self.agent.register_memory(
            [(b.data_ptr(), b.nbytes, self.device, "") for b in buckets], self.memory
        )

    def described(self) -> NixlAgent:
        return NixlAgent(
            self.agent.get_agent_metadata(),
            self.memory,
            self.device,
            tuple(bucket.data_ptr() for bucket in self.buckets),
        )

    def close(self) -> None:
        self.agent.deregister_memory(self._registration)


def offer(
    meeting: StoreConnection, generation: int, source: int, registered: RegisteredBuckets
) -> str:
    """Say where this source's buckets are; the key at which that stands."""
    key = f"nixl/{generation}/{source}"
    meeting.put(key, registered.described())
    return key


class NixlReader:
    """A target's access to one source."""

    def __init__(
        self, meeting: StoreConnection, generation: int, source: int, own: RegisteredBuckets
    ) -> None:
        self._own, self._source = own, source
        self._remote = meeting.get(
            f"nixl/{generation}/{source}", NixlAgent, f"trainer {source}, where its buckets are"
        )
        with self._reaching():
            self._name = own.agent.add_remote_agent(self._remote.metadata)
        self._name = self._name.decode() if isinstance(self._name, bytes) else self._name

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
        agent = self._own.agent
        local = agent.get_xfer_descs(
            [(into.data_ptr(), into.nbytes, self._own.device)], self._own.memory
        )
        there = agent.get_xfer_descs(
            [(self._remote.addresses[side] + offset, into.nbytes, self._remote.device)],
            self._remote.memory,
        )
        handle = agent.initialize_xfer("READ", local, there, self._name)
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
        """NIXL's errors have no class in common but Exception."""
        try:
            yield
        except Exception as error:
            raise WireFailed(
                f"weight wire: slices of trainer {self._source} cannot be read over NIXL ({error}); see its log"
            ) from error


PROGRESS_US = 20_000  # between two looks where nothing wakes it; what arrives does


def wait_for_progress() -> None:
    """In a process on CPU that makes agents, before it makes one. Raises ImportError where NIXL is not installed."""
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
