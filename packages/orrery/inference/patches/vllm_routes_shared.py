"""Patch vLLM: routed experts in a Mooncake Store, beside shared cache blocks.

- A block's routes are stored under its hash. An engine reads another's routes once and keeps them.
- Blocks and routes are evicted separately, so a lookup ends at the first block without routes.
- If two engines compute a block at once, the store keeps the first. Around an update its routes may
  be one version off its cache, as within one rollout.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any

log = logging.getLogger("orrery.inference.routes")

SHARED = "ORRERY_ROUTES_SHARED"
WAITING_BATCHES = 1024  # a step makes one

_clients: list[Any] = []  # in a worker, the newest last


def share(num_known_here: Callable[[list[str]], int]) -> None:
    """Apply in each possible worker, before it is made.

    `num_known_here` counts the block hashes (hexadecimal), from the first, with routes here.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import worker

    make, look_up = worker.MooncakeStoreWorker.__init__, worker.MooncakeStoreWorker.lookup
    if getattr(make, "orrery", False):
        return

    def and_lend_the_store(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        _clients.append(self.store)

    def with_routes(self: Any, num_tokens: int, block_hashes: Any) -> Any:
        found = look_up(self, num_tokens, block_hashes)
        keys = [block_hashes[i].hex() for i in range(found.hit_length // self.hash_block_size)]
        known = num_known_here(keys)
        known += _num_shared(keys[known:])
        if known == len(keys):
            return found
        # One more, because the last token is always computed.
        return look_up(self, known * self.hash_block_size + 1, block_hashes)

    and_lend_the_store.orrery = True  # type: ignore[attr-defined]
    worker.MooncakeStoreWorker.__init__ = and_lend_the_store  # type: ignore[method-assign]
    worker.MooncakeStoreWorker.lookup = with_routes  # type: ignore[method-assign]


class SharedRoutes:
    """Routes in the store, written by a thread. A slow store loses routes."""

    far = True

    def __init__(self) -> None:
        self._batches: queue.Queue[tuple[list[str], list[bytes]]] = queue.Queue(WAITING_BATCHES)
        threading.Thread(target=self._write_all, name="orrery-shared-routes", daemon=True).start()

    def write(self, objects: Iterable[Any]) -> None:
        keys, payloads = zip(*((each.key, each.payload) for each in objects), strict=True)
        try:
            self._batches.put_nowait(([*map(_name, keys)], [*payloads]))
        except queue.Full:
            log.warning(
                "routes of %d blocks are not shared, for the store does not keep up; "
                "their caches are used here alone",
                len(keys),
            )

    def read(self, keys: list[str], num_bytes: int) -> list[bytes | None]:
        """Return each block's routes of `num_bytes`, or None."""
        try:
            found = _clients[-1].get_batch([*map(_name, keys)])
        except Exception as error:  # a shared store may fail in any way
            what = "routes of %d blocks cannot be read from the store, and are missing: %s"
            log.warning(what, len(keys), error)
            return [None] * len(keys)
        return [
            payload if payload is not None and len(payload) == num_bytes else None
            for payload in found
        ]

    def _write_all(self) -> None:
        while True:
            names, payloads = self._batches.get()
            try:
                failed = _clients[-1].put_batch(names, payloads)
            except Exception as error:
                failed = error
            if failed:
                log.warning(
                    "routes of %d blocks are not shared: %s; their caches are used here alone",
                    len(names),
                    failed,
                )


def _num_shared(keys: list[str]) -> int:
    """Count the blocks, from the first, with routes in the store."""
    if not keys:
        return 0
    try:
        there = _clients[-1].batch_is_exist([*map(_name, keys)])
    except Exception as error:
        log.warning("the store does not say which routes it has: %s; caches are computed", error)
        return 0
    return next((i for i, each in enumerate(there) if each != 1), len(keys))


def _name(key: str) -> str:
    return f"orrery/routes/{key}"
