"""The run's token at an engine's door: whoever else can reach its address must not drive an engine."""

import hmac
import secrets

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from orrery.manifest.errors import RunFailed
from orrery.transport.token import run_token

OPEN = ("/health", "/metrics")  # the router and monitors look at them, and they change nothing


class RequireToken:
    """ASGI middleware: 401 for every request without `Authorization: Bearer <ORRERY_TOKEN>`.

    Where none is set nobody comes in; of an engine that no launcher started (a person, or a test, did) everybody does.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        try:
            token = run_token()
        except RunFailed:  # no sentence here: it would be a 500; the role ends with one as it publishes its address
            token = secrets.token_hex()
        self.wanted = f"Bearer {token}".encode() if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if self.wanted and scope["type"] != "lifespan" and scope["path"] not in OPEN:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.wanted):
                app = PlainTextResponse("this engine serves one run's roles only: ORRERY_TOKEN is missing or another's\n", 401)
        await app(scope, receive, send)
