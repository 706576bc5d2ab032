"""KV peers: what a worker does about an engine that is gone, with which it handed caches over.

- Half of a worker extension: its methods are called through /collective_rpc (`orrery.orchestrator.engines.disaggregated`), between steps.
- `keep_no_longer`: blocks whose reader is gone would stay until their lease runs out (`kv_transfer.lease_s`). It runs out now.
- `read_no_more`: a reader of NIXL's learns of its producer's end from the connection and fails the request; one of Mooncake's waits for
  an answer a minute longer than the lease, with the blocks that it reads into. It is told, and fails them.
"""

import asyncio
from typing import Any

from orrery.inference.patches.vllm_kv_transfer import give_up_pulls_of


class KvPeers:
    """Mixed into vLLM's worker class with `attestation.AttestingWorker`."""

    def keep_no_longer(self, names: list[str]) -> None:
        """As a prefill engine: free the blocks of these requests (NIXL) or transfers (Mooncake); those that were read are unknown here."""
        worker = _connector_worker()
        if not hasattr(worker, "reqs_need_send"):
            worker._reqs_to_send.update(
                {name: 0.0 for name in names if name in worker._reqs_to_send}
            )
            return

        async def expire() -> None:
            for name in names:
                if (kept := worker.reqs_need_send.get(name)) is not None:
                    kept.expire_time = 0.0

        asyncio.run_coroutine_threadsafe(expire(), worker.sender_loop).result()

    def read_no_more(self, kv_engine_id: str) -> None:
        """As a decode engine: fail what waits for blocks out of this engine, and what will."""
        worker = _connector_worker()
        if hasattr(worker, "receiver_loop"):
            asyncio.run_coroutine_threadsafe(
                give_up_pulls_of(worker, kv_engine_id), worker.receiver_loop
            ).result()


def _connector_worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().connector_worker  # type: ignore[attr-defined]
