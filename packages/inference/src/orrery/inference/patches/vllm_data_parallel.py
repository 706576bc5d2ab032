"""Corrections to vLLM 0.32 with data parallelism inside one server. None touches vLLM's files.

1. `answer_for_every_rank`. Upstream: `DPLBAsyncMPClient.call_utility_async` calls every data-parallel rank and returns "only the result
   from the first engine", so that /collective_rpc says which weights rank 0 holds and nothing of the others: a rank that got other weights
   would pass the attestation. Versions: 0.32 (read). Remove when `collective_rpc` returns the results of all workers of all ranks.
2. `meet_at_one_address`. Upstream: data-parallel ranks meet by torch's TCPStore, which has no token, and listens on every interface,
   whatever host it is told, unless it is handed a bound socket: by `create_tcp_store` or a tcp:// address. Versions:
   0.32 (seen: `test_inference_wide_engine.py`). Remove when vLLM always hands it one of its host.
"""

import asyncio
import errno
import socket
import sys
from typing import Any


def answer_for_every_rank() -> None:
    """Before the engine client is built: /collective_rpc answers with one result a worker, rank after rank."""
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
    """In every process of an engine: the stores that it opens, and torch for it, listen at the host that they are given."""
    import vllm.distributed.utils as vllm_stores

    vllm_stores.TCPStore = _store  # type: ignore[attr-defined,assignment,misc]
    sys.modules["torch.distributed.rendezvous"].TCPStore = _store  # type: ignore[attr-defined]  # its package has a function of that name


def _store(
    host_name: str,
    port: int,
    world_size: int | None = None,
    is_master: bool = False,
    **options: Any,
) -> Any:
    """A TCPStore, of which a server listens at `host_name` alone. Raises torch's DistNetworkError where the port is taken."""
    from torch.distributed import DistNetworkError, TCPStore

    if is_master and options.get("master_listen_fd") is None:
        try:
            listener = socket.create_server((host_name, port))
        except OSError as error:  # vLLM looks for the name, and tries another port
            raise DistNetworkError(
                f"{errno.errorcode.get(error.errno, '')} {host_name}:{port}: {error}"
            ) from error
        port = listener.getsockname()[1]
        options["master_listen_fd"] = listener.detach()
    return TCPStore(host_name, port, world_size, is_master, **options)
