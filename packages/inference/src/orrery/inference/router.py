"""`python -m orrery.inference.router`: vllm-router before the replicas of a stage.

- In: the engines' endpoints, by rendezvous. Out: the router's own endpoint, once it answers and knows every engine.
- The router only spreads /inference/v1/generate; control calls go to each engine itself (`orrery.transport.engine`).
- Everything listens on `me.host`, its Prometheus page too; the engines are reached without the site's proxy.
- It retries nothing and breaks no circuit: a failed request is the caller's data, and it is told of engines that go and come back
  (`orrery.transport.router`).
- It is a child that the kernel kills with this process; if it ends by itself, so does this process, with a sentence.
"""

import math
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from urllib.parse import urlsplit

from orrery.inference.program import await_start
from orrery.manifest.errors import OrreryError, RunFailed
from orrery.manifest.schema import Manifest
from orrery.observe.deadline import scaled
from orrery.observe.lifeline import die_with_parent
from orrery.observe.network import free_ports, without_proxy
from orrery.observe.process import role_process
from orrery.transport import rendezvous
from orrery.transport.fleet import request_s

ENGINES_DEADLINE_S = 600.0  # engines compile or load first
CLIENT_FIRST_S = 60.0  # beyond what a client waits: the router's end of a request is an HTTP 500, the client's says which time is over
STOP_S = 2.0


def router_arguments(manifest: Manifest, engine_urls: Sequence[str], host: str, port: int, metrics_port: int) -> list[str]:
    """The command line of `vllm-router`. Raises OrreryError where the manifest has no router."""
    router = manifest.inference.router
    if router.kind == "none":
        raise OrreryError("inference.router.kind is 'none': this run has no router to start")
    # Beyond this the router answers 429; admission is the orchestrator's, with one turn of slack for requests that are just ending.
    most = 2 * manifest.orchestrator.admission.max_in_flight + 64
    thresholds = {"--balance-abs-threshold": router.balance_abs_threshold, "--balance-rel-threshold": router.balance_rel_threshold}
    return [
        *("--worker-urls", *engine_urls),
        *("--policy", router.policy),
        *(word for flag, value in thresholds.items() if value is not None for word in (flag, str(value))),
        *("--host", host, "--port", str(port)),
        *("--prometheus-host", host, "--prometheus-port", str(metrics_port)),
        *("--max-concurrent-requests", str(most)),
        *("--request-timeout-secs", str(math.ceil(request_s(manifest) + CLIENT_FIRST_S))),
        "--disable-retries",
        "--disable-circuit-breaker",
    ]


def main() -> None:
    with role_process("router") as me:
        engines = rendezvous.await_endpoints(me, "inference", me.manifest.inference.num_replicas, scaled(ENGINES_DEADLINE_S))
        urls = [engine.url for engine in engines]
        free_port, metrics_port = free_ports(2, me.host)  # it has no way to choose one and say which
        port = me.port or free_port
        arguments = router_arguments(me.manifest, urls, me.host, port, metrics_port)
        without_proxy([me.host, *(host for url in urls if (host := urlsplit(url).hostname))])
        me.health.doing("starting vllm-router")
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm_router.launch_router", *arguments],
            preexec_fn=die_with_parent,
            env={"RUST_LOG": "warn"} | os.environ,  # --log-level stops at the router's Python; its core would write a line a request
        )
        try:
            url = f"http://{me.host}:{port}"
            await_start(me, process, "vllm-router", "answer /health", lambda: _is_healthy(url))
            rendezvous.publish(me, url, metrics_url=f"http://{me.host}:{metrics_port}/metrics")
            me.health.doing("serving")
            code = process.wait()
            raise RunFailed(f"router: vllm-router ended by itself (exit code {code}); read logs/{me.name}.log")
        finally:
            _stop(process)


def _is_healthy(url: str) -> bool:
    """Whether the router answers, and knows every engine as ready."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
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
