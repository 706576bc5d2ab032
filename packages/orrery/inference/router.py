"""Run vllm-router for the engine replicas, behind a proxy (`Front`) that checks credentials.

- Without the proxy, any caller could add engines. The router validates API keys at the proxy's
  route `AUTHORIZED`, so it also refuses callers that bypass the proxy.
- The proxy listens on `ctx.host`. The router and its Prometheus page listen on loopback.
- Retries and circuit breakers are off, because callers handle failed requests.
"""

import asyncio
import hmac
import logging
import math
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import uvloop

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.manifest.schema import Manifest
from orrery.runtime.health import beating_loop
from orrery.runtime.network import (
    LOOPBACK,
    Purpose,
    authorization,
    free_ports,
    run_token,
    without_proxy,
)
from orrery.runtime.process_control import die_with_parent
from orrery.runtime.role_context import RoleContext, log_level, role_process
from orrery.runtime.timing import scaled
from orrery.wire import rendezvous
from orrery.wire.rendezvous import ENGINE_HEADER, KEEPALIVE_S, SESSION_HEADER, request_s

ENGINES_DEADLINE_S = 600.0
CLIENT_FIRST_S = 60.0  # added to the router's timeout, so that clients time out first
STOP_S = 2.0
WATCH_S = 0.25
PROGRAM = (sys.executable, "-c", "from orrery.inference.router import router_program as run; run()")
AUTHORIZED = "/authorized"  # route: 200 if the caller has the credential `generate`
ROUTES = {
    ("GET", AUTHORIZED): Purpose.GENERATE,
    ("POST", "/inference/v1/generate"): Purpose.GENERATE,
    ("GET", "/health"): Purpose.ADMINISTER,
    ("POST", "/add_worker"): Purpose.ADMINISTER,
    ("POST", "/remove_worker"): Purpose.ADMINISTER,
    ("GET", "/list_workers"): Purpose.ADMINISTER,
}
ASKED = {b"content-type", SESSION_HEADER.lower().encode()}
PASSED = {b"content-type", b"content-encoding", ENGINE_HEADER.lower().encode()}
MAX_HEAD_BYTES = 1 << 14
MAX_BODY_BYTES = 1 << 26  # a prompt of a million tokens takes 8 MB of JSON
BACKLOG = 1024  # the orchestrator opens hundreds at once
KEPT_S = 600.0  # callers close idle connections earlier
SWEEP_S = 10.0
LINGER_S = 1.0

_UNAUTHORIZED = "this router serves one run only: the token is missing or belongs to another run\n"
log = logging.getLogger("orrery.inference.router")


def router_arguments(
    manifest: Manifest, engine_urls: Sequence[str], host: str, port: int, metrics_port: int
) -> list[str]:
    """Return vllm-router's arguments. Raise OrreryError if the run has no router."""
    router = manifest.inference.router
    if router.kind == "none":
        raise OrreryError("inference.router.kind is 'none': this run has no router to start")
    # The router answers 429 above `most`. Factor 2, because old and new requests may overlap.
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

    vllm-router 0.1.17 has no option for this URL, and without it accepts every call.
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
    port, metrics_port = free_ports(2)  # vllm-router does not report its port
    inner = f"http://{LOOPBACK}:{port}"
    async with Front(token, inner) as front, beating_loop(ctx.health):
        url = await front.listen(ctx.host, ctx.port)
        ctx.health.doing("starting vllm-router")
        arguments = router_arguments(ctx.manifest, urls, LOOPBACK, port, metrics_port)
        # The Rust core ignores --log-level, and by default logs every request.
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


class Front:
    """The proxy. With an empty token, it accepts all requests."""

    def __init__(self, token: str, router_url: str) -> None:
        address = urlsplit(router_url)
        self._host, self._port = address.hostname or "", address.port or 80
        onward = authorization(token, Purpose.GENERATE)
        lines = [f"Host: {address.netloc}", *(f"{name}: {key}" for name, key in onward.items())]
        self.onward_head = "".join(f"{line}\r\n" for line in lines).encode()
        self._has_token = bool(token)
        self._wanted = {
            purpose: authorization(token, purpose).get("Authorization", "").encode()
            for purpose in Purpose
        }
        self.callers: set[_Caller] = set()
        self.idle: list[_Upstream] = []
        self._upstreams: set[_Upstream] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []

    async def __aenter__(self) -> "Front":
        self._start(self._sweep())
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        transports = [each.transport for each in self.callers]
        for transport in transports + [each.transport for each in self._upstreams]:
            transport.abort()

    async def listen(self, host: str, port: int) -> str:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Caller(self), host, port, backlog=BACKLOG)
        self._servers.append(server)
        return "http://{}:{}".format(*server.sockets[0].getsockname()[:2])

    def allows(self, method: str, path: str, given: bytes) -> bool:
        """Return whether credential `given` permits a route. Unknown routes need `administer`."""
        purpose = ROUTES.get((method, path), Purpose.ADMINISTER)
        return hmac.compare_digest(given, self._wanted[purpose]) or not self._has_token

    def forward(self, caller: "_Caller", request: bytes) -> None:
        oldest_s = asyncio.get_running_loop().time() - KEEPALIVE_S
        while self.idle:
            upstream = self.idle.pop()
            if upstream.idle_since_s >= oldest_s and not upstream.transport.is_closing():
                return upstream.ask(caller, request)
            upstream.transport.close()
        self._start(self._connect(caller, request))

    async def _connect(self, caller: "_Caller", request: bytes) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, upstream = await loop.create_connection(
                lambda: _Upstream(self), self._host, self._port
            )
        except OSError as error:
            return caller.fail(error)
        self._upstreams.add(upstream)
        if caller.transport.is_closing():
            upstream.transport.close()
        else:
            upstream.ask(caller, request)

    def forget(self, upstream: "_Upstream") -> None:
        self._upstreams.discard(upstream)
        if upstream in self.idle:
            self.idle.remove(upstream)

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = asyncio.get_running_loop().time()
            for caller in list(self.callers):
                if not caller.is_waiting and caller.last_s < now_s - KEPT_S:
                    caller.transport.close()
            for upstream in list(self.idle):
                if upstream.idle_since_s < now_s - KEEPALIVE_S:
                    upstream.transport.close()


class _Caller(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, front: Front) -> None:
        self._front, self._loop = front, asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._is_refused, self.is_paused = False, False
        self.upstream: _Upstream | None = None
        self.is_waiting, self.is_answered = False, False
        self._begin()

    def _begin(self) -> None:
        self.last_s, self._head_bytes, self._is_in_head = self._loop.time(), 0, True
        self._url, self._given, self._kept = b"", b"", b""
        self._body: list[bytes] = []
        self._body_bytes, self._expects = 0, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop has another class
        self._front.callers.add(self)

    def connection_lost(self, _: Exception | None) -> None:
        self._front.callers.discard(self)
        if self.upstream is not None:
            self.upstream.drop()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self.last_s = self._loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._is_refused:
                log.warning("refused a malformed request of %s: %r", self._peer(), error)
                self._refuse(400, "this is no HTTP/1.1 request\n")
        if self._is_in_head and not self._is_refused:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"headers of more than {MAX_HEAD_BYTES} bytes\n")

    def pause_writing(self) -> None:
        self.is_paused = True
        if self.upstream is not None:
            self.upstream.transport.pause_reading()

    def resume_writing(self) -> None:
        self.is_paused = False
        if self.upstream is not None:
            self.upstream.transport.resume_reading()

    # Called by httptools.

    def on_message_begin(self) -> None:
        if self.is_waiting and not self._is_refused:
            self._refuse(400, "a request came before the answer to the previous request\n")

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            return
        name = name.lower()
        if name == b"authorization":
            self._given = value
        elif name == b"expect":
            self._expects = True
        elif name in ASKED and b"\r" not in value and b"\n" not in value:
            self._kept += b"%b: %b\r\n" % (name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if self._is_refused:
            return
        self._method = self._parser.get_method().decode()
        self._path = self._url.partition(b"?")[0].decode("latin-1")
        if not self._front.allows(self._method, self._path, self._given):
            self._refuse(401, _UNAUTHORIZED)
        elif (self._method, self._path) not in ROUTES:
            self._refuse(404, f"the router's front has no {self._method} {self._path}\n")
        elif self._parser.get_http_version() != "1.1" or self._parser.should_upgrade():
            self._refuse(400, "the router's front speaks HTTP/1.1 only\n")
        elif self._expects:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, piece: bytes) -> None:
        if self._is_refused:
            return
        self._body.append(piece)
        self._body_bytes += len(piece)
        if self._body_bytes > MAX_BODY_BYTES:
            self._refuse(413, f"a body of more than {MAX_BODY_BYTES} bytes\n")

    def on_message_complete(self) -> None:
        if self._is_refused:
            return
        self._keeps = self._parser.should_keep_alive()
        self.is_waiting, self.is_answered = True, False
        if self._path == AUTHORIZED:
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            return self.finish()
        first = b"%b %b HTTP/1.1\r\n" % (self._method.encode(), self._url)
        length = b"Content-Length: %d\r\n\r\n" % self._body_bytes
        request = [first, self._front.onward_head, self._kept, length, *self._body]
        self._body = []
        self._front.forward(self, b"".join(request))

    def finish(self) -> None:
        self.upstream, self.is_waiting = None, False
        self._begin()
        if not self._keeps:
            self.transport.close()

    def fail(self, error: Exception) -> None:
        """Answer 502, or disconnect after a partial answer, so that the caller sees an error."""
        self.upstream = None
        if self.is_answered:
            return self.transport.abort()
        text = f"vllm-router did not answer ({type(error).__name__})\n"
        self.transport.write(_answer(502, text))
        self.finish()

    def _refuse(self, status: int, text: str) -> None:
        self._is_refused, self._body = True, []
        if self.is_waiting:
            return self.transport.abort()
        self.transport.write(_answer(status, text, "Connection: close\r\n"))
        self.transport.pause_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._loop.call_later(LINGER_S, self.transport.abort)

    def _peer(self) -> str:
        return "{}:{}".format(*(self.transport.get_extra_info("peername") or ("?", "?"))[:2])


class _Upstream(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, front: Front) -> None:
        self._front, self._loop = front, asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._caller: _Caller | None = None
        self.idle_since_s = 0.0

    def ask(self, caller: _Caller, request: bytes) -> None:
        self._caller, caller.upstream = caller, self
        self._head, self._reason, self._is_sized, self._is_complete = b"", b"", False, False
        self._out: list[bytes] = []
        if caller.is_paused:
            self.transport.pause_reading()
        self.transport.write(request)

    def drop(self) -> None:
        self._caller = None
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._front.forget(self)
        if self._caller is not None:
            self._caller.fail(error or ConnectionResetError())

    def data_received(self, data: bytes) -> None:
        if self._caller is None:
            return self.transport.abort()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            caller = self._caller
            self.drop()
            return caller.fail(error)
        self._flush()

    def _flush(self) -> None:
        caller = self._caller
        assert caller is not None
        if self._out:
            caller.is_answered = True
            caller.transport.write(b"".join(self._out))
            self._out.clear()
        if not self._is_complete:
            return
        self._caller = None
        if not self.transport.is_reading():
            self.transport.resume_reading()
        self.idle_since_s = self._loop.time()
        if self._keeps:
            self._front.idle.append(self)
        else:
            self.transport.close()
        caller.finish()

    # Called by httptools.

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if lower == b"content-length":
            self._is_sized = True
        if lower in PASSED or lower == b"content-length":
            self._head += b"%b: %b\r\n" % (name, value)

    def on_headers_complete(self) -> None:
        self._keeps = self._parser.should_keep_alive()
        framing = b"" if self._is_sized else b"Transfer-Encoding: chunked\r\n"
        first = b"HTTP/1.1 %d %b\r\n" % (self._parser.get_status_code(), self._reason)
        self._out += [first, self._head, framing, b"\r\n"]

    def on_body(self, piece: bytes) -> None:
        self._out += [piece] if self._is_sized else [b"%x\r\n" % len(piece), piece, b"\r\n"]

    def on_message_complete(self) -> None:
        if not self._is_sized:
            self._out.append(b"0\r\n\r\n")
        self._is_complete = True


def _answer(status: int, text: str, more: str = "") -> bytes:
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: text/plain\r\n"
    return f"{head}Content-Length: {len(text.encode())}\r\n{more}\r\n{text}".encode()


if __name__ == "__main__":
    main()
