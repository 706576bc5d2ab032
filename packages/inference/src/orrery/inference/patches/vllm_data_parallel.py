"""A correction to vLLM 0.26 and 0.32 with data parallelism inside one server. It touches none of vLLM's files.

`answer_for_every_rank`. Upstream: `DPLBAsyncMPClient.call_utility_async` calls every data-parallel rank and returns "only the result from
the first engine", so that /collective_rpc says which weights rank 0 holds and nothing of the others: a rank that got other weights would
pass the attestation. Versions: 0.26 and 0.32 (read). Remove when `collective_rpc` returns the results of all workers of all ranks.
"""

import asyncio
from typing import Any


def answer_for_every_rank() -> None:
    """Before the engine client is built: /collective_rpc answers with one result a worker, rank after rank."""
    from vllm.v1.engine.core_client import DPLBAsyncMPClient

    async def collective_rpc_async(
        self: Any, method: Any, timeout: float | None = None, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        call = ("collective_rpc", method, timeout, args, kwargs)
        ranks = await asyncio.gather(*(self._call_utility_async(*call, engine=engine) for engine in self.core_engines))
        return [result for rank in ranks for result in rank]

    DPLBAsyncMPClient.collective_rpc_async = collective_rpc_async  # type: ignore[method-assign]
