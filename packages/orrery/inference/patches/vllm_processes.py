"""Patches of calls to data-parallel ranks, stores and shared memory. `registry` says why."""

import asyncio
import errno
import socket
import sys
from contextlib import suppress
from multiprocessing import shared_memory
from typing import Any

from orrery.runtime.scratch import SHARED_MEMORY

RANDOM_CHARACTERS = 16


def answer_for_every_rank() -> None:
    """Make /collective_rpc return all workers' results. Apply before the client is built."""
    from vllm.v1.engine.core_client import DPLBAsyncMPClient

    async def collective_rpc_async(
        self: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        call = ("collective_rpc", method, timeout, args, kwargs)
        ranks = await asyncio.gather(
            *(self._call_utility_async(*call, engine=engine) for engine in self.core_engines)
        )
        return [result for rank in ranks for result in rank]

    DPLBAsyncMPClient.collective_rpc_async = collective_rpc_async  # type: ignore[method-assign]


def meet_at_one_address() -> None:
    """Make TCP stores listen only at their host's address. Apply in every engine process."""
    import vllm.distributed.utils as vllm_stores

    vllm_stores.TCPStore = _store  # type: ignore[attr-defined,assignment,misc]
    sys.modules["torch.distributed.rendezvous"].TCPStore = _store  # type: ignore[attr-defined]


def _store(
    host_name: str,
    port: int,
    world_size: int | None = None,
    is_master: bool = False,
    **options: Any,
) -> Any:
    """Return a TCPStore at `host_name`. Raise DistNetworkError if the port is taken."""
    from torch.distributed import DistNetworkError, TCPStore

    if is_master and options.get("master_listen_fd") is None:
        try:
            listener = socket.create_server((host_name, port))
        except OSError as error:  # at this message vLLM tries another port
            name = errno.errorcode.get(error.errno or 0, "")
            raise DistNetworkError(f"{name} {host_name}:{port}: {error}") from error
        port = listener.getsockname()[1]
        options["master_listen_fd"] = listener.detach()
    return TCPStore(host_name, port, world_size, is_master, **options)


def name_shared_memory(name: str) -> None:
    """Put `name` into names of shared memory. Apply before any is made."""
    # Python's limit is FreeBSD's. Linux allows 255 characters.
    shared_memory._SHM_NAME_PREFIX = f"/{name}"  # type: ignore[attr-defined]
    length = len(name) + 1 + RANDOM_CHARACTERS
    shared_memory._SHM_SAFE_NAME_LENGTH = length  # type: ignore[attr-defined]
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _name_reductions(name)


def unlink_host_tiers(name: str) -> None:
    """Unlink each host tier's shared memory, once all processes have opened it.

    The kernel frees the memory with the last process. vLLM removes the empty file.
    """
    for path in SHARED_MEMORY.glob(f"vllm_offload_{name}*"):
        with suppress(FileNotFoundError):
            path.unlink()
            path.touch()


def _name_reductions(name: str) -> None:
    from vllm.distributed.device_communicators.cpu_communicator import (
        CpuCommunicator,
        _CPUSHMDistributed,
    )

    upstream = _CPUSHMDistributed.make_group_name

    def make_group_name(communicator: CpuCommunicator) -> str:
        return f"{name}{upstream(communicator)}"

    if upstream.__module__ != __name__:
        _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)
