"""Routed experts in a Mooncake Store, beside the caches that engines share there (vLLM 0.32).

- Upstream's store shares blocks of cache; their routes stay with the engine that computed them.
- `share`: routes of a block go into the store as well, under the block's hash. Whoever loads a cache that another engine computed reads
  its routes there, once, and keeps them as its own (`patches.vllm_routes_elsewhere`).
- No cache without its routes: caches and routes are written by different threads and leave the store one by one, so a lookup of caches
  ends where routes are neither in this engine nor in the store. The worker that looks caches up is the one that has the routes.
- Of two engines that compute the same block at once the store keeps what comes first: should weights change in between, a block's routes
  may be one version newer or older than its cache, as tokens of one rollout are.
- Versions: 0.32 (seen). Remove where upstream's connector shares routes: `test_inference_kv_offload.py` passes without.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any

log = logging.getLogger("orrery.inference.routes")

SHARED = "ORRERY_ROUTES_SHARED"  # set where routes go into the store that caches go into
WAITING_BATCHES = 1024  # that may wait for the store; a step makes one

_clients: list[Any] = []  # of the Mooncake Store, which vLLM's worker makes: here, the newest last


def share(num_known_here: Callable[[list[str]], int]) -> None:
    """In each process that may be a worker, before it is made.

    Args:
        num_known_here: says of hashes of blocks, in hexadecimal, how many from the first have routes in this process.
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
        return look_up(
            self, known * self.hash_block_size + 1, block_hashes
        )  # one more: the last is always computed

    and_lend_the_store.orrery = True  # type: ignore[attr-defined]
    worker.MooncakeStoreWorker.__init__ = and_lend_the_store  # type: ignore[method-assign]
    worker.MooncakeStoreWorker.lookup = with_routes  # type: ignore[method-assign]


class SharedRoutes:
    """Routes of blocks in the store: written beside the engine's work, and given up where the store does not keep up."""

    far = True

    def __init__(self) -> None:
        self._batches: queue.Queue[tuple[list[str], list[bytes]]] = queue.Queue(WAITING_BATCHES)
        threading.Thread(target=self._write_all, name="orrery-shared-routes", daemon=True).start()

    def write(self, objects: Iterable[Any]) -> None:
        """Put routes away; `objects` have a `key` and a `payload`."""
        keys, payloads = zip(*((each.key, each.payload) for each in objects), strict=True)
        try:
            self._batches.put_nowait(([*map(_name, keys)], [*payloads]))
        except queue.Full:
            log.warning(
                "routes of %d blocks are not shared, for the store does not keep up; their caches are used here alone",
                len(keys),
            )

    def read(self, keys: list[str], num_bytes: int) -> list[bytes | None]:
        """The routes of these blocks, of `num_bytes` each; None where they have left the store."""
        try:
            found = _clients[-1].get_batch([*map(_name, keys)])
        except Exception as error:  # whatever a store that others have a part in may be up to
            log.warning(
                "routes of %d blocks cannot be read from the store, and are missing: %s",
                len(keys),
                error,
            )
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
    """How many of these blocks, from the first, have routes in the store."""
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
