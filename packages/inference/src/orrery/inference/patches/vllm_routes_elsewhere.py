"""Routed experts beside caches that come from elsewhere (vLLM 0.32): host memory, disk, a shared store, or the engine that prefilled.

Upstream keeps routes in a store of its own, as large as the device's cache and keyed by the hashes of its blocks. A block that comes back
from behind the device has lost its routes by then, and the engine ends over them ("auxiliary output object does not exist"); beside a
connector that hands caches over it does not start ("PD auxiliary output is not supported").

- `keep`: the store keeps as many routes as device and tiers keep blocks, on disk too where blocks are there (`routes_on_disk`); a reset
  of the device's prefix cache takes neither away. A block that is computed again has its routes written again.
- Where engines share a store, routes are in it as well (`patches.vllm_routes_shared`).
- No cache without its routes: what a tier may load of a prompt ends where routes are not known, and is computed from there. The store is
  the worker's, which may be another process than the scheduler's; so a step's output also says which routes came and went, and the
  scheduler keeps account. What has come since is unknown to it until the next step.
- `beside_transfer`: prefill and decode engines start with routes. The prefill engine answers with those of the prompt, the decode engine
  from the prompt's last token, which it computes itself (`orrery.orchestrator.engines.disaggregated` asks so). There a request begins within a
  block; the routes before it are unknown here.
- An unknown route is a row of the dtype's largest value (`orrery.transport.routed_experts`), never the end of an engine.
- Versions: 0.32 (seen). Remove where upstream's store follows the tiers and answers for P/D: `test_inference_kv_offload.py` and
  `test_inference_prefill_decode.py` pass without.
"""

import contextlib
import os
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any, Protocol

from orrery.inference.patches.vllm_routes_shared import SHARED, SharedRoutes, share
from orrery.inference.routes_on_disk import FOLDER, RoutesOnDisk, is_on_disk

KEPT = "ORRERY_ROUTES_KEPT"  # how many times the device's blocks the store has room for

CHANGES = "routes that came and went"  # among the outputs of requests, whose names have no blanks

_known: set[str] = (
    set()
)  # blocks whose routes this engine core's worker has in memory, in the process of the scheduler
_stores: list[Any] = []  # of routes, in the process of a worker: the newest last


def keep() -> None:
    """In each process that may be an engine core or a worker, before it is made."""
    from vllm.distributed.aux_output_connector import worker
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
    )
    from vllm.v1.core.sched.scheduler import Scheduler

    if getattr(worker.BlockObjectStore, "orrery", False):
        return
    worker.BlockObjectStore = _known_routes(worker.BlockObjectStore)  # type: ignore[misc]
    worker.routed_experts_keys = lambda hashes, _namespace: [each.hex() for each in hashes]
    matched = OffloadingConnectorScheduler.get_num_new_matched_tokens
    process_output, update_from_output = (
        worker.AuxOutputWorkerConnector.process_output,
        Scheduler.update_from_output,
    )

    def and_tell(self: Any, pending: Any) -> Any:
        outputs = process_output(self, pending)
        outputs[CHANGES] = self._store._store.changes()
        return outputs

    def and_hear(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        for key, is_kept in (model_runner_output.aux_output_connector_output or {}).pop(
            CHANGES, ()
        ):
            (_known.add if is_kept else _known.discard)(key)
        return update_from_output(self, scheduler_output, model_runner_output)

    def with_routes(
        self: Any, request: Any, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> Any:
        first = num_computed_tokens // self.config.tokens_per_hash
        known = _num_known(request.block_hashes[first:]) * self.config.tokens_per_hash
        return matched(
            self,
            request,
            num_computed_tokens,
            known if max_num_new_tokens is None else min(known, max_num_new_tokens),
        )

    worker.AuxOutputWorkerConnector.process_output = and_tell  # type: ignore[method-assign]
    Scheduler.update_from_output = and_hear  # type: ignore[method-assign]
    OffloadingConnectorScheduler.get_num_new_matched_tokens = with_routes  # type: ignore[method-assign]
    if SHARED in os.environ:
        share(lambda keys: _stores[-1].num_known(keys))


def beside_transfer() -> None:
    """In each process that may be an API server or an engine core, before its configuration is made."""
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.routed_experts import RoutedExpertsBuffer

    verify, capture = VllmConfig._verify_aux_output_compatibility, RoutedExpertsBuffer.capture
    if getattr(verify, "orrery", False):
        return

    def verify_the_rest(self: Any) -> None:
        transfer, self.kv_transfer_config = self.kv_transfer_config, None
        try:
            verify(self)
        finally:
            self.kv_transfer_config = transfer

    def capture_within_a_block(self: Any, request_id: Any, token_start: int, rows: Any) -> Any:
        before = token_start % self.block_size
        if before and request_id not in self._requests:
            tail = self._tail(request_id, token_start - before)
            self._rows[tail.slot, :before].view("u1")[...] = 0xFF
            tail.length = before
        return capture(self, request_id, token_start, rows)

    verify_the_rest.orrery = True  # type: ignore[attr-defined]
    VllmConfig._verify_aux_output_compatibility = verify_the_rest  # type: ignore[method-assign]
    RoutedExpertsBuffer.capture = capture_within_a_block  # type: ignore[method-assign]


def _num_known(block_hashes: Any) -> int:
    """How many of these blocks, from the first, have routes here."""
    keys = (each.hex() for each in block_hashes)
    return next(
        (i for i, key in enumerate(keys) if key not in _known and not is_on_disk(key)),
        len(block_hashes),
    )


class _Shelf(Protocol):
    """Where routes are kept behind memory; what is `far` is read once."""

    far: bool

    def write(self, objects: Iterable[Any]) -> None: ...

    def read(self, keys: list[str], num_bytes: int) -> list[bytes | None]: ...


def _shelf() -> _Shelf | None:
    if SHARED in os.environ:
        return SharedRoutes()
    return RoutesOnDisk() if FOLDER in os.environ else None


class _Slots(OrderedDict[str, int]):
    """Where the store has which block, as upstream's; and what of that is new."""

    def __init__(self, unallocated: int) -> None:
        super().__init__()
        self.unallocated = unallocated
        self.changes: deque[tuple[str, bool]] = (
            deque()
        )  # the store's thread adds, the output's takes

    def __setitem__(self, key: str, slot: int) -> None:
        super().__setitem__(key, slot)
        if slot != self.unallocated:
            self.changes.append((key, True))

    def pop(self, key: str, *default: Any) -> Any:
        self.changes.append((key, False))
        return super().pop(key, *default)


def _known_routes(store: type) -> type:
    """The store, without the ways in which an engine could end over it."""
    from vllm.distributed.aux_output_connector.store import BlockObject, BlockObjectStoreError

    class KnownRoutes(store):
        orrery = True

        def __init__(self, *, max_bytes: int, object_nbytes: int):
            super().__init__(
                max_bytes=int(max_bytes * float(os.environ.get(KEPT, "1"))),
                object_nbytes=object_nbytes,
            )
            self._lru = _Slots(self._UNALLOCATED_SLOT)
            self._shelf = _shelf()
            _stores.append(self)

        def changes(self) -> list[tuple[str, bool]]:
            """(block, whether its routes are kept) since the last call."""
            return [self._lru.changes.popleft() for _ in range(len(self._lru.changes))]

        def num_known(self, keys: list[str]) -> int:
            """How many of these blocks, from the first, have routes in memory."""
            return next((i for i, key in enumerate(keys) if not self._has(key)), len(keys))

        def put(self, objects: list[Any], **keys: Any) -> None:
            for each in objects:
                if self._has(each.key):  # computed again, maybe by newer weights
                    slot = self._lru[each.key]
                    self._arena[slot * self.object_nbytes : (slot + 1) * self.object_nbytes] = (
                        each.payload
                    )
            if self._shelf is not None and objects:
                self._shelf.write(objects)
            super().put(objects, **keys)

        def get_concatenated(self, keys: list[str]) -> bytes:
            here = {
                key: bytes(super(KnownRoutes, self).get_concatenated([key]))
                for key in keys
                if self._has(key)
            }
            if self._shelf is not None and len(here) < len(keys):
                behind = [key for key in keys if key not in here]
                read = zip(behind, self._shelf.read(behind, self.object_nbytes), strict=True)
                found = {key: payload for key, payload in read if payload is not None}
                if self._shelf.far:
                    with contextlib.suppress(
                        BlockObjectStoreError
                    ):  # no room: so they are read again
                        super().put([BlockObject(key, payload) for key, payload in found.items()])
                here |= found
            return b"".join(here.get(key, b"\xff" * self.object_nbytes) for key in keys)

        def _has(self, key: str) -> bool:
            return self._lru.get(key, self._UNALLOCATED_SLOT) != self._UNALLOCATED_SLOT

    return KnownRoutes
