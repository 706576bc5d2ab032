"""Patches of vLLM's KV connectors. `registry` says why."""

import asyncio
import os
from collections import defaultdict
from typing import Any

from orrery.wire.weight_wire.links import wait_for_progress


def pause_beside_unread_blocks() -> None:
    """Let an engine pause with unread blocks, which a weight update does not change.

    Apply in each possible engine core.
    """
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
    """End reads from an ended engine. Apply in each possible Mooncake worker before it is made."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
        MooncakeConnectorWorker,
    )

    if hasattr(MooncakeConnectorWorker.receive_kv_from_single_worker, "orrery"):
        return
    original = MooncakeConnectorWorker.receive_kv_from_single_worker

    async def receive(self: Any, worker_addr: str, pull_metas: dict[str, Any]) -> None:
        engine_id = next(iter(pull_metas.values())).remote_engine_id
        receiving = asyncio.ensure_future(original(self, worker_addr, pull_metas))
        ended = asyncio.ensure_future(_end_of(self, engine_id).wait())
        await asyncio.wait({receiving, ended}, return_when=asyncio.FIRST_COMPLETED)
        for task in (receiving, ended):
            task.cancel()
        await asyncio.wait({receiving})
        if receiving.cancelled():
            left = [name for name, pull in pull_metas.items() if pull.pull_tasks_count > 0]
            self._handle_failed_recv(pull_metas, left, f"engine {engine_id} has ended")

    receive.orrery = True  # type: ignore[attr-defined]
    MooncakeConnectorWorker.receive_kv_from_single_worker = receive  # type: ignore[method-assign]


async def give_up_pulls_of(worker: Any, engine_id: str) -> None:
    """Fail current and later reads from an engine. Call this in the receiver loop.

    The engine must have ended, because a live engine may write into the blocks.
    """
    _end_of(worker, engine_id).set()


def _end_of(worker: Any, engine_id: str) -> asyncio.Event:
    events: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
    ends: dict[str, asyncio.Event] = vars(worker).setdefault("orrery_ends", events)
    return ends[engine_id]


def device_index_on_cpu() -> None:
    """Make the device index 0 on CPU. Apply in each possible Mooncake worker."""
    import torch

    if not torch.accelerator.is_available():
        torch.accelerator.current_device_index = lambda: 0


def nixl_that_waits() -> None:
    """Let NIXL's progress thread sleep on CPU. Apply before vLLM loads NIXL."""
    import torch
    from vllm.distributed import nixl_utils

    if torch.accelerator.is_available() or hasattr(nixl_utils._load_nixl_attr, "orrery"):
        return
    original = nixl_utils._load_nixl_attr

    def load(name: str) -> Any:
        value = original(name)  # None without NIXL
        if value is not None:
            wait_for_progress()
        return value

    load.orrery = True  # type: ignore[attr-defined]
    nixl_utils._load_nixl_attr = load
