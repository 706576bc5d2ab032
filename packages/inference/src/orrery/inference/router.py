"""Run vllm-router for a stage's replicas, behind a front that checks callers.

- In: the engines' endpoints, by rendezvous. Out: the front's endpoint, once the router knows every
  engine.
- Only the front (`front`) listens on `ctx.host`. The router is on loopback and takes only
  `generate`.
- The router only spreads /inference/v1/generate; control calls go to each engine itself (`orrery.orchestrator.engines.client`).
- Its Prometheus page is on loopback too, without a key: counts and durations of requests, and the engines' addresses.
- It retries nothing and breaks no circuit: a failed request is the caller's data. It is told of engines that go and come back
  (`orrery.orchestrator.engines.client`), and reaches them without the site's proxy.
- It is a child that the kernel kills with this process; if it ends by itself, so does this process, with a sentence.
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
from urllib.parse import urlsplit

import uvloop

from orrery.inference.front import AUTHORIZED, Front
from orrery.inference.program import await_start
from orrery.manifest.errors import OrreryError, RunFailed
from orrery.manifest.schema import Manifest
from orrery.runtime.health import beating_loop
from orrery.runtime.network import LOOPBACK, free_ports, without_proxy
from orrery.runtime.parent_watch import die_with_parent
from orrery.runtime.role_context import RoleContext, log_level, role_process
from orrery.runtime.timing import scaled
from orrery.transport import rendezvous
from orrery.transport.engine_api import request_s
from orrery.transport.token import Purpose, authorization, run_token

ENGINES_DEADLINE_S = 600.0  # engines compile or load first
CLIENT_FIRST_S = 60.0  # beyond what a client waits: the router's end of a request is an HTTP 500, the client's says which time is over
STOP_S = 2.0
WATCH_S = 0.25
PROGRAM = (sys.executable, "-m", "orrery.inference.router_program")


def router_arguments(
    manifest: Manifest, engine_urls: Sequence[str], host: str, port: int, metrics_port: int
) -> list[str]:
    """The command line of `vllm-router`. Raises OrreryError where the manifest has no router."""
    router = manifest.inference.router
    if router.kind == "none":
        raise OrreryError("inference.router.kind is 'none': this run has no router to start")
    # Beyond this the router answers 429; admission is the orchestrator's, with one turn of slack for requests that are just ending.
    most = 2 * manifest.orchestrator.admission.max_in_flight + 64
    thresholds = {
        "--balance-abs-threshold": router.balance_abs_threshold,
        "--balance-rel-threshold": router.balance_rel_threshold,
    }
    return [
        *("--worker-urls", *engine_urls),
        *("--policy", router.policy),
        *(
            word
            for flag, value in thresholds.items()
            if value is not None
            for word in (flag, str(value))
        ),
        *("--host", host, "--port", str(port)),
        *("--prometheus-host", host, "--prometheus-port", str(metrics_port)),
        *("--max-concurrent-requests", str(most)),
        *("--request-timeout-secs", str(math.ceil(request_s(manifest) + CLIENT_FIRST_S))),
        "--disable-retries",
        "--disable-circuit-breaker",
    ]


def main() -> None:
    with (
        role_process("router") as ctx,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_serve(ctx, run_token()))


async def _serve(ctx: RoleContext, token: str) -> None:
    deadline_s, is_left = scaled(ENGINES_DEADLINE_S), threading.Event()

    def end_early() -> None:
        if is_left.is_set():  # asyncio waits for its threads at the end
            raise asyncio.CancelledError

    try:
        engines = await asyncio.to_thread(
            rendezvous.await_endpoints,
            ctx,
            "inference",
            ctx.manifest.inference.num_replicas,
            deadline_s,
            end_early,
        )
    finally:
        is_left.set()
    urls = [engine.url for engine in engines]
    without_proxy([ctx.host, LOOPBACK, *(host for url in urls if (host := urlsplit(url).hostname))])
    port, metrics_port = free_ports(2)  # vllm-router cannot choose and report a port
    inner = f"http://{LOOPBACK}:{port}"
    async with Front(token, inner) as front, beating_loop(ctx.health):
        url = await front.listen(ctx.host, ctx.port)
        ctx.health.doing("starting vllm-router")
        process = subprocess.Popen(
            [
                *PROGRAM,
                url + AUTHORIZED if token else "",
                *router_arguments(ctx.manifest, urls, LOOPBACK, port, metrics_port),
            ],
            preexec_fn=die_with_parent,
            # --log-level is only for the router's Python; its core would log every request
            env={"RUST_LOG": (log_level() or "warning").replace("warning", "warn")} | os.environ,
        )
        try:
            key = authorization(token, Purpose.GENERATE)
            await asyncio.to_thread(
                await_start,
                ctx,
                process,
                "vllm-router",
                "answer /health",
                lambda: _is_healthy(inner, key),
            )
            rendezvous.publish(ctx, url, metrics_url=f"http://{LOOPBACK}:{metrics_port}/metrics")
            ctx.health.doing("serving")
            while (code := process.poll()) is None:
                await asyncio.sleep(WATCH_S)
            raise RunFailed(
                f"router: vllm-router ended by itself (exit code {code}); read logs/{ctx.name}.log"
            )
        finally:
            _stop(process)


def _is_healthy(url: str, key: Mapping[str, str]) -> bool:
    """Whether the router answers, and knows every engine as ready."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/health", headers=dict(key)), timeout=2
        ) as answer:
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
