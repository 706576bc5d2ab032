"""Check the credential of every request to an engine, or to `orrery serve`."""

import hmac
import os
import secrets

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orrery.manifest.errors import RunFailed
from orrery.runtime.token import Purpose, credential, run_token
from orrery.wire.rendezvous import ENGINE_HEADER

OPEN = ("/health", "/metrics")  # for the router and monitors
GENERATE = "/inference/v1/generate"
UNAUTHORIZED = "this engine serves one run's roles only: the run's token is missing or another's\n"
UNKNOWN_KEY = "the token that `orrery serve` printed is missing or another's\n"
INDEX = "ORRERY_ENGINE"


class RequireToken:
    """ASGI middleware: answer 401 without the path's credential, before the body is read.

    Generation needs the credential `generate`, paths in OPEN none, other paths `administer`.
    Without a token, an engine under a launcher refuses all requests, and an engine started by hand
    accepts all. A header of generated answers names the engine, for clients behind a router.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        try:
            token = run_token()
        except RunFailed:
            token = secrets.token_hex()
        self.name = (ENGINE_HEADER.lower().encode(), os.environ.get(INDEX, "").encode())
        keys = {each: f"Bearer {credential(token, each)}".encode() for each in Purpose}
        self.wanted = keys if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if self.wanted and scope["type"] != "lifespan" and scope["path"] not in OPEN:
            given = dict(scope["headers"]).get(b"authorization", b"")
            purpose = Purpose.GENERATE if scope["path"] == GENERATE else Purpose.ADMINISTER
            if not hmac.compare_digest(given, self.wanted[purpose]):
                app = PlainTextResponse(UNAUTHORIZED, 401)
        await app(scope, receive, self._named(send) if scope.get("path") == GENERATE else send)

    def _named(self, send: Send) -> Send:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), self.name]
            await send(message)

        return named


class RequireKey:
    """ASGI middleware of `orrery serve`: answer 401 without the token, before the body is read.

    Clients of OpenAI's API send it as their key. vLLM's own `--api-key` leaves some paths open.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app, self.wanted = app, f"Bearer {run_token()}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] != "lifespan" and scope["path"] not in OPEN:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.wanted):
                app = PlainTextResponse(UNKNOWN_KEY, 401)
        await app(scope, receive, send)
