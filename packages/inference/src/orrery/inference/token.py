"""Check the credentials of every request to an engine."""

import hmac
import os
import secrets

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orrery.manifest.errors import RunFailed
from orrery.transport.engine_api import ENGINE_HEADER
from orrery.transport.token import Purpose, credential, run_token

OPEN = ("/health", "/metrics")  # the router and monitors look at them, and they change nothing
GENERATE = "/inference/v1/generate"
INDEX = "ORRERY_ENGINE"  # this engine's index in the stage


class RequireToken:
    """ASGI middleware: 401 for every request without the credential of its path, before the body is read.

    Generation needs the `generate` credential. Every other path, known or not, needs `administer`,
    which no generation request carries. A launched engine without a token refuses everything. An
    engine that a person or a test started without a token accepts everything.

    The answer to a generation request names the engine, which a client behind a router cannot know.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        try:
            token = run_token()
        except (
            RunFailed
        ):  # not a 500: the role itself ends with the sentence when it publishes its address
            token = secrets.token_hex()
        self.name = (ENGINE_HEADER.lower().encode(), os.environ.get(INDEX, "").encode())
        self.wanted = (
            {purpose: f"Bearer {credential(token, purpose)}".encode() for purpose in Purpose}
            if token
            else None
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if self.wanted and scope["type"] != "lifespan" and scope["path"] not in OPEN:
            given = dict(scope["headers"]).get(b"authorization", b"")
            wanted = self.wanted[
                Purpose.GENERATE if scope["path"] == GENERATE else Purpose.ADMINISTER
            ]
            if not hmac.compare_digest(given, wanted):
                app = PlainTextResponse(
                    "this engine serves one run's roles only: the run's token is missing or another's\n",
                    401,
                )
        await app(scope, receive, self._named(send) if scope.get("path") == GENERATE else send)

    def _named(self, send: Send) -> Send:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), self.name]
            await send(message)

        return named
