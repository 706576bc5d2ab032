"""The run's token at an engine's door: whoever else can reach its address must not drive an engine."""

import hmac
import os
import secrets

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from orrery.observe.lifeline import TOKEN
from orrery.transport.token import was_launched

OPEN = ("/health", "/metrics")  # the router and monitors look at them, and they change nothing


class RequireToken:
    """ASGI middleware: 401 for every request without `Authorization: Bearer <ORRERY_TOKEN>`.

    Where none is set nobody comes in; of an engine that no launcher started (a person, or a test, did) everybody does.
    """

    def __init__(self, app: ASGIApp) -> None:
        # No sentence here: raised while requests are served, it would be a 500. The role ends with one as it publishes its address.
        self.app, token = app, os.environ.get(TOKEN) or (secrets.token_hex() if was_launched() else "")
        self.wanted = f"Bearer {token}".encode() if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if self.wanted and scope["type"] != "lifespan" and scope["path"] not in OPEN:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.wanted):
                app = PlainTextResponse("this engine serves one run's roles only: ORRERY_TOKEN is missing or another's\n", 401)
        await app(scope, receive, send)
