"""The router wire, client end: which engines vllm-router spreads requests over.

Requests that an engine has when it is dismissed stay with it, and end as it ends them. A router without engines answers 503.
"""

from urllib.parse import quote

from orrery.transport.engine import EngineClient


class RouterClient(EngineClient):
    """A router, asked as an engine is; and told of engines that come and go."""

    async def admit(self, url: str) -> None:
        """Give this engine requests from now on; it must answer /health."""
        await self._control(f"/add_worker?url={quote(url, safe='')}")

    async def dismiss(self, url: str) -> None:
        """Give it no more; nothing happens where the router does not know it."""
        await self._control(f"/remove_worker?url={quote(url, safe='')}")
