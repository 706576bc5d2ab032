"""`python -m orrery.inference.router`: vllm-router before the replicas of a stage.

- In: the engines' endpoints, by rendezvous. Out: the router's own endpoint, once it answers and knows every engine.
- The router only spreads /inference/v1/generate; control calls go to each engine itself (`orrery.transport.engine`).
- Everything listens on loopback, its Prometheus page too.
- It retries nothing and breaks no circuit: a failed request is the caller's data, and an engine that dies ends the stage.
- It is a child that the kernel kills with this process; if it ends by itself, so does this process, with a sentence.
"""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

from orrery.inference.assemble import HOST
from orrery.manifest.errors import OrreryError, RunFailed
from orrery.manifest.schema import Manifest
from orrery.observe.lifeline import die_with_parent
from orrery.observe.process import RoleProcess, role_process
from orrery.transport import rendezvous

ENGINES_DEADLINE_S = 600.0  # engines compile or load first
START_DEADLINE_S = 60.0
STOP_S = 2.0
POLL_S = 0.05


def router_arguments(manifest: Manifest, engine_urls: Sequence[str], port: int, metrics_port: int) -> list[str]:
    """The command line of `vllm-router`. Raises OrreryError where the manifest has no router."""
    router = manifest.inference.router
    if router.kind == "none":
        raise OrreryError("inference.router.kind is 'none': this run has no router to start")
    # Beyond this the router answers 429; admission is the orchestrator's, with one turn of slack for requests that are just ending.
    most = 2 * manifest.orchestrator.admission.max_in_flight + 64
    return [
        *("--worker-urls", *engine_urls),
        *("--policy", router.policy),
        *("--balance-abs-threshold", str(router.balance_abs_threshold)),
        *("--balance-rel-threshold", str(router.balance_rel_threshold)),
        *("--host", HOST, "--port", str(port)),
        *("--prometheus-host", HOST, "--prometheus-port", str(metrics_port)),
        *("--max-concurrent-requests", str(most)),
        *("--request-timeout-secs", str(int(manifest.orchestrator.rollout_timeout_s) + 60)),
        *("--log-level", "warning"),
        "--disable-retries",
        "--disable-circuit-breaker",
    ]


def main() -> None:
    with role_process("router") as me:
        engines = rendezvous.await_endpoints(me, "inference", me.manifest.inference.num_replicas, ENGINES_DEADLINE_S)
        metrics_port = _free_port()
        arguments = router_arguments(me.manifest, [engine.url for engine in engines], me.port, metrics_port)
        me.health.doing("starting vllm-router")
        process = subprocess.Popen([sys.executable, "-m", "vllm_router.launch_router", *arguments], preexec_fn=die_with_parent)
        try:
            _await_healthy(me, process)
            rendezvous.publish(me, f"http://{HOST}:{me.port}", metrics_url=f"http://{HOST}:{metrics_port}/metrics")
            me.health.doing("serving")
            code = process.wait()
            raise RunFailed(f"router: vllm-router ended by itself (exit code {code}); read logs/{me.name}.log")
        finally:
            _stop(process)


def _await_healthy(me: RoleProcess, process: "subprocess.Popen[bytes]") -> None:
    """Return when the router says that all its engines are ready."""
    end = time.monotonic() + START_DEADLINE_S
    with me.health.waiting("vllm-router to answer /health", deadline_s=START_DEADLINE_S):
        while True:
            if process.poll() is not None:
                raise RunFailed(f"router: vllm-router did not start (exit code {process.returncode}); read logs/{me.name}.log")
            try:
                with urllib.request.urlopen(f"http://{HOST}:{me.port}/health", timeout=2) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            if time.monotonic() > end:
                raise RunFailed(f"router: vllm-router did not answer /health within {START_DEADLINE_S:g} s; read logs/{me.name}.log")
            time.sleep(POLL_S)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    """A loopback port that is free now; the router has no way to choose one and say which."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
