"""The real vllm-router before stand-ins for engines: the answer that each credential gets."""

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from urllib.parse import quote, urlsplit

import psutil
import pytest
import uvicorn
from inference_servers import DENSE, await_published, family, make_run, start_role, stop
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from orrery.inference.plugin import RequireToken
from orrery.inference.router import ROUTES
from orrery.orchestrator.engines.client import EngineClient, RouterClient
from orrery.runtime.network import Purpose, credential
from orrery.runtime.role_context import parse_role
from orrery.wire import rendezvous

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

TOKEN = "of-this-run"
ANSWER = {
    "choices": [{"token_ids": [1], "logprobs": {"content": [{"logprob": 0.0}]},
                 "weight_versions": [{"version": "default", "start": 0, "end": 1}]}]
}  # fmt: skip
GENERATE = "/inference/v1/generate"
ADMINISTRATION = [
    *(
        "/pause",
        "/resume",
        "/collective_rpc",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/abort_requests",
    ),
    *(
        "/v1/load_lora_adapter",
        "/sleep",
        "/reset_prefix_cache",
        "/v1/completions",
        "/init_weight_transfer_engine",
        "/no_such_route",
    ),
]
KEYS = {
    "no token": None,
    "another run's token": credential("of another run", Purpose.ADMINISTER),
    "the token itself": TOKEN,
    "generate": credential(TOKEN, Purpose.GENERATE),
    "administer": credential(TOKEN, Purpose.ADMINISTER),
}
STRANGERS = ["no token", "another run's token", "the token itself"]


class StandIn:
    """An engine with the real check of credentials. It records requests and their endings."""

    def __init__(self, behind_door: bool = True) -> None:
        self.came: list[tuple[str, str | None]] = []
        self.is_held, self.ended = False, threading.Event()
        application = Starlette(
            routes=[Route("/{path:path}", self.answer, methods=["GET", "POST"])]
        )
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = "http://{}:{}".format(*self.socket.getsockname())
        config = uvicorn.Config(
            RequireToken(application) if behind_door else application,
            log_level="error",
            timeout_keep_alive=600,
        )
        self.server = uvicorn.Server(config)
        threading.Thread(target=self.server.run, args=([self.socket],), daemon=True).start()

    async def answer(self, request):
        if request.url.path == "/health":
            return PlainTextResponse("well")
        self.came.append((request.url.path, request.headers.get("authorization")))
        await request.body()
        if self.is_held:
            while not await request.is_disconnected():
                await asyncio.sleep(0.01)
            self.ended.set()
        return JSONResponse(ANSWER)


@pytest.fixture(scope="module")
def engines():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("orrery.runtime.network._token", TOKEN)
        found = [StandIn(), StandIn()]
    yield found
    for each in found:
        each.server.should_exit = True


def start_router(run_dir, engines):
    for index, engine in enumerate(engines):
        ctx = parse_role(
            "inference",
            ["--run-dir", str(run_dir), "--stage", "rl", "--index", str(index), "--attempt", "1"],
        )
        rendezvous.publish(ctx, engine.url)
        ctx.metrics.close()
    process = start_role("orrery.inference.router", run_dir, 0, TOKEN)
    return process, await_published(run_dir, "router", 0, process)


@pytest.fixture(scope="module")
def router(tmp_path_factory, engines):
    """Yield the router's process and address."""
    run_dir = make_run(tmp_path_factory.mktemp("front") / "run", DENSE, num_replicas=2)
    process, url = start_router(run_dir, engines)
    yield process, url
    stop(process)


@pytest.fixture(autouse=True)
def nothing_came(engines):
    for engine in engines:
        engine.came.clear()


def ask(url, key=None, method="POST", body=b"{}"):
    """Return the status and the text of the answer."""
    headers = {"Content-Type": "application/json"} | (
        {"Authorization": f"Bearer {key}"} if key else {}
    )
    request = urllib.request.Request(
        url, data=body if method == "POST" else None, headers=headers, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def workers(url):
    status, text = ask(f"{url}/list_workers", KEYS["administer"], "GET")
    assert status == 200, text
    return sorted(json.loads(text)["urls"])


@pytest.mark.parametrize("key", [*STRANGERS, "generate"])
def test_an_engine_of_a_strangers_own_is_refused_and_sees_nothing(router, engines, key):
    url, known, fake = (
        router[1],
        sorted(engine.url for engine in engines),
        StandIn(behind_door=False),
    )
    assert workers(url) == known
    there = quote(fake.url, safe="")
    for path in (
        f"/add_worker?url={there}",
        f"/remove_worker?url={quote(known[0], safe='')}",
        "/flush_cache",
        "/workers",
        "/pause",
    ):
        assert ask(url + path, KEYS[key])[0] == 401, path
    for path in ("/list_workers", "/workers", "/get_loads", "/health", "/v1/models"):
        assert ask(url + path, KEYS[key], "GET")[0] == 401, path
    assert workers(url) == known
    fake.server.should_exit = True
    assert not fake.came and not any(engine.came for engine in engines)


@pytest.mark.parametrize("key", [*STRANGERS, "administer"])
def test_no_key_but_one_generates_and_the_engine_hears_nothing_of_the_others(router, engines, key):
    status, text = ask(router[1] + GENERATE, KEYS[key])
    assert status == 401 and "token is missing or belongs to another run" in text
    assert not any(engine.came for engine in engines)


def test_of_the_administrative_key_only_the_list_of_engines_can_be_asked(router, engines):
    assert {path for (_, path), purpose in ROUTES.items() if purpose is Purpose.ADMINISTER} == {
        *("/health", "/add_worker", "/remove_worker", "/list_workers")
    }
    for path in ("/flush_cache", "/workers", "/pause", "/update_weights", "/no_such_route"):
        assert ask(router[1] + path, KEYS["administer"])[0] == 404, path
    for path in (
        "/inference/v1/%67enerate",
        "//inference/v1/generate",
        "/inference/v1/../v1/generate",
        "/add_worker/..//generate",
    ):
        assert ask(router[1] + path, KEYS["administer"])[0] in (401, 404), path
    assert not any(engine.came for engine in engines)


@pytest.mark.parametrize("key", STRANGERS)
def test_other_users_of_the_host_get_nothing_from_the_port_behind_the_front(router, engines, key):
    process, url = router
    ports = {
        connection.laddr.port
        for member in family(process)
        for connection in member.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port != urlsplit(url).port
    }
    statuses, fake = [], quote("http://127.0.0.1:9", safe="")
    for port in ports:
        inner = f"http://127.0.0.1:{port}"
        if ask(f"{inner}/metrics", method="GET")[0] == 200:  # the port of the metrics
            continue
        request = json.dumps(
            {"url": "http://127.0.0.1:9", "token_ids": [1], "sampling_params": {"max_tokens": 1}}
        ).encode()
        paths = (f"/add_worker?url={fake}", "/flush_cache", "/workers", "/pause", GENERATE)
        statuses += [ask(inner + path, KEYS[key], body=request)[0] for path in paths]
    assert statuses == [401] * 5
    assert workers(url) == sorted(engine.url for engine in engines) and not any(
        engine.came for engine in engines
    )


def test_what_an_engine_learns_from_a_request_does_not_administer_another(router, engines):
    async def request():
        async with RouterClient(router[1], TOKEN) as client:
            return await client.generate(
                [1, 2], max_tokens=1, temperature=1.0, cache_salt="a", request_id="r"
            )

    asyncio.run(request())
    [(path, learnt)] = [each for engine in engines for each in engine.came]
    assert path == GENERATE
    key = learnt.removeprefix("Bearer ")
    for path in ADMINISTRATION:
        assert ask(engines[0].url + path, key)[0] == 401, path
    assert ask(f"{router[1]}/add_worker?url=x", key)[0] == 401


@pytest.mark.parametrize(
    ("key", "lets_in"),
    [*((key, []) for key in STRANGERS), ("generate", [GENERATE]), ("administer", ADMINISTRATION)],
)
def test_the_door_of_an_engine_opens_by_credential(engines, key, lets_in):
    for path in (GENERATE, *ADMINISTRATION):
        assert ask(engines[0].url + path, KEYS[key])[0] == (200 if path in lets_in else 401), path
    assert [path for path, _ in engines[0].came] == lets_in


def test_the_fleets_client_brings_each_credential_where_it_belongs(router, engines):
    async def scenario():
        async with (
            RouterClient(router[1], TOKEN) as client,
            EngineClient(engines[0].url, TOKEN) as engine,
        ):
            await client.dismiss(engines[0].url)
            alone = workers(router[1])
            await client.admit(engines[0].url)
            await engine.pause()
            return alone, await client.health()

    assert asyncio.run(scenario()) == ([engines[1].url], True)
    assert workers(router[1]) == sorted(engine.url for engine in engines)
    assert [path for path, _ in engines[0].came] == ["/pause"]


def test_a_stranger_is_refused_before_the_body_comes(router):
    with socket.create_connection(
        (urlsplit(router[1]).hostname, urlsplit(router[1]).port), timeout=20
    ) as connection:
        connection.sendall(
            f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 40}\r\n\r\n".encode()
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 401 ")
        while connection.recv(4096):  # until the server closes, without reading the body
            pass


def test_a_caller_that_hangs_up_ends_its_request_in_the_engine(router, engines):
    async def scenario():
        async with RouterClient(router[1], TOKEN) as client:
            asked = asyncio.create_task(
                client.generate([1], max_tokens=1, temperature=1.0, cache_salt="a", request_id="r")
            )
            while not any(engine.came for engine in engines):
                await asyncio.sleep(0.01)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    for engine in engines:
        engine.is_held = True
        engine.ended.clear()
    try:
        asyncio.run(scenario())
        [engine] = [engine for engine in engines if engine.came]
        assert engine.ended.wait(20)
    finally:
        for engine in engines:
            engine.is_held = False


def test_the_role_ends_with_a_sentence_when_vllm_router_does(tmp_path, engines):
    run_dir = make_run(tmp_path / "run", DENSE, num_replicas=2)
    process, _ = start_router(run_dir, engines)
    [child] = psutil.Process(process.pid).children()
    assert not {"ORRERY_TOKEN_FILE", TOKEN} & {*child.environ(), *child.environ().values()}
    child.kill()
    assert process.wait(20) == 1
    assert (
        "error: router: vllm-router ended early (exit code -9)"
        in (run_dir / "logs" / "orrery.inference.router.0.log").read_text()
    )


async def test_a_router_that_logs_all_logs_no_credential(tmp_path, engines, monkeypatch):
    monkeypatch.setenv("ORRERY_LOG_LEVEL", "debug")
    run_dir = make_run(tmp_path / "run", DENSE, num_replicas=2)
    process, url = start_router(run_dir, engines)

    async with RouterClient(url, TOKEN) as client:
        await client.generate([1], max_tokens=1, temperature=1.0, cache_salt="a", request_id="r")
    stop(process)
    log = (run_dir / "logs" / "orrery.inference.router.0.log").read_text()
    assert (
        "DEBUG orrery.runtime.health: starting vllm-router" in log
        and "vllm_router_rs::policies" in log
    )
    assert not [
        secret
        for secret in (TOKEN, *(credential(TOKEN, each) for each in Purpose))
        if secret in log
    ]


def test_a_router_that_is_asked_to_end_while_it_waits_for_engines_ends_at_once(tmp_path):
    run_dir = make_run(tmp_path / "run", DENSE, num_replicas=2)
    process = start_role("orrery.inference.router", run_dir, 0, TOKEN)
    end = time.monotonic() + 30
    while (
        not any((run_dir / "stages" / "rl" / "health").glob("router*")) and time.monotonic() < end
    ):
        time.sleep(0.05)
    assert stop(process) < 5 and process.returncode == 143
