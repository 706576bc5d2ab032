"""The router's front: the only way to vllm-router, of which anybody who reaches it could add engines of their own.

- In: requests on the role's address. Out: the same to vllm-router on loopback, and its answers, as they come.
- The credential is compared before a body is read. What is not among `ROUTES` is refused, and nothing of it passes.
- Generation takes one credential, the list of engines another, which vllm-router never sees and so no engine behind it either.
- vllm-router asks `AUTHORIZED` about every key that it is shown, so that other users of this host get nothing from its own port.
- An answer passes only the headers in `PASSED`. A caller that hangs up ends its request in the engine.
"""

import hmac
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import web

from orrery.transport.engine import ENGINE_HEADER, KEEPALIVE_S, SESSION_HEADER
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
KEPT_S = 600.0  # longer than any client keeps an idle connection

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Front:
    """`async with Front(token, router_url) as front` and `await front.listen(host, port)`. Without a token everything is let in."""

    def __init__(self, token: str, router_url: str) -> None:
        self._url, self._onward = router_url, authorization(token, Purpose.GENERATE)
        self._wanted = {purpose: authorization(token, purpose).get("Authorization", "").encode() for purpose in Purpose}
        application = web.Application(middlewares=[self._check], client_max_size=MAX_BODY_BYTES)
        for method, path in ROUTES:
            application.router.add_route(method, path, _yes if path == AUTHORIZED else self._pass_on)
        self._runner = web.AppRunner(
            application, access_log=None, handler_cancellation=True, keepalive_timeout=KEPT_S, lingering_time=0.0, shutdown_timeout=0.1
        )

    async def __aenter__(self) -> "Front":
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        self._router = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False, headers=self._onward
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
        """401 without the credential of this route; of a route that there is not, without the administrative one."""
        route = request.match_info.route.resource  # not the path as it is written, which aiohttp reads in its own way
        purpose = ROUTES.get((request.method, route.canonical if route else ""), Purpose.ADMINISTER)
        given = request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, self._wanted[purpose]) and self._onward:
            refusal = web.Response(status=401, text="this router serves one run's roles only: the run's token is missing or another's\n")
            refusal.force_close()  # the body is not read
            return refusal
        return await handler(request)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        """vllm-router's answer, piece by piece; 502 where there is none."""
        headers = {name: request.headers[name] for name in ASKED if name in request.headers}
        answer: web.StreamResponse | None = None
        try:
            body = await request.read()
            async with self._router.request(request.method, self._url + request.path_qs, data=body, headers=headers) as theirs:
                answer = web.StreamResponse(status=theirs.status)
                answer.headers.update({name: theirs.headers[name] for name in PASSED if name in theirs.headers})
                answer.content_length = theirs.content_length
                await answer.prepare(request)
                async for piece in theirs.content.iter_any():
                    await answer.write(piece)
                await answer.write_eof()
                return answer
        except (aiohttp.ClientError, ConnectionError) as error:
            if answer is None or not answer.prepared:
                return web.Response(status=502, text=f"vllm-router did not answer ({type(error).__name__})\n")
            if request.transport is not None:
                request.transport.abort()  # half an answer must not look like a whole one
            return answer


async def _yes(_: web.Request) -> web.StreamResponse:
    return web.Response()
