"""Patch vLLM: routed experts of blocks that leave the device or come from another engine.

- `keep`: the store has room for device and tiers, also on disk or in a shared store.
- A tier loads blocks only as far as their routes are known. The worker's store reports its changes
  to the scheduler with each step's output.
- `beside_transfer`: a decode engine has routes from the prompt's last token on, so requests begin
  within a block.
- An unknown route is a row of the dtype's largest value (`orrery.wire.routed_experts`).
"""

import contextlib
import os
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any, Protocol

from orrery.inference.bounded_folder import FOLDER, RoutesOnDisk, is_on_disk
from orrery.inference.patches.vllm_routes_shared import SHARED, SharedRoutes, share

KEPT = "ORRERY_ROUTES_KEPT"  # the store's size as a multiple of the device's blocks

CHANGES = "routes that came and went"  # its blanks distinguish it from request ids

_known: set[str] = set()  # in the scheduler: blocks with routes in the worker's memory
_stores: list[Any] = []  # in a worker: its stores, the newest last


def keep() -> None:
    """Apply in each possible engine core or worker, before it is made."""
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
    process_output = worker.AuxOutputWorkerConnector.process_output
    update_from_output = Scheduler.update_from_output

    def and_tell(self: Any, pending: Any) -> Any:
        outputs = process_output(self, pending)
        outputs[CHANGES] = self._store._store.changes()
        return outputs

    def and_hear(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = model_runner_output.aux_output_connector_output or {}
        for key, is_kept in outputs.pop(CHANGES, ()):
            (_known.add if is_kept else _known.discard)(key)
        return update_from_output(self, scheduler_output, model_runner_output)

    def with_routes(
        self: Any, request: Any, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> Any:
        first = num_computed_tokens // self.config.tokens_per_hash
        known = _num_known(request.block_hashes[first:]) * self.config.tokens_per_hash
        if max_num_new_tokens is not None:
            known = min(known, max_num_new_tokens)
        return matched(self, request, num_computed_tokens, known)

    worker.AuxOutputWorkerConnector.process_output = and_tell  # type: ignore[method-assign]
    Scheduler.update_from_output = and_hear  # type: ignore[method-assign]
    scheduler = OffloadingConnectorScheduler
    scheduler.get_num_new_matched_tokens = with_routes  # type: ignore[method-assign]
    if SHARED in os.environ:
        share(lambda keys: _stores[-1].num_known(keys))


def beside_transfer() -> None:
    """Apply in each possible API server or engine core, before its config is made."""
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
    """Count the blocks, from the first, with known routes."""
    keys = enumerate(each.hex() for each in block_hashes)
    unknown = (i for i, key in keys if key not in _known and not is_on_disk(key))
    return next(unknown, len(block_hashes))


class _Shelf(Protocol):
    """Storage behind memory. Memory keeps reads from a `far` shelf."""

    far: bool

    def write(self, objects: Iterable[Any]) -> None: ...

    def read(self, keys: list[str], num_bytes: int) -> list[bytes | None]: ...


def _shelf() -> _Shelf | None:
    if SHARED in os.environ:
        return SharedRoutes()
    return RoutesOnDisk() if FOLDER in os.environ else None


class _Slots(OrderedDict[str, int]):
    """vLLM's map from block to slot, with a record of changes."""

    def __init__(self, unallocated: int) -> None:
        super().__init__()
        self.unallocated = unallocated
        self.changes: deque[tuple[str, bool]] = deque()  # filled by the store's thread

    def __setitem__(self, key: str, slot: int) -> None:
        super().__setitem__(key, slot)
        if slot != self.unallocated:
            self.changes.append((key, True))

    def pop(self, key: str, *default: Any) -> Any:
        self.changes.append((key, False))
        return super().pop(key, *default)


def _known_routes(store: type) -> type:
    """Return a subclass that never ends its engine."""
    from vllm.distributed.aux_output_connector.store import BlockObject, BlockObjectStoreError

    class KnownRoutes(store):
        orrery = True

        def __init__(self, *, max_bytes: int, object_nbytes: int):
            max_bytes = int(max_bytes * float(os.environ.get(KEPT, "1")))
            super().__init__(max_bytes=max_bytes, object_nbytes=object_nbytes)
            self._lru = _Slots(self._UNALLOCATED_SLOT)
            self._shelf = _shelf()
            _stores.append(self)

        def changes(self) -> list[tuple[str, bool]]:
            """Return (block, whether its routes are kept) since the last call."""
            return [self._lru.changes.popleft() for _ in range(len(self._lru.changes))]

        def num_known(self, keys: list[str]) -> int:
            return next((i for i, key in enumerate(keys) if not self._has(key)), len(keys))

        def put(self, objects: list[Any], **keys: Any) -> None:
            for each in objects:
                if self._has(each.key):  # computed again, maybe by newer weights
                    begin = self._lru[each.key] * self.object_nbytes
                    self._arena[begin : begin + self.object_nbytes] = each.payload
            if self._shelf is not None and objects:
                self._shelf.write(objects)
            super().put(objects, **keys)

        def get_concatenated(self, keys: list[str]) -> bytes:
            get = super().get_concatenated
            here = {key: bytes(get([key])) for key in keys if self._has(key)}
            if self._shelf is not None and len(here) < len(keys):
                behind = [key for key in keys if key not in here]
                read = zip(behind, self._shelf.read(behind, self.object_nbytes), strict=True)
                found = {key: payload for key, payload in read if payload is not None}
                if self._shelf.far:
                    objects = [BlockObject(key, payload) for key, payload in found.items()]
                    with contextlib.suppress(BlockObjectStoreError):  # no room
                        super().put(objects)
                here |= found
            return b"".join(here.get(key, b"\xff" * self.object_nbytes) for key in keys)

        def _has(self, key: str) -> bool:
            return self._lru.get(key, self._UNALLOCATED_SLOT) != self._UNALLOCATED_SLOT

    return KnownRoutes
