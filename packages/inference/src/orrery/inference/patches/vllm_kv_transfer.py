"""Corrections to vLLM's KV connectors (0.32). None touches vLLM's files; each is one call, made where the comment says.

1. `pause_beside_unread_blocks`. Upstream: a pause with mode "keep" completes when the engine has no work, and finished requests whose
   blocks another engine has yet to read count as work (`Scheduler.has_finished_requests`); with the reader paused too, the pause lasts
   until the blocks' lease runs out. Unread blocks neither run on the device nor change with the weights, and are read beside the engine.
   Versions: 0.32 (seen). Remove when a "keep" pause returns at once with unread
   blocks: `test_inference_prefill_decode.py` passes without.
2. `bootstrap_on_one_address`. Upstream: `MooncakeConnectorWorker` starts its bootstrap server on 0.0.0.0. Versions: 0.32 (seen).
   Remove when it takes VLLM_HOST_IP.
3. `device_index_on_cpu`. Upstream: `MooncakeConnectorWorker.__init__` asks `torch.accelerator` for the current device, which raises on a
   machine without one. Versions: 0.32 (seen). Remove when it asks the platform.
4. `nixl_that_waits`. Upstream: NIXL's progress thread never sleeps (`orrery.transport.weight_wire.nixl`); vLLM loads NIXL in the engine core
   alone, so it is corrected there. Versions: 0.32 (seen). Remove with that correction.
5. `pulls_that_end_with_their_engine`. Upstream: `MooncakeConnectorWorker` waits for the answer of a producer for a minute longer than
   VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT, also of one that is dead; so long the request hangs, and holds its blocks when it is aborted. Nobody
   may end the wait before the producer has ended, which writes into those blocks: `give_up_pulls_of` is for who knows that it has.
   Versions: 0.32 (seen). Remove when a producer's death fails its pulls:
   `test_inference_prefill_decode.py` passes without.
"""

import asyncio
import os
from collections import defaultdict
from typing import Any

from orrery.transport.weight_wire.nixl import wait_for_progress


def pause_beside_unread_blocks() -> None:
    """In each process that may be an engine core, before it serves."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler

    if getattr(Scheduler.has_finished_requests, "orrery", False):
        return
    original = Scheduler.has_finished_requests

    def has_finished_requests(self: Any) -> bool:
        if self.pause_state == PauseState.PAUSED_ALL:
            return bool(self.finished_req_ids)
        return original(self)

    has_finished_requests.orrery = True  # type: ignore[attr-defined]
    Scheduler.has_finished_requests = has_finished_requests  # type: ignore[method-assign]


def bootstrap_on_one_address() -> None:
    """In each process that may be a worker with MooncakeConnector, before it is made."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import (
        mooncake_connector as connector,
    )

    server = connector.MooncakeBootstrapServer
    if not isinstance(server, type):
        return

    def on_host(_everywhere: str, port: int) -> Any:
        return server(os.environ["VLLM_HOST_IP"], port)

    connector.MooncakeBootstrapServer = on_host  # type: ignore[assignment,misc]


def pulls_that_end_with_their_engine() -> None:
    """In each process that may be a worker with MooncakeConnector, before it is made."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
        MooncakeConnectorWorker,
    )

    if hasattr(MooncakeConnectorWorker.receive_kv_from_single_worker, "orrery"):
        return
    original = MooncakeConnectorWorker.receive_kv_from_single_worker

    async def receive_kv_from_single_worker(
        self: Any, worker_addr: str, pull_metas: dict[str, Any]
    ) -> None:
        engine_id = next(iter(pull_metas.values())).remote_engine_id
        receiving = asyncio.ensure_future(original(self, worker_addr, pull_metas))
        ended = asyncio.ensure_future(_end_of(self, engine_id).wait())
        await asyncio.wait({receiving, ended}, return_when=asyncio.FIRST_COMPLETED)
        for task in (receiving, ended):
            task.cancel()
        await asyncio.wait({receiving})
        if receiving.cancelled():
            left = [
                name for name, pull in pull_metas.items() if pull.pull_tasks_count > 0
            ]  # the others have all of their blocks
            self._handle_failed_recv(pull_metas, left, f"engine {engine_id} has ended")

    receive_kv_from_single_worker.orrery = True  # type: ignore[attr-defined]
    MooncakeConnectorWorker.receive_kv_from_single_worker = receive_kv_from_single_worker  # type: ignore[method-assign]


async def give_up_pulls_of(worker: Any, engine_id: str) -> None:
    """In the loop of a `MooncakeConnectorWorker` that receives: fail its pulls from this engine, now and from now on."""
    _end_of(worker, engine_id).set()


def _end_of(worker: Any, engine_id: str) -> asyncio.Event:
    ends: dict[str, asyncio.Event] = vars(worker).setdefault(
        "orrery_ends", defaultdict(asyncio.Event)
    )
    return ends[engine_id]


def device_index_on_cpu() -> None:
    """On CPU, in each process that may be a worker with MooncakeConnector, before it is made."""
    import torch

    if not torch.accelerator.is_available():
        torch.accelerator.current_device_index = lambda: 0


def nixl_that_waits() -> None:
    """On CPU, in each process that may be a worker with NixlConnector, before vLLM loads NIXL."""
    import torch
    from vllm.distributed import nixl_utils

    if torch.accelerator.is_available() or hasattr(nixl_utils._load_nixl_attr, "orrery"):
        return
    original = nixl_utils._load_nixl_attr

    def load(name: str) -> Any:
        value = original(name)  # None where NIXL is not installed, of which vLLM tells
        if value is not None:
            wait_for_progress()
        return value

    load.orrery = True  # type: ignore[attr-defined]
    nixl_utils._load_nixl_attr = load
