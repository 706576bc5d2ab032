"""The real vllm-router before counting servers: turns of a session, and the spread of a pool."""

import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from inference_servers import REPOSITORY

from orrery.inference.router import _is_healthy, router_arguments
from orrery.manifest.check import check
from orrery.orchestrator.engines.client import RouterClient
from orrery.runtime.network import free_ports

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

HELD_S = 0.5  # longer than a busy machine takes to send a pool's requests
START_S = 60.0
THRESHOLDS = ("--balance-abs-threshold", "--balance-rel-threshold")
ROUTERS = {  # policy, and what of our arguments is left out
    "consistent_hash": ("consistent_hash", ()),
    "sticky_least_loaded": ("sticky_least_loaded", ()),
    "cache_aware": ("cache_aware", ()),
    "cache_aware as it comes": ("cache_aware", THRESHOLDS),
    "round_robin": ("round_robin", ()),
}


class Counting(BaseHTTPRequestHandler):
    """An engine as far as the router can tell: well, and answering after `held_s`, so that requests
    are in flight together.
    """

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.headers.get("X-Session-ID"), asked["token_ids"]))
        time.sleep(self.server.held_s)
        logprobs = {"content": [{"token_id": 1, "logprob": 0.0}]}
        versions = [{"version": "default", "start": 0, "end": 1}]
        choice = {"token_ids": [1], "logprobs": logprobs, "weight_versions": versions}
        self._answer({"choices": [choice]})

    def _answer(self, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def engines():
    # A hash ring's places come from addresses: the same every time, so that sessions are spread
    # alike every time.
    servers = [
        ThreadingHTTPServer((host, 20801), Counting) for host in ("127.77.0.1", "127.77.0.2")
    ]
    for server in servers:
        server.daemon_threads, server.seen, server.held_s = True, [], 0.0
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield servers
    for server in servers:
        server.shutdown()


@pytest.fixture(scope="module")
def routers(engines):
    """The address of each of ROUTERS, before the same two engines."""
    ports = free_ports(2 * len(ROUTERS))
    processes, urls = [], {}
    try:
        for name, (policy, left_out) in ROUTERS.items():
            port, metrics_port = ports.pop(), ports.pop()
            arguments = arguments_for(policy, engines, port, metrics_port)
            for flag in left_out:
                at = arguments.index(flag)
                del arguments[at : at + 2]
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "vllm_router.launch_router", *arguments],
                    stdout=subprocess.DEVNULL,
                )
            )
            urls[name] = f"http://127.0.0.1:{port}"
        end = time.monotonic() + START_S
        while not all(_is_healthy(url, {}) for url in urls.values()):
            assert not any(process.poll() for process in processes) and time.monotonic() < end
            time.sleep(0.05)
        yield urls
    finally:
        for process in processes:
            process.kill()
            process.wait()


def arguments_for(policy, engines, port, metrics_port):
    """Return the router's arguments for this policy."""
    manifest = json.loads((REPOSITORY / "manifests/reverse_text_smoke.json").read_text())
    absolute, relative = (2, 1.1) if policy == "cache_aware" else (None, None)
    router = {
        "kind": "vllm_router",
        "policy": policy,
        "balance_abs_threshold": absolute,
        "balance_rel_threshold": relative,
    }
    manifest["inference"] |= {"num_replicas": 2, "router": router}
    urls = ["http://{}:{}".format(*server.server_address) for server in engines]
    return router_arguments(check(manifest, "test"), urls, "127.0.0.1", port, metrics_port)


def send(url, engines, *waves, held_s=0.0):
    """Send waves of requests (session, prompt), each held `held_s`. Return them by engine."""

    async def main():
        async with RouterClient(url) as router:
            for wave in waves:
                await asyncio.gather(
                    *(
                        router.generate(
                            prompt,
                            max_tokens=1,
                            temperature=1.0,
                            cache_salt="a",
                            request_id=f"{i}",
                            session=session,
                        )
                        for i, (session, prompt) in enumerate(wave)
                    )
                )

    for engine in engines:
        engine.seen.clear()
        engine.held_s = held_s
    asyncio.run(main())
    return [list(engine.seen) for engine in engines]


def homes(seen):
    """The engines of each session."""
    found: dict[str, set[int]] = {}
    for index, requests in enumerate(seen):
        for session, _ in requests:
            found.setdefault(session, set()).add(index)
    return found


SESSIONS = 25  # odd, so that taking turns gives a session's turns to both engines


@pytest.mark.parametrize("name", ["consistent_hash", "sticky_least_loaded"])
def test_turns_of_a_session_stay_on_one_engine_by_its_header_alone(routers, engines, name):
    rng = random.Random(3)  # prompts share no prefix: only the header can keep them together
    turns = [
        [(f"group-7-{i}", [rng.randrange(40) for _ in range(50)]) for i in range(SESSIONS)]
        for _ in range(3)
    ]
    seen = send(routers[name], engines, *turns)
    assert [len(each) for each in homes(seen).values()] == [1] * SESSIONS
    assert min(map(len, seen)) >= 3 * SESSIONS / 4
    scattered = send(routers["round_robin"], engines, *turns)
    assert max(len(each) for each in homes(scattered).values()) == 2  # the header has no say there


def test_a_small_pool_with_a_common_prefix_is_spread_by_our_thresholds_and_not_by_the_routers_own(
    routers, engines
):
    pool = [(f"{i}", [7] * 80 + [i] * 20) for i in range(24)]
    assert min(map(len, send(routers["cache_aware"], engines, pool, held_s=HELD_S))) >= 8
    assert sorted(
        map(len, send(routers["cache_aware as it comes"], engines, pool[:1], pool, held_s=HELD_S))
    ) == [0, 25]


def test_cache_aware_keeps_a_session_by_its_prefix(routers, engines):
    first = [(f"{i}", [(11 * i + k) % 40 for k in range(60)]) for i in range(8)]
    later = [(session, prompt + prompt[:20]) for session, prompt in first]
    assert [
        len(each)
        for each in homes(
            send(routers["cache_aware"], engines, *([each] for each in first + later))
        ).values()
    ] == [1] * 8
