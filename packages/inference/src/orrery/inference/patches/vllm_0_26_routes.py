"""Routed experts of vLLM 0.26: cheaper, on a CPU, and beside caches that come from host memory, disk, or the engine that prefilled.

Upstream keeps routes in the scheduler, by the place of a token's cache on the device, and starts with no KV connector beside them. All that
asks or answers here is in the scheduler's process, and its one thread.

- `beside_connectors`: the configuration passes.
- `keep`: when a tier has got a block, its routes are kept by the block's hash, on disk too where blocks are there (`routes_on_disk`). When
  a block comes back, they are put where it lies, before any request finds it there. No cache without its routes: what a tier may load of
  a prompt ends where they are not known. On disk a cache that was computed again under the same salt stays the older one, with the newer
  one's routes: they may be of two versions, as tokens of one rollout are.
- Prefill apart needs no more: routes of the prompt are the prefill engine's, and the decode engine is asked for those from the prompt's
  last token, which it computes itself (`orrery.transport.prefill_decode`).
- `list_blocks_of_prompts`: upstream lists all blocks of every request in every step, and reads them once, when the first token has come.
- `capture_on_cpu`: an engine on a CPU chooses experts where upstream's capture does not look.
- Versions: 0.26 (seen: `test_inference_kv_offload.py`, `test_inference_prefill_decode.py` and `test_inference_routes.py` with its Python).
  Remove with 0.26: in 0.32 routes are in a store of their own (`vllm_routes_elsewhere`).
"""

import logging
import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from orrery.inference.patches.vllm_routes_elsewhere import KEPT
from orrery.inference.routes_on_disk import FOLDER, RoutesOnDisk, is_on_disk

log = logging.getLogger("orrery.inference.routes")

WAITING_BATCHES = 4096  # that may wait for the disk; a request's step makes one


class _Block(NamedTuple):
    key: str
    payload: bytes


class KeptRoutes:
    """Routes of whole blocks by the blocks' hashes: as many as there is room for, those that were kept or read last.

    Args:
        slots: upstream's routes by place, [blocks · block_size, layers, top_k].
        max_blocks: to keep in memory.
    """

    def __init__(self, slots: np.ndarray, block_size: int, max_blocks: int):
        self._slots = slots.reshape(-1, block_size, *slots.shape[1:])
        self._max_blocks = max_blocks
        self._rows: OrderedDict[str, bytes] = OrderedDict()
        self._disk = RoutesOnDisk() if FOLDER in os.environ else None
        self._to_write: queue.Queue[list[_Block]] = queue.Queue(WAITING_BATCHES)
        self._reader = ThreadPoolExecutor(1, "orrery-routes-reader")
        if self._disk is not None:
            threading.Thread(target=self._write_all, name="orrery-routes-writer", daemon=True).start()

    def keep(self, blocks: Iterable[tuple[str, int]]) -> None:
        """The routes of these blocks, each a hash and where it is on the device; one computed again may be of newer weights."""
        new = [_Block(key, self._slots[place].tobytes()) for key, place in blocks]
        for key, payload in new:
            self._rows[key] = payload
            self._rows.move_to_end(key)
        while len(self._rows) > self._max_blocks:
            self._rows.popitem(last=False)
        if self._disk is not None and new:
            try:
                self._to_write.put_nowait(new)
            except queue.Full:
                log.warning("routes of %d blocks are not kept on disk, which does not keep up", len(new))

    def num_known(self, keys: list[str]) -> int:
        """How many of these blocks, from the first, have routes here."""
        return next((i for i, key in enumerate(keys) if key not in self._rows and not is_on_disk(key)), len(keys))

    def read(self, keys: list[str]) -> Future[list[bytes | None]]:
        """The routes of these blocks; None where they have gone since somebody asked."""
        here = [self._rows.get(key) for key in keys]
        for key in keys:
            if key in self._rows:
                self._rows.move_to_end(key)
        return self._reader.submit(self._read_the_rest, keys, here)

    def put_back(self, places: list[int], rows: list[bytes | None]) -> None:
        """Have blocks at these places again; one whose routes have gone has unknown ones, the largest value of the dtype."""
        for place, payload in zip(places, rows, strict=True):
            if payload is None:
                self._slots[place].view("u1")[...] = 0xFF
            else:
                self._slots[place] = np.frombuffer(payload, self._slots.dtype).reshape(self._slots.shape[1:])

    def _read_the_rest(self, keys: list[str], here: list[bytes | None]) -> list[bytes | None]:
        behind = [key for key, payload in zip(keys, here, strict=True) if payload is None]
        if self._disk is None or not behind:
            return here
        found = dict(zip(behind, self._disk.read(behind, self._slots[0].nbytes), strict=True))
        return [found.get(key) if payload is None else payload for key, payload in zip(keys, here, strict=True)]

    def _write_all(self) -> None:
        assert self._disk is not None
        while True:
            self._disk.write(self._to_write.get())


def beside_connectors() -> None:
    """In each process that may make a configuration: have one with routes and a KV connector, where upstream looks whether there is one.

    The check reads `is_kv_transfer_instance`, the first time after `try_verify_and_update_config`; that one reading says no.
    """
    from vllm.config import KVTransferConfig, VllmConfig

    verify, is_instance = VllmConfig.try_verify_and_update_config, KVTransferConfig.is_kv_transfer_instance
    if getattr(verify, "orrery", False):
        return
    unseen: list[Any] = []  # the one whose next reading is upstream's check

    def verify_and_look_away(self: Any) -> None:
        verify(self)
        if self.model_config is not None and self.model_config.enable_return_routed_experts:
            unseen[:] = [self.kv_transfer_config]

    def but_for_the_check(self: Any) -> bool:
        if unseen and unseen[0] is self:
            unseen.clear()
            return False
        return is_instance.__get__(self)

    verify_and_look_away.orrery = True  # type: ignore[attr-defined]
    VllmConfig.try_verify_and_update_config = verify_and_look_away  # type: ignore[method-assign]
    KVTransferConfig.is_kv_transfer_instance = property(but_for_the_check)  # type: ignore[assignment,method-assign]


def keep() -> None:
    """In each process that may be an engine core, before it is made."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    start, arrive = Scheduler.__init__, Scheduler._update_waiting_for_remote_kv
    connect, look_up = OffloadingConnectorScheduler.__init__, OffloadingConnectorScheduler._lookup
    load, promote = OffloadingConnectorScheduler.update_state_after_alloc, Scheduler._try_promote_blocked_waiting_request
    if getattr(start, "orrery", False):
        return
    tiers: list[Any] = []  # of this process: their connector, which a scheduler makes as it starts
    engine: list[Any] = []  # where there are tiers: the scheduler, and the routes that it keeps

    def start_with_routes(self: Any, *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        if not tiers:
            return
        manager = self.routed_experts_mgr
        max_blocks = int(self.kv_cache_config.num_blocks * float(os.environ[KEPT]))
        engine[:] = [self, KeptRoutes(manager.routed_experts_by_slot, manager.block_size, max_blocks)]

    def connect_and_listen(self: Any, *args: Any, **options: Any) -> None:
        connect(self, *args, **options)
        if self.config.blocks_per_chunk != 1 or len(self.config.kv_group_configs) != 1:
            raise RuntimeError("routes are kept by blocks of one kind of attention; see orrery/inference/patches/vllm_0_26_routes.py")
        tiers.append(self)
        complete_store = self.manager.complete_store

        def complete_and_keep(keys: Any, *rest: Any, **named: Any) -> None:
            scheduler, routes = engine
            cached = scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
            there = ((key, cached.get_one_block(key)) for key in keys)
            routes.keep((_name(key), block.block_id) for key, block in there if block is not None)
            complete_store(keys, *rest, **named)

        self.manager.complete_store = complete_and_keep

    def look_up_with_routes(self: Any, status: Any) -> int | None:
        num_tokens = look_up(self, status)
        if not num_tokens:
            return num_tokens
        size, keys = _keys(self, status)
        asked = status.num_locally_computed_tokens, num_tokens
        if status.req.__dict__.get("routes_asked", (None, 0))[0] != asked:  # who waits for room is looked up in every step
            status.req.routes_asked = asked, size * engine[1].num_known(keys[: num_tokens // size])
        return min(num_tokens, status.req.routes_asked[1])

    def load_with_routes(self: Any, request: Any, blocks: Any, num_external_tokens: int) -> None:
        load(self, request, blocks, num_external_tokens)
        if num_external_tokens:
            request.__dict__.pop("routes_asked", None)
            status = self._req_status[request.request_id]
            size, keys = _keys(self, status)
            request.routes_of_load = status.num_locally_computed_tokens // size, engine[1].read(keys[: num_external_tokens // size])

    def arrive_with_routes(self: Any, request: Any) -> None:
        coming = request.__dict__.pop("routes_of_load", None)
        if coming is not None:
            first, rows = coming[0], coming[1].result()
            group = self.routed_experts_mgr.attn_gid
            places = self.kv_cache_manager.get_block_ids(request.request_id)[group]
            engine[1].put_back(places[first : first + len(rows)], rows)
        arrive(self, request)

    def promote_with_routes(self: Any, request: Any) -> bool:
        coming = request.__dict__.get("routes_of_load")
        return (coming is None or coming[1].done()) and promote(self, request)  # like the load itself, they hold up nobody else

    start_with_routes.orrery = True  # type: ignore[attr-defined]
    Scheduler.__init__ = start_with_routes  # type: ignore[method-assign]
    Scheduler._update_waiting_for_remote_kv = arrive_with_routes  # type: ignore[method-assign]
    OffloadingConnectorScheduler.__init__ = connect_and_listen  # type: ignore[method-assign]
    OffloadingConnectorScheduler._lookup = look_up_with_routes  # type: ignore[method-assign]
    OffloadingConnectorScheduler.update_state_after_alloc = load_with_routes  # type: ignore[method-assign]
    Scheduler._try_promote_blocked_waiting_request = promote_with_routes  # type: ignore[method-assign]


def _name(key: bytes) -> str:
    """A block's hash, without the number of its group that upstream's keys end with, in the device's cache and in tiers."""
    return key[:-4].hex()


def _keys(connector: Any, status: Any) -> tuple[int, list[str]]:
    """Tokens of a block, and the keys of a request's blocks that are not on the device; as tiers know them."""
    (group,), (state,) = connector.config.kv_group_configs, status.group_states
    first = status.num_locally_computed_tokens // group.tokens_per_block
    return group.tokens_per_block, [_name(key) for key in state.offload_keys[first:]]


def list_blocks_of_prompts() -> None:
    """In each process that may be an engine core: list the blocks of requests that have no token yet, of which alone they are read."""
    from vllm.v1.core.sched.scheduler import Scheduler

    update = Scheduler._update_after_schedule
    if getattr(update, "orrery", False):
        return

    def update_and_list(self: Any, scheduler_output: Any) -> None:
        routes, self.enable_return_routed_experts = self.enable_return_routed_experts, False
        try:
            update(self, scheduler_output)
        finally:
            self.enable_return_routed_experts = routes
        for name in scheduler_output.num_scheduled_tokens if routes else ():
            if not self.requests[name].num_output_tokens:
                self._re_block_ids[name] = self.kv_cache_manager.get_block_ids(name)[self.routed_experts_mgr.attn_gid]

    update_and_list.orrery = True  # type: ignore[attr-defined]
    Scheduler._update_after_schedule = update_and_list  # type: ignore[method-assign]


def capture_on_cpu() -> None:
    """Before an engine on a CPU is made: tell upstream's capture which experts were chosen."""
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    select, apply = cpu_fused_moe.select_experts, MoERunner._apply_quant_method
    tell: list[Callable[[Any], None] | None] = [None]  # of the layer that computes

    def apply_and_tell(self: Any, *args: Any, **options: Any) -> Any:
        tell[0] = self.router.capture_fn
        return apply(self, *args, **options)

    def select_and_tell(*args: Any, **options: Any) -> Any:
        weights, chosen = select(*args, **options)
        if tell[0] is not None:
            tell[0](chosen)
        return weights, chosen

    MoERunner._apply_quant_method = apply_and_tell  # type: ignore[method-assign]
    cpu_fused_moe.select_experts = select_and_tell
