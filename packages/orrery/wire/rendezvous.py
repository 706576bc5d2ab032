"""Publish and find the addresses of a stage's processes (roles).

Addresses are files in `stages/<stage>/endpoints/`. Files of earlier attempts are ignored.
`incarnation` counts a process's restarts.
"""

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from orrery.manifest.errors import RunFailed
from orrery.manifest.publish import write_atomic
from orrery.runtime.network import run_token
from orrery.runtime.run_directory import endpoints_dir
from orrery.runtime.timing import scaled
from orrery.wire import nfs

if TYPE_CHECKING:
    from orrery.manifest.schema import Manifest
    from orrery.runtime.role_context import RoleContext

_POLL_S, _POLL_AT_MOST_S = 0.02, 0.5


@dataclass(frozen=True)
class Endpoint:
    role: str
    index: int
    url: str
    pid: int
    incarnation: int
    info: dict[str, Any]


class _File(msgspec.Struct):
    role: str
    index: int
    url: str
    pid: int
    attempt: int
    incarnation: int
    info: dict[str, Any]


def _folder(ctx: "RoleContext") -> Path:
    return endpoints_dir(ctx.run_dir, ctx.stage)


def publish(ctx: "RoleContext", url: str, as_role: str = "", **info: Any) -> None:
    """Publish this process's address under `as_role` (default: its role).

    Raise RunFailed if this process lacks the run's token.
    """
    run_token()
    folder = _folder(ctx)
    folder.mkdir(parents=True, exist_ok=True)
    role = as_role or ctx.role
    file = _File(role, ctx.index, url, os.getpid(), ctx.attempt, ctx.incarnation, info)
    write_atomic(folder / f"{role}.{ctx.index}.json", msgspec.json.encode(file))


def find_endpoints(ctx: "RoleContext", role: str) -> list[Endpoint]:
    found = []
    for path in _folder(ctx).glob(f"{role}.*.json"):
        content = nfs.read(path)
        if content is None:
            continue
        try:
            file = msgspec.json.decode(content, type=_File)
        except msgspec.DecodeError as error:
            raise RunFailed(
                f"{path}: not an endpoint file ({error}). Remove it and run again"
            ) from error
        if file.attempt == ctx.attempt and file.role == role:
            found.append(
                Endpoint(file.role, file.index, file.url, file.pid, file.incarnation, file.info)
            )
    return sorted(found, key=lambda endpoint: endpoint.index)


def await_endpoints(
    ctx: "RoleContext",
    role: str,
    count: int,
    deadline_s: float,
    meanwhile: Callable[[], object] = lambda: None,
) -> list[Endpoint]:
    """Return endpoints 0 to `count` − 1 of `role` when all are published.

    Call `meanwhile` at each poll. Raise RunFailed after `deadline_s` seconds.
    """
    with ctx.health.waiting(f"{count} endpoint(s) of {role}", deadline_s=deadline_s):
        start = time.monotonic()
        while True:
            found = {endpoint.index: endpoint for endpoint in find_endpoints(ctx, role)}
            missing = [index for index in range(count) if index not in found]
            if not missing:
                return [found[index] for index in range(count)]
            meanwhile()
            waited_s = time.monotonic() - start
            if waited_s >= deadline_s:
                raise RunFailed(
                    f"{ctx.role} {ctx.index} waited {deadline_s:g} s for {role} "
                    f"{', '.join(map(str, missing))} to publish its address. "
                    f"Read logs/{role}.{missing[0]}.log"
                )
            time.sleep(min(max(_POLL_S, waited_s / 50), _POLL_AT_MOST_S))


# An engine's HTTP interface

ENGINE_HEADER = "X-Orrery-Engine"  # the answering engine's index
RANK_HEADER = "X-data-parallel-rank"
SESSION_HEADER = "X-Session-ID"  # key of vllm-router's consistent_hash policy
# Clients close idle connections before servers do (uvicorn: 5 s or more).
KEEPALIVE_S = 3.0
UPDATE_S = 300.0
NUM_CANARY_TOKENS = 32


def request_s(manifest: "Manifest") -> float:
    """Return an engine request's timeout, including a weight update."""
    return 2 * manifest.orchestrator.rollout_timeout_s + scaled(UPDATE_S)


def canary_tokens(manifest: "Manifest") -> tuple[int, ...]:
    """Return the canary: token ids of a test prompt, equal in all processes."""
    length = min(NUM_CANARY_TOKENS, manifest.inference.max_model_len_tokens - 1)
    chosen = random.Random(manifest.seed)
    return tuple(chosen.randrange(manifest.model.vocab_size) for _ in range(length))
