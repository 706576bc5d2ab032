"""Register Orrery as a vLLM plugin, extend vLLM's worker class, and check credentials."""

import asyncio
import hmac
import multiprocessing
import os
import secrets
from collections import Counter
from typing import TYPE_CHECKING, Any

from orrery.inference.assemble import ADAPTER_BACKEND, BACKEND, INDEX
from orrery.inference.patches import registry
from orrery.manifest.errors import RunFailed
from orrery.runtime.network import Purpose, credential, run_token
from orrery.runtime.process_control import die_with_parent
from orrery.wire.fingerprint import digest
from orrery.wire.rendezvous import ENGINE_HEADER

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Environment variable: prefix of shared memory names.
SHARED = "ORRERY_SHARED_MEMORY"
OPEN = ("/health", "/metrics")
GENERATE = "/inference/v1/generate"
UNAUTHORIZED = "this engine serves one run only: the token is missing or belongs to another run\n"
UNKNOWN_KEY = "the token that `orrery serve` printed is missing or wrong\n"

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
    """Methods for vLLM's worker class (`--worker-extension-cls`)."""

    weight_transfer_engine: Any
    finish_weight_update: Any

    def untaken(self) -> str | None:
        """Return the last update's error, or None."""
        failure: str | None = self.weight_transfer_engine.failure
        return failure

    def give_up_update(self) -> None:
        self.weight_transfer_engine.failure = (
            self.untaken() or "another worker of this engine has not loaded the update"
        )
        self.finish_weight_update()

    def fingerprints(self) -> dict[str, list[str]]:
        """Return {tensor name: [hex fingerprint, kind]}. `receiver.py` defines the kinds."""
        return {
            name: [f"{fingerprint:016x}", how] for name, (fingerprint, how) in _held(self).items()
        }

    def attested(self) -> dict[str, Any]:
        """Return {"digest": hash of all fingerprints, "how": {kind: number of tensors}}."""
        held = _held(self)
        fingerprints = {name: fingerprint for name, (fingerprint, _) in held.items()}
        return {
            "digest": digest(fingerprints),
            "how": dict(Counter(how for _, how in held.values())),
        }

    def update_parts(self) -> dict[str, float]:
        """Return {part of the last update: seconds}, or {} for adapters."""
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
        """Abort Mooncake's KV reads from an ended engine. NIXL detects ended engines itself."""
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


class RequireToken:
    """ASGI middleware: refuse (401) requests without the path's credential, before reading a body.

    OPEN paths need no credential, GENERATE needs `generate`, and all other paths `administer`.
    Without a token, an engine refuses all requests if a launcher started it, otherwise none.
    """

    def __init__(self, app: "ASGIApp") -> None:
        self.app = app
        try:
            token = run_token()
        except RunFailed:
            token = secrets.token_hex()
        self.name = (ENGINE_HEADER.lower().encode(), os.environ.get(INDEX, "").encode())
        keys = {each: f"Bearer {credential(token, each)}".encode() for each in Purpose}
        self.wanted = keys if token else None

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        app = self.app
        if self.wanted and scope["type"] != "lifespan" and scope["path"] not in OPEN:
            given = dict(scope["headers"]).get(b"authorization", b"")
            purpose = Purpose.GENERATE if scope["path"] == GENERATE else Purpose.ADMINISTER
            if not hmac.compare_digest(given, self.wanted[purpose]):
                app = _refusal(UNAUTHORIZED)
        await app(scope, receive, self._named(send) if scope.get("path") == GENERATE else send)

    def _named(self, send: "Send") -> "Send":
        async def named(message: "Message") -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), self.name]
            await send(message)

        return named


class RequireKey:
    """ASGI middleware of `orrery serve`: refuse (401) requests without the token.

    vLLM's own `--api-key` leaves some paths open.
    """

    def __init__(self, app: "ASGIApp") -> None:
        self.app, self.wanted = app, f"Bearer {run_token()}".encode()

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        app = self.app
        if scope["type"] != "lifespan" and scope["path"] not in OPEN:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.wanted):
                app = _refusal(UNKNOWN_KEY)
        await app(scope, receive, send)


def _refusal(text: str) -> "ASGIApp":
    from starlette.responses import PlainTextResponse

    return PlainTextResponse(text, 401)
