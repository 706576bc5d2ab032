"""Register Orrery as a vLLM plugin, and add methods to vLLM's worker class."""

import asyncio
import multiprocessing
import os
from collections import Counter
from typing import Any

from orrery.inference.assemble import ADAPTER_BACKEND, BACKEND
from orrery.inference.patches import registry
from orrery.runtime.parent_watch import die_with_parent
from orrery.wire.fingerprint import digest

# Environment variable: prefix of the engine's shared memory names.
SHARED = "ORRERY_SHARED_MEMORY"

_registered = False


def register() -> None:
    global _registered
    if _registered:
        return
    _registered = True
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for backend, name in ((BACKEND, "Receiver"), (ADAPTER_BACKEND, "AdapterReceiver")):
        WeightTransferEngineFactory.register_engine(backend, "orrery.inference.receiver", name)
    registry.correct_engine(os.environ.get(SHARED))
    os.register_at_fork(after_in_child=die_with_parent)  # forks do not call `register`
    if multiprocessing.parent_process() is not None:
        die_with_parent()


class AttestingWorker:
    """Methods added to vLLM's worker class (`--worker-extension-cls`)."""

    weight_transfer_engine: Any
    finish_weight_update: Any

    def untaken(self) -> str | None:
        """Return the last weight update's error, or None."""
        failure: str | None = self.weight_transfer_engine.failure
        return failure

    def give_up_update(self) -> None:
        self.weight_transfer_engine.failure = (
            self.untaken() or "another worker of this engine has not taken it"
        )
        self.finish_weight_update()

    def fingerprints(self) -> dict[str, list[str]]:
        """Return {tensor name: [hex fingerprint, kind]}. `receiver.py` defines the kinds."""
        return {
            name: [f"{fingerprint:016x}", how] for name, (fingerprint, how) in _held(self).items()
        }

    def attested(self) -> dict[str, Any]:
        """Return {"digest": digest of all fingerprints, "how": {kind: number of tensors}}."""
        held = _held(self)
        fingerprints = {name: fingerprint for name, (fingerprint, _) in held.items()}
        return {
            "digest": digest(fingerprints),
            "how": dict(Counter(how for _, how in held.values())),
        }

    def update_parts(self) -> dict[str, float]:
        """Return {step of the last weight update: seconds}, or {} for adapters."""
        parts = getattr(self.weight_transfer_engine, "parts", None)
        seconds = {} if parts is None else parts.seconds
        return {name: round(each, 6) for name, each in seconds.items()}

    def keep_no_longer(self, names: list[str]) -> None:
        """Free KV blocks kept for transfer. `names`: request (NIXL) or transfer (Mooncake) ids."""
        worker = _connector_worker()
        if not hasattr(worker, "reqs_need_send"):
            worker._reqs_to_send |= {name: 0.0 for name in names if name in worker._reqs_to_send}
            return

        async def expire() -> None:
            for name in names:
                if (kept := worker.reqs_need_send.get(name)) is not None:
                    kept.expire_time = 0.0

        asyncio.run_coroutine_threadsafe(expire(), worker.sender_loop).result()

    def read_no_more(self, kv_engine_id: str) -> None:
        """Fail Mooncake's KV reads from an ended engine. NIXL detects ended engines itself."""
        from orrery.inference.patches.vllm import give_up_pulls_of

        worker = _connector_worker()
        if hasattr(worker, "receiver_loop"):
            giving_up = give_up_pulls_of(worker, kv_engine_id)
            asyncio.run_coroutine_threadsafe(giving_up, worker.receiver_loop).result()


def _held(worker: AttestingWorker) -> dict[str, tuple[int, str]]:
    return getattr(worker.weight_transfer_engine, "held", None) or {}


def _connector_worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    group: Any = get_kv_transfer_group()
    return getattr(group, "sub_connectors", [group])[0].connector_worker
