"""The router's front: a proxy that checks credentials. vllm-router lets any caller add engines.

- In: requests on the role's address. Out: requests to vllm-router on loopback; its streamed
  answers.
- The front compares the credential before it reads the body. Only paths in `ROUTES` are forwarded.
- Generation takes the `generate` credential. The list of engines takes `administer`, which neither
  vllm-router nor an engine behind it ever sees.
- vllm-router asks `AUTHORIZED` about every key that a caller shows. So other users of this host
  cannot use its own port.
- An answer has only the headers in `PASSED`. If a caller disconnects, its request in the engine
  ends.
"""

import hmac
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import web

from orrery.transport.engine_api import ENGINE_HEADER, KEEPALIVE_S, SESSION_HEADER
from orrery.transport.token import Purpose, authorization

AUTHORIZED = "/authorized"  # 200 for the generate credential
ROUTES = {
    ("GET", AUTHORIZED): Purpose.GENERATE,
    ("POST", "/inference/v1/generate"): Purpose.GENERATE,
    ("GET", "/health"): Purpose.ADMINISTER,
    ("POST", "/add_worker"): Purpose.ADMINISTER,
    ("POST", "/remove_worker"): Purpose.ADMINISTER,
    ("GET", "/list_workers"): Purpose.ADMINISTER,
}
ASKED = ("Content-Type", SESSION_HEADER)
PASSED = ("Content-Type", "Content-Encoding", ENGINE_HEADER)
MAX_BODY_BYTES = 1 << 26  # a prompt of a million tokens is 8 MB of JSON
KEPT_S = 600.0  # longer than any client keeps a connection idle

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Front:
    """A server before vllm-router; without a token it accepts every request.

    Use it as `async with Front(token, router_url) as front: await front.listen(host, port)`.
    """

    def __init__(self, token: str, router_url: str) -> None:
        self._url, self._onward = router_url, authorization(token, Purpose.GENERATE)
        self._wanted = {
            purpose: authorization(token, purpose).get("Authorization", "").encode()
            for purpose in Purpose
        }
        application = web.Application(middlewares=[self._check], client_max_size=MAX_BODY_BYTES)
        for method, path in ROUTES:
            application.router.add_route(
                method, path, _yes if path == AUTHORIZED else self._pass_on
            )
        self._runner = web.AppRunner(
            application,
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=KEPT_S,
            lingering_time=0.0,
            shutdown_timeout=0.1,
        )

    async def __aenter__(self) -> "Front":
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        self._router = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            headers=self._onward,
        )
        await self._runner.setup()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._router.close()

    async def listen(self, host: str, port: int) -> str:
        """Serve at `host`; `port` 0 takes a free one. Returns the address."""
        await web.TCPSite(self._runner, host, port).start()
        return "http://{}:{}".format(*self._runner.addresses[0][:2])

    @web.middleware
    async def _check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer 401 without the route's credential; an unknown route needs `administer`."""
        route = request.match_info.route.resource  # the raw path may differ: aiohttp normalizes it
        purpose = ROUTES.get((request.method, route.canonical if route else ""), Purpose.ADMINISTER)
        given = request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, self._wanted[purpose]) and self._onward:
            refusal = web.Response(
                status=401,
                text="this router serves one run's roles only: the run's token is missing or another's\n",
            )
            refusal.force_close()  # the body is not read
            return refusal
        return await handler(request)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        """Stream vllm-router's answer; answer 502 if there is none."""
        headers = {name: request.headers[name] for name in ASKED if name in request.headers}
        answer: web.StreamResponse | None = None
        try:
            body = await request.read()
            async with self._router.request(
                request.method, self._url + request.path_qs, data=body, headers=headers
            ) as theirs:
                answer = web.StreamResponse(status=theirs.status)
                answer.headers.update(
                    {name: theirs.headers[name] for name in PASSED if name in theirs.headers}
                )
                answer.content_length = theirs.content_length
                await answer.prepare(request)
                async for piece in theirs.content.iter_any():
                    await answer.write(piece)
                await answer.write_eof()
                return answer
        except (aiohttp.ClientError, ConnectionError) as error:
            if answer is None or not answer.prepared:
                return web.Response(
                    status=502, text=f"vllm-router did not answer ({type(error).__name__})\n"
                )
            if request.transport is not None:
                request.transport.abort()  # half an answer must not look like a whole one
            return answer


async def _yes(_: web.Request) -> web.StreamResponse:
    return web.Response()
