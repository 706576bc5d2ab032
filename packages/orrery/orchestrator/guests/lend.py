"""Lend this site's engine to a run at another site: `python -m orrery.orchestrator.guests.lend`.

- The engine loads a new policy version only while it is idle, so each sample has one version.
- Weights come in hash-verified blocks from the run's site and other lending sites.
"""

import asyncio
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
import numpy as np

from orrery.elastic.certificates import Certificates
from orrery.elastic.keeper import SnapshotServer
from orrery.elastic.snapshots import PeerSource, StateSnapshot, assemble, check_header, remove_old
from orrery.elastic.types import ElasticError, read_place
from orrery.manifest.errors import OrreryError, RunFailed
from orrery.orchestrator.engines.client import Canary, EngineClient, update_engine
from orrery.orchestrator.engines.messages import START_VERSION, EngineGone, GenerationFailed
from orrery.orchestrator.engines.requests import SharedRequests
from orrery.orchestrator.guests.host import WEIGHTS_PATH, engine_release, own_terms
from orrery.orchestrator.guests.messages import (
    MAX_ANSWERS,
    MAX_REASON,
    POLL_S,
    Answers,
    Ask,
    Entered,
    Entry,
    GuestAnswer,
    GuestRefused,
    LeaseOver,
    Noted,
    SampleJob,
    Told,
)
from orrery.runtime.health import beating_loop
from orrery.runtime.network import run_token
from orrery.runtime.role_context import RoleContext, role_process
from orrery.runtime.run_directory import SHARED_MEMORY, memory_prefix
from orrery.runtime.timing import scaled
from orrery.wire import rendezvous
from orrery.wire.rendezvous import request_s
from orrery.wire.sockets import NOT_OF_THE_PROTOCOL
from orrery.wire.weight_wire import Published

T = TypeVar("T")
START_S = 600.0
AWAY_S = 120.0
RETRY_S = 1.0
CALL_S = 60.0


class Lender:
    def __init__(self, ctx: RoleContext, engine: EngineClient) -> None:
        self._ctx, self._engine, self._place = ctx, engine, read_place(ctx.run_dir)
        self._files = Certificates.of(Path(self._place.certificates), self._place.name)
        self._tls = self._files.client()
        self._tls.check_hostname = True
        self._folder = SHARED_MEMORY / f"{memory_prefix(ctx.run_dir)}lent"
        self._num_slots = ctx.manifest.inference.max_num_sequences
        self._lease, self._attempt = 0, ""
        self._version, self._digest = START_VERSION, ""
        self._shared = SharedRequests(engine.generate_each, engine.abort, self._num_slots)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._answers: list[GuestAnswer] = []
        self._renewing: asyncio.Task[None] | None = None
        self._is_draining, self._is_asking, self._changed = False, False, asyncio.Event()
        self._failure: EngineGone | None = None

    async def run(self) -> None:
        async with aiohttp.ClientSession() as self._http:
            with ExitStack() as stack:
                self._serve(stack)
                work = [asyncio.create_task(each) for each in (self._ask(), self._send())]
                try:
                    done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
                    for each in done:
                        each.result()
                finally:
                    work += [*self._running.values(), *([self._renewing] if self._renewing else [])]
                    for each in work:
                        each.cancel()
                    await asyncio.gather(*work, return_exceptions=True)

    def _serve(self, stack: ExitStack) -> None:
        if not self._place.listen:
            return
        host, _, port = self._place.listen.rpartition(":")
        try:
            server = SnapshotServer(self._folder, host, int(port), self._files)
        except OSError as error:
            raise OrreryError(
                f"--listen {self._place.listen}: cannot listen there ({error.strerror}); name an "
                "address of this host and a free port, or leave --listen out"
            ) from error
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.server_close)
        stack.callback(server.shutdown)

    async def _call(self, call: str, message: msgspec.Struct, kind: type[T]) -> T:
        body = await self._request("POST", f"/{call}", msgspec.msgpack.encode(message))
        with self._understanding(call):
            return msgspec.msgpack.decode(body, type=kind)

    @contextmanager
    def _understanding(self, call: str) -> Iterator[None]:
        try:
            yield
        except NOT_OF_THE_PROTOCOL as error:
            raise RunFailed(
                f"{self._place.join}: the reply to {call!r} is not from a run of Orrery, or is "
                f"from another version ({error}); check the address, and install one version at "
                "both sites"
            ) from error

    async def _request(self, method: str, path: str, data: bytes | None = None) -> bytes:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + scaled(AWAY_S)
        while True:
            try:
                async with self._http.request(
                    method,
                    f"https://{self._place.join}{path}",
                    data=data,
                    ssl=self._tls,
                    timeout=aiohttp.ClientTimeout(total=CALL_S),
                ) as answer:
                    body = await answer.read()
                    if answer.status == 403:
                        raise GuestRefused(body.decode(errors="replace")[:MAX_REASON])
                    if answer.status == 410:
                        raise LeaseOver
                    if answer.status == 200:
                        return body
                    why = f"HTTP {answer.status}"
            except aiohttp.ClientConnectorCertificateError as error:
                raise OrreryError(
                    f"{self._place.join}: its certificate is of another run or address ({error}); "
                    "name the address for which the run's certificate was made"
                ) from error
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                why = str(error) or type(error).__name__
            if loop.time() > end_s:
                raise RunFailed(
                    f"{self._place.join}: the run does not answer ({why}); check the "
                    "run there, and type the command again"
                )
            await asyncio.sleep(RETRY_S)

    async def _enter(self) -> None:
        entry = Entry(
            own_terms(self._ctx.manifest), engine_release(), self._num_slots, self._place.listen
        )
        entered = await self._call("enter", entry, Entered)
        if entered.attempt != self._attempt:
            self._attempt, self._version, self._digest = entered.attempt, START_VERSION, ""
        self._lease = entered.lease
        site = self._place
        self._ctx.log.info("this site lends its engine to %s as %s", site.join, site.name)

    async def _ask(self) -> None:
        await self._enter()
        while self._failure is None:
            if self._renewing is not None and self._renewing.done():
                self._renewing.result()
                self._renewing = None
            room = 0 if self._is_draining else self._num_slots - len(self._running)
            ask = Ask(self._lease, self._version, self._digest, max(room, 0))
            self._is_asking = ask.room > 0
            try:
                told = await self._call("ask", ask, Told)
            except LeaseOver:
                self._cancel(list(self._running))
                await self._enter()
                continue
            finally:
                self._is_asking = False
                self._wake()  # do not `await` from here to `create_task`, or `_renew` misses jobs
            if told.is_over:
                self._ctx.log.info("the run is over")
                return
            self._cancel(told.cancelled)
            for job in told.jobs:
                self._running[job.id] = asyncio.create_task(self._sample(job))
            if told.version > self._version and self._renewing is None:
                self._renewing = asyncio.create_task(self._renew(told.peers))
            if not ask.room:
                await self._until_changed()
        raise self._failure

    async def _until_changed(self) -> None:
        try:
            async with asyncio.timeout(POLL_S):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _send(self) -> None:
        while True:
            while not self._answers:
                await self._changed.wait()
            sent, self._answers = self._answers[:MAX_ANSWERS], self._answers[MAX_ANSWERS:]
            try:
                await self._call("answer", Answers(self._lease, tuple(sent)), Noted)
            except LeaseOver:
                continue  # drop the answers: the run's engines draw the samples

    def _cancel(self, ids: Sequence[str]) -> None:
        for each in ids:
            if (task := self._running.get(each)) is not None:
                task.cancel()

    async def _sample(self, job: SampleJob) -> None:
        try:
            # Not `append(await …)`, because `_send` may replace `_answers` meanwhile.
            answer = await self._answer(job)
            self._answers.append(answer)
        except EngineGone as error:
            self._failure = error
        finally:
            self._running.pop(job.id, None)
            self._wake()

    async def _answer(self, job: SampleJob) -> GuestAnswer:
        version, salt = self._version, self._digest
        try:
            made = await self._shared.generate(
                f"{version}/{job.prompt.hex()}/{job.max_tokens}/{job.temperature}",
                np.frombuffer(job.prompt, np.int32),
                max_tokens=job.max_tokens,
                temperature=job.temperature,
                cache_salt=salt,
                request_id=job.id,
                stop_token_ids=job.stop_token_ids,
                ignore_eos=job.ignore_eos,
                timeout_s=request_s(self._ctx.manifest),
            )
        except (GenerationFailed, EngineGone) as error:
            if isinstance(error, EngineGone) and not await self._engine.health():
                raise
            return GuestAnswer(job.id, failure=str(error)[:MAX_REASON])
        arrays = made.token_ids.astype(np.int32), made.logprobs.astype(np.float32)
        return GuestAnswer(
            job.id, version, arrays[0].tobytes(), arrays[1].tobytes(), made.finish_reason
        )

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _renew(self, peers: Sequence[str]) -> None:
        attempt = self._attempt
        body = await self._request("GET", WEIGHTS_PATH)
        with self._understanding("weights"):
            header = msgspec.json.decode(body, type=StateSnapshot)
        check_header(header, self._place.join)
        begin_s = asyncio.get_running_loop().time()
        try:
            place, num_bytes = await asyncio.to_thread(self._fetch, header, peers)
        except ElasticError as error:
            self._ctx.log.warning("%s", error)  # `_ask` retries
            return
        fetched_s = asyncio.get_running_loop().time()
        self._is_draining = True
        try:
            while self._running or self._is_asking:
                await self._changed.wait()
            published = Published(
                header.round, str(place), {}, header.digest, tuple(header.facts.get("canary", ()))
            )
            await update_engine(self._engine, published, Canary.of(self._ctx.manifest))
        finally:
            self._is_draining = False
        if attempt == self._attempt:  # a restarted run reuses version numbers
            self._version, self._digest = header.round, header.digest
        self._wake()
        remove_old(self._folder, 2)
        self._ctx.metrics.write(
            header.round,
            event="lent_update",
            version=header.round,
            fetch_s=fetched_s - begin_s,
            bytes_by_peer=num_bytes,
        )

    def _fetch(self, header: StateSnapshot, peers: Sequence[str]) -> tuple[Path, dict[str, int]]:
        host, _, port = self._place.join.rpartition(":")
        names = [f"{host}:{int(port) + 1}", *peers]
        random.shuffle(names)
        sources = [PeerSource(name, self._files) for name in names]
        try:
            place = assemble(header, self._folder, sources)
        finally:
            for source in sources:
                source.close()
        return place, {source.name: source.num_bytes for source in sources}


async def lend(ctx: RoleContext) -> None:
    deadline_s = scaled(START_S)
    waiting = rendezvous.await_endpoints
    [server] = await asyncio.to_thread(waiting, ctx, "inference", 1, deadline_s)
    ranks = ctx.manifest.inference.of_engine(0).data_parallel
    options: dict[str, Any] = {"name": "this site's engine", "num_ranks": ranks}
    async with (
        beating_loop(ctx.health),
        EngineClient(server.url, run_token(), **options) as engine,
    ):
        ctx.health.doing("lending an engine")
        await Lender(ctx, engine).run()


def main() -> None:
    with role_process("orchestrator") as ctx:
        asyncio.run(lend(ctx))


if __name__ == "__main__":
    main()
