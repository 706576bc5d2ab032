"""Run vllm-router for the engine replicas, behind a proxy that checks credentials.

- Only the proxy listens on `ctx.host`. The router and its Prometheus page listen on loopback.
- Retries and circuit breakers are off, because callers handle failed requests.
"""

import asyncio
import math
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from functools import partial
from urllib.parse import urlsplit

import uvloop

from orrery.inference.front import AUTHORIZED, Front
from orrery.manifest.errors import OrreryError, RunFailed
from orrery.manifest.schema import Manifest
from orrery.runtime.health import beating_loop
from orrery.runtime.network import LOOPBACK, free_ports, without_proxy
from orrery.runtime.parent_watch import die_with_parent
from orrery.runtime.role_context import RoleContext, log_level, role_process
from orrery.runtime.timing import scaled
from orrery.runtime.token import Purpose, authorization, run_token
from orrery.wire import rendezvous
from orrery.wire.rendezvous import request_s

ENGINES_DEADLINE_S = 600.0
CLIENT_FIRST_S = 60.0  # so that clients time out before the router
STOP_S = 2.0
WATCH_S = 0.25
PROGRAM = (sys.executable, "-c", "from orrery.inference.router import router_program as run; run()")


def router_arguments(
    manifest: Manifest, engine_urls: Sequence[str], host: str, port: int, metrics_port: int
) -> list[str]:
    """Return vllm-router's arguments. Raise OrreryError if the run has no router."""
    router = manifest.inference.router
    if router.kind == "none":
        raise OrreryError("inference.router.kind is 'none': this run has no router to start")
    # Above `most` requests, the router answers 429. The factor 2 lets old and new ones overlap.
    most = 2 * manifest.orchestrator.admission.max_in_flight + 64
    options = {
        "--balance-abs-threshold": router.balance_abs_threshold,
        "--balance-rel-threshold": router.balance_rel_threshold,
    }
    ranks = manifest.inference.data_parallel
    of_ranks = ["--intra-node-data-parallel-size", str(ranks)] if ranks > 1 else []
    thresholds = [(flag, str(value)) for flag, value in options.items() if value is not None]
    return [
        *("--worker-urls", *engine_urls),
        *("--policy", router.policy),
        *(word for pair in thresholds for word in pair),
        *of_ranks,
        *("--host", host, "--port", str(port)),
        *("--prometheus-host", host, "--prometheus-port", str(metrics_port)),
        *("--max-concurrent-requests", str(most)),
        *("--request-timeout-secs", str(math.ceil(request_s(manifest) + CLIENT_FIRST_S))),
        "--disable-retries",
        "--disable-circuit-breaker",
    ]


def router_program() -> None:
    """Run vllm-router. The first argument is the URL that validates API keys.

    vllm-router 0.1.17 has no option for this URL. Without the URL, it accepts every call.
    """
    from vllm_router.launch_router import launch_router, parse_router_args

    url, *arguments = sys.argv[1:]
    parsed = parse_router_args(arguments)
    parsed.api_key_validation_urls = [url] if url else []
    launch_router(parsed)


def main() -> None:
    with (
        role_process("router") as ctx,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_serve(ctx, run_token()))


async def _serve(ctx: RoleContext, token: str) -> None:
    deadline_s, is_left = scaled(ENGINES_DEADLINE_S), threading.Event()

    def end_early() -> None:
        if is_left.is_set():
            raise asyncio.CancelledError

    try:
        wanted = ("inference", ctx.manifest.inference.num_replicas, deadline_s, end_early)
        engines = await asyncio.to_thread(rendezvous.await_endpoints, ctx, *wanted)
    finally:
        is_left.set()
    urls = [engine.url for engine in engines]
    without_proxy([ctx.host, LOOPBACK, *(host for url in urls if (host := urlsplit(url).hostname))])
    port, metrics_port = free_ports(2)  # vllm-router does not report a port that it chooses
    inner = f"http://{LOOPBACK}:{port}"
    async with Front(token, inner) as front, beating_loop(ctx.health):
        url = await front.listen(ctx.host, ctx.port)
        ctx.health.doing("starting vllm-router")
        arguments = router_arguments(ctx.manifest, urls, LOOPBACK, port, metrics_port)
        # The router's Rust core ignores --log-level, and by default logs every request.
        level = (log_level() or "warning").replace("warning", "warn")
        process = subprocess.Popen(
            [*PROGRAM, url + AUTHORIZED if token else "", *arguments],
            preexec_fn=die_with_parent,
            env={"RUST_LOG": level} | os.environ,
        )
        try:
            key = authorization(token, Purpose.GENERATE)
            is_healthy = partial(_is_healthy, inner, key)
            start = process, "vllm-router", "answer /health", is_healthy
            await asyncio.to_thread(ctx.await_program, *start)
            rendezvous.publish(ctx, url, metrics_url=f"http://{LOOPBACK}:{metrics_port}/metrics")
            ctx.health.doing("serving")
            while (code := process.poll()) is None:
                await asyncio.sleep(WATCH_S)
            raise RunFailed(
                f"router: vllm-router ended early (exit code {code}). Read logs/{ctx.name}.log"
            )
        finally:
            _stop(process)


def _is_healthy(url: str, key: Mapping[str, str]) -> bool:
    try:
        request = urllib.request.Request(f"{url}/health", headers=dict(key))
        with urllib.request.urlopen(request, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
