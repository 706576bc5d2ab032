"""Send HTTP requests to one server and read its answers before a deadline.

A request is retried only if this host lacked the resources to open a connection.
"""

import asyncio
import errno
import random
import time
from collections.abc import AsyncIterator, Callable

import aiohttp
import msgspec

from orrery.manifest.errors import OrreryError
from orrery.orchestrator.engines.messages import UNKNOWN_ENGINE, EngineGone, OutOfConnections
from orrery.runtime.token import Purpose, authorization
from orrery.wire.rendezvous import ENGINE_HEADER, KEEPALIVE_S, RANK_HEADER, SESSION_HEADER

CONNECT_TIMEOUT_S = 10.0
# Errors if this host lacks file descriptors, memory or ports. A retry is safe: no byte was sent.
NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL}
NO_ROOM_PAUSE_S, NO_ROOM_LONGEST_S = 0.1, 5.0


class HttpServer:
    """Client of one server, with a session for generation and one for control calls."""

    def __init__(self, url: str, name: str, token: str | None) -> None:
        self.url, self.name, self._token = url, name, token
        self._sessions: dict[bool, aiohttp.ClientSession] = {}

    async def close(self) -> None:
        while self._sessions:
            await self._sessions.popitem()[1].close()

    def _session(self, keep_connection: bool) -> aiohttp.ClientSession:
        """Return the session for generation (`keep_connection`), or the one for control calls.

        Each control call opens a connection, because the server might be closing a kept one.
        """
        if keep_connection not in self._sessions:
            kept = {"keepalive_timeout": KEEPALIVE_S} if keep_connection else {"force_close": True}
            purpose = Purpose.GENERATE if keep_connection else Purpose.ADMINISTER
            self._sessions[keep_connection] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, **kept),  # type: ignore[arg-type]
                headers=authorization(self._token, purpose),
            )
        return self._sessions[keep_connection]

    async def call(
        self,
        method: str,
        path: str,
        body: object,
        timeout_s: float,
        on_timeout: type[OrreryError],
        what: str,
        keep_connection: bool = False,
        session: str | None = None,
        rank: int | None = None,
        on_line: Callable[[bytes, int], None] | None = None,
    ) -> tuple[int, bytes, int]:
        """Send one request. Return the answer's status, its body and the index of its engine.

        - `body`: sent as JSON. `what`: the request's name in errors. `keep_connection`: see
          `_session`.
        - `on_timeout`: type of the error to raise after `timeout_s`.
        - `session`: conversation id, by which a router chooses the engine.
        - `rank`: data-parallel rank of the engine. None: the server chooses.
        - `on_line`: called as `on_line(line, engine)` for each line of an answer with status 200,
          when it arrives. The returned body is then empty.

        Raise EngineGone if no server answers. If `on_timeout` is EngineGone and this host lacked
        the resources for a connection until `timeout_s`, raise OutOfConnections.
        """
        http = self._session(keep_connection)
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if session is not None:
            headers[SESSION_HEADER] = session
        if rank is not None:
            headers[RANK_HEADER] = str(rank)
        end_s, pause_s = time.monotonic() + timeout_s, NO_ROOM_PAUSE_S
        while True:
            left_s = max(end_s - time.monotonic(), 1e-3)
            timeout = aiohttp.ClientTimeout(total=left_s, sock_connect=CONNECT_TIMEOUT_S)
            try:
                async with http.request(
                    method, self.url + path, data=data, headers=headers, timeout=timeout
                ) as response:
                    name = response.headers.get(ENGINE_HEADER, "")
                    engine = int(name) if name.isdecimal() and len(name) < 6 else UNKNOWN_ENGINE
                    if on_line is None or response.status != 200:
                        return response.status, await response.read(), engine
                    async for line in lines(response.content):
                        on_line(line, engine)
                    return response.status, b"", engine
            except aiohttp.ServerTimeoutError as error:
                raise EngineGone(
                    f"{self.name} did not accept a connection within {CONNECT_TIMEOUT_S:g} s "
                    f"({what}); see its log"
                ) from error
            except TimeoutError as error:
                raise on_timeout(
                    f"{self.name} did not finish {what} within {timeout_s:g} s"
                ) from error
            except aiohttp.ClientConnectorError as error:
                if error.errno not in NO_ROOM:
                    raise self._gone(what, error) from error
                if time.monotonic() + pause_s > end_s:
                    kind = OutOfConnections if issubclass(on_timeout, EngineGone) else on_timeout
                    raise kind(
                        f"this host could not open a connection to {self.name} for {what} within "
                        f"{timeout_s:g} s ({error}); raise `ulimit -n`"
                    ) from error
            except (aiohttp.ClientError, OSError) as error:
                raise self._gone(what, error) from error
            # a random pause, so that thousands of calls do not retry at once
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, NO_ROOM_LONGEST_S)

    def _gone(self, what: str, error: Exception) -> EngineGone:
        kind = type(error).__name__
        return EngineGone(f"{self.name} is gone ({what}: {kind}: {error}); see its log")


async def lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield each non-empty line of an answer, of any length, without its newline."""
    pieces: list[bytes] = []
    async for data in content.iter_any():
        *ends, rest = data.split(b"\n")
        for end in ends:
            if line := b"".join([*pieces, end]):
                yield line
            pieces.clear()
        pieces.append(rest)
    if line := b"".join(pieces):
        yield line
