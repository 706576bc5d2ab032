"""The engines of a stage as one: generation through the router, control calls to every engine, and what becomes of one that fails.

- In: the engines' addresses, and the router's where there are several. Out: generations; updates, each with a report.
- Where prefill is apart no router stands between: the fleet takes each request to its two engines (`prefill_decode`).
- Each engine is updated by itself, all at once: one that is slow or lost keeps no other paused.
- Without `restarting` the first failure of an engine is an error, and ends the run.
- With it an engine that fails is fenced: dismissed by the router, and its end asked for. Its requests fail as EngineGone. Once its next
  incarnation listens, it is brought to the wanted version, attested, and only then given requests (`orrery.orchestrator.engines.registry`).
- Where no engine serves, requests wait at the door, and an update is over when one has come back with it.
- What ends the run all the same: weights that are not those published; an update that every engine refuses; an engine that stays away.
  One that is back and can only wait for the next version does not, while others serve.
- Never: retries. A request that its engine took along is a failure, which the caller counts.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.orchestrator.engines.client import EngineClient, RouterClient
from orrery.orchestrator.engines.disaggregated import DisaggregatedEngines
from orrery.orchestrator.engines.messages import (
    START_VERSION,
    EngineGone,
    EngineMetrics,
    Generation,
    TensorAttestation,
    UpdateFailed,
    UpdateInterrupted,
    VersionGone,
    WeightsDiffer,
)
from orrery.orchestrator.engines.registry import EngineRegistry, Phase
from orrery.orchestrator.engines.update import Canary, UpdateReport, update_engine
from orrery.runtime import preemption
from orrery.runtime.timing import scaled
from orrery.transport import rendezvous
from orrery.transport.weight_wire.leases import (
    ROUND_S,
    abandon_transfer,
    acquire_lease,
    release_lease,
    retry_transfer,
)

if TYPE_CHECKING:
    from orrery.runtime.role_context import RoleContext
    from orrery.transport.weight_wire import Published

T = TypeVar("T")

TEND_S = 0.25  # how often an engine that is away is looked for
ALONG_S = (
    ROUND_S + 30.0
)  # for an engine to fail too, or to end its update, when another says that their take is over; scaled

RETURN_S = 600.0  # for an engine to be started again and to load; scaled


class EnginePool:
    """All engines of a stage as one."""

    def __init__(
        self,
        engine_urls: Sequence[str],
        router_url: str | None = None,
        token: str | None = None,
        restarting: "RoleContext | None" = None,
        incarnations: Sequence[int] = (),
        handovers: Sequence[Mapping[str, Any]] = (),
        model: str | None = None,
        canary: Canary | None = None,
    ) -> None:
        """`restarting`: this process, where its launcher starts engines again; `incarnations` of the engines, 0 where not given;
        `handovers`: one an engine that only prefills, the first ones, as `DisaggregatedEngines` takes them; `model` as `EngineClient` takes it;
        `canary`: the prompt that each engine answers after an update.

        Raises OrreryError for several engines without a router.
        """
        if not engine_urls:
            raise OrreryError("engine fleet: no engine; give at least one engine address")
        if len(engine_urls) > 1 and router_url is None and not handovers:
            raise OrreryError(
                f"engine fleet: {len(engine_urls)} engines need a router; set inference.router.kind to 'vllm_router'"
            )
        self._token, self._restarting, self._model, self._canary = token, restarting, model, canary
        self._proving: set[int] = set()  # engines that resumed and have not answered the canary
        self.engines = [
            EngineClient(url, token, f"engine {index}", model)
            for index, url in enumerate(engine_urls)
        ]
        self.router = (
            RouterClient(router_url, token, "router", model) if router_url is not None else None
        )
        self.roster = EngineRegistry(len(engine_urls), START_VERSION)
        for index, incarnation in enumerate(incarnations or [0] * len(engine_urls)):
            self.roster.listens(index, incarnation)
            self.roster.took(index, incarnation, START_VERSION)
            self.roster.serves(index, incarnation)
        self.version = START_VERSION  # of the last update that attested
        self._published: Published | None = None  # what engines are to hold
        self._admitted = set(range(len(engine_urls)))  # who gets requests
        self.apart = (
            DisaggregatedEngines(self.engines, handovers, self._admitted, self._look_for_losses)
            if handovers
            else None
        )
        self._reports: dict[int, UpdateReport] = {}  # of the wanted version, by engine
        self._is_gone = False  # the wanted version: it cannot be had any more
        self._updating = asyncio.Lock()
        self._looking, self._looked_s = asyncio.Lock(), 0.0
        self._looks: set[asyncio.Task[None]] = set()
        self._num_lost, self._last_loss = 0, ""
        self._away: dict[int, float] = {}  # since when
        self._clocks: dict[
            int, tuple[float, ExitStack]
        ] = {}  # since when one that is away has something to do, and the wait that says so
        self._retired: list[EngineClient] = []
        self._changed = asyncio.Event()
        self._tending: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._restarting is not None:
            self._tending = asyncio.create_task(self._tend(), name="tend")
            self._tending.add_done_callback(
                lambda _: self._ring()
            )  # whoever waits for an engine looks why
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self.apart is not None:
            await self.apart.close()
        tasks = [*self._looks, *([self._tending] if self._tending else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _, wait in self._clocks.values():
            wait.close()
        await asyncio.gather(
            *(
                client.close()
                for client in [
                    *self.engines,
                    *self._retired,
                    *([self.router] if self.router else []),
                ]
            )
        )

    @property
    def is_serving(self) -> bool:
        """Whether a request would find an engine, and where prefill is apart one of each part."""
        return bool(self._admitted) if self.apart is None else self.apart.is_serving

    @property
    def is_proving(self) -> bool:
        """Whether a resumed engine has not answered the canary yet, or answered it wrongly."""
        return bool(self._proving)

    def check(self) -> None:
        """Raise what ended the watch over engines that are away, if something did."""
        if self._tending is not None and self._tending.done() and not self._tending.cancelled():
            self._tending.result()

    async def generate(self, token_ids: Sequence[int] | np.ndarray, **options: Any) -> Generation:
        """`EngineClient.generate`, on whichever engine the router picks; EngineGone where the engine was lost meanwhile."""
        if self._restarting is None:
            return await self._front().generate(token_ids, **options)
        if not self.is_serving:  # a wait that is not the request's own, whose time begins when it is sent; who stays away ends the run
            await self._until(lambda: self.is_serving)
        lost_before = self._num_lost
        try:
            return await self._front().generate(token_ids, **options)
        except OrreryError as error:
            await self._look_for_losses()
            if self._num_lost > lost_before:
                raise EngineGone(f"{error}; {self._last_loss}") from error
            raise

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort on every engine: only the router knows which one has the request, and it does not forward aborts by id."""
        if self.apart is not None:
            self.apart.abort(request_ids)
        await self._every(
            lambda engine: engine.abort(request_ids),
            None if self.apart is None else self.apart.consumers,
        )

    async def pause(self) -> None:
        await self._every(EngineClient.pause)

    async def resume(self) -> None:
        await self._every(EngineClient.resume)

    async def metrics(self) -> dict[int, EngineMetrics]:
        """By index, of the engines that get requests."""
        every = await self._every(EngineClient.metrics)
        return {index: metrics for index, metrics in every.items() if index in self._admitted}

    async def health(self) -> list[bool]:
        """One an engine, in order."""
        return list(await asyncio.gather(*(engine.health() for engine in self.engines)))

    async def fingerprints(self) -> dict[int, dict[str, TensorAttestation]]:
        """By index, of the engines that are there."""
        return await self._every(EngineClient.fingerprints)

    async def update(self, published: "Published") -> UpdateReport | None:
        """Bring every engine to `published` with requests in flight: pause, load, attest, resume. The report is the slowest engine's.

        None where `published` is gone already, and something newer will come.

        Raises a RunFailed that names the engine, and the tensor where it was one; an engine that did not come through stays paused.
        """
        async with self._updating:
            self.roster.want(published.version)
            self._published, self._is_gone = published, False
            self._reports.clear()
            self._set_clocks()
            incarnations = {
                index: self.roster[index].incarnation for index in self.roster.at(Phase.STALE)
            }
            failures = await self._take_together(published, list(incarnations))
            if failures is None:
                return None
            errors = sorted(
                failures.values(), key=lambda error: isinstance(error, UpdateInterrupted)
            )  # who is at fault says more
            for error in errors:
                if (
                    self._restarting is None
                    or isinstance(error, WeightsDiffer)
                    or not isinstance(error, RunFailed)
                ):
                    raise error
            if (
                errors
                and len(errors) == len(incarnations)
                and all(isinstance(error, UpdateFailed) for error in errors)
            ):
                raise errors[0]  # it is not the engines that are broken
            for index, error in failures.items():
                await self._fence(
                    index, incarnations[index], f"update to version {published.version}: {error}"
                )
        await self._until(lambda: bool(self._reports) or self._is_gone)
        if not self._reports:
            return None
        self.version = published.version
        return max(self._reports.values(), key=lambda report: report.paused_s)

    async def _take_together(
        self, published: "Published", indices: list[int]
    ) -> dict[int, BaseException] | None:
        """Which of these engines did not take `published`, and why; None where it is gone.

        On a direct wire one that is lost takes the others along: these take it again without it, under the same claim. Who comes too late
        for that stays paused for the next version.
        """
        claimed = acquire_lease(published, [self.engines[index].name for index in indices])
        if claimed is None:
            self._note_gone()
            return None
        failures: dict[int, BaseException] = {}
        waiting, num_blameless, begin = list(indices), 0, time.perf_counter()
        try:
            while True:
                failed = await self._take_all(waiting, claimed, begin)
                failures = {
                    index: error for index, error in failures.items() if index not in waiting
                } | failed
                if any(isinstance(error, VersionGone) for error in failed.values()):
                    self._note_gone()
                    return {
                        index: error
                        for index, error in failures.items()
                        if not isinstance(error, UpdateInterrupted)
                    }
                waiting = [
                    index for index, error in failed.items() if isinstance(error, UpdateInterrupted)
                ]
                num_blameless += len(waiting) == len(failed)
                if (
                    not waiting or num_blameless > 1 or self._restarting is None
                ):  # it may fail once without anybody's being lost
                    return failures
                claimed = retry_transfer(claimed, [self.engines[index].name for index in waiting])
        finally:
            release_lease(claimed)

    async def _take_all(
        self, indices: list[int], claimed: "Published", begin: float
    ) -> dict[int, BaseException]:
        """One take, by these engines; who failed, and why. UpdateInterrupted are those that live and are not at fault.

        `begin`: when the first take of this claim began; engines are paused since.
        """

        limits: dict[int, asyncio.Timeout] = {}

        async def take(index: int) -> None:
            try:
                async with asyncio.timeout(None) as limits[index]:
                    await self._take(index, claimed, begin)
            except TimeoutError as error:
                raise EngineGone(
                    f"engine {index} hung in a take that was over for another {scaled(ALONG_S):g} s before"
                ) from error
            except UpdateFailed as error:
                if isinstance(error, UpdateInterrupted):
                    del limits[index]
                    for limit in limits.values():  # who hangs has had its deadline within the wire
                        if limit.when() is None:
                            limit.reschedule(asyncio.get_running_loop().time() + scaled(ALONG_S))
                else:
                    abandon_transfer(claimed.folder)  # nobody need wait for this one
                # A part of it may have died, of which the rest says something else.
                if (
                    not isinstance(error, WeightsDiffer)
                    and (why := await self.engines[index].death()) is not None
                ):
                    raise EngineGone(why) from error
                raise
            except BaseException:
                abandon_transfer(claimed.folder)
                raise
            finally:
                limits.pop(index, None)

        answers = await asyncio.gather(*map(take, indices), return_exceptions=True)
        return {
            index: error
            for index, error in zip(indices, answers, strict=True)
            if isinstance(error, BaseException)
        }

    async def _take(self, index: int, published: "Published", begin: float) -> None:
        """One engine to `published`, and among those that serve."""
        engine, incarnation = self.engines[index], self.roster[index].incarnation
        started = time.perf_counter()
        report = await update_engine(engine, published, self._canary, self._prove(index))
        report = replace(report, paused_s=report.paused_s + started - begin)
        if self.roster.took(index, incarnation, published.version):
            await self._admit(index, incarnation)
            self._reports[index] = report
            self._ring()

    @contextmanager
    def _prove(self, index: int) -> Iterator[None]:
        """Mark an engine as unproven while the body runs, and for good if its log-probs differ.

        The run then ends, and none of its later tokens is trained.
        """
        self._proving.add(index)
        try:
            yield
        except BaseException as error:
            if not isinstance(error, WeightsDiffer):
                self._proving.discard(index)
            raise
        self._proving.discard(index)

    async def _admit(self, index: int, incarnation: int) -> None:
        """Give requests to an engine that holds the wanted version."""
        url, is_new = self.engines[index].url, index not in self._admitted
        if is_new and self.router is not None:
            await self.router.admit(url)
        if not self.roster.serves(index, incarnation):
            if is_new:
                await self._dismiss(
                    url
                )  # once more: it was fenced meanwhile, and the router may have added it after it had dropped it
            return
        self._admitted.add(index)
        if index in self._away and self._restarting is not None:
            away_s, version = time.monotonic() - self._away.pop(index), self.roster.wanted
            self._stop_clock(index)
            self._restarting.log.info(
                "engine %d serves again, at version %d, after %.1f s", index, version, away_s
            )
            self._restarting.metrics.write(
                None,
                event="engine_healthy",
                engine=index,
                incarnation=incarnation,
                version=version,
                away_s=away_s,
            )
        self._ring()

    async def _every(
        self, call: Callable[[EngineClient], Awaitable[T]], among: Collection[int] | None = None
    ) -> dict[int, T]:
        """`call` on all engines that are there; waits for all. One that turns out to be gone is fenced; else the first error is raised."""
        there = [
            index
            for index in self.roster.at(Phase.STALE, Phase.UPDATED, Phase.HEALTHY)
            if among is None or index in among
        ]
        results = await asyncio.gather(
            *(call(self.engines[index]) for index in there), return_exceptions=True
        )
        by_index = dict(zip(there, results, strict=True))
        if self._restarting is not None and any(
            isinstance(result, EngineGone) for result in results
        ):
            await self._look_for_losses()
            by_index = {
                index: by_index[index]
                for index in there
                if self.roster[index].phase is not Phase.FENCED
            }
        for result in by_index.values():
            if isinstance(result, BaseException):
                raise result
        return by_index  # type: ignore[return-value]

    # Engines that go, and come back -----------------------------------------------------------------------------------

    def _front(self) -> EngineClient | DisaggregatedEngines:
        return self.apart or self.router or self.engines[0]

    async def _look_for_losses(self) -> None:
        """Fence every engine that does not answer any more, where it is started again.

        Whoever asks while somebody looks waits for a look of after it had asked. A look comes to its end also where a rollout that asked
        is cancelled: an engine that is half fenced would never be started again.
        """
        if self._restarting is None:
            return
        look = asyncio.create_task(self._look(time.monotonic()), name="look for losses")
        self._looks.add(look)
        look.add_done_callback(self._looks.discard)
        await asyncio.shield(look)

    async def _look(self, asked_s: float) -> None:
        async with self._looking:
            if self._looked_s > asked_s:
                return
            self._looked_s = time.monotonic()
            looked_at = [
                (index, self.roster[index].incarnation)
                for index in self.roster.at(Phase.STALE, Phase.UPDATED, Phase.HEALTHY)
            ]
            deaths = await asyncio.gather(*(self.engines[index].death() for index, _ in looked_at))
            for (index, incarnation), why in zip(looked_at, deaths, strict=True):
                if why is not None:
                    await self._fence(index, incarnation, why)

    async def _fence(self, index: int, incarnation: int, why: str) -> None:
        """Give this engine nothing more, and have it ended and started again."""
        ctx = self._restarting
        assert ctx is not None
        if not self.roster.failed(index, incarnation, why):
            return
        ctx.log.warning("engine %d is fenced: %s", index, why)
        ctx.metrics.write(
            None, event="engine_fenced", engine=index, incarnation=incarnation, why=why
        )
        self._admitted.discard(index)
        self._num_lost, self._last_loss = self._num_lost + 1, why
        self._watch_for(index)
        url = self.engines[index].url  # now: its next incarnation has another
        await asyncio.to_thread(
            preemption.fence,
            ctx.run_dir,
            ctx.stage,
            ctx.attempt,
            f"inference.{index}",
            incarnation,
            why,
        )
        await self._dismiss(
            url
        )  # after that: where it fails, the engine is started again all the same

    async def _dismiss(self, url: str) -> None:
        if self.router is not None:
            await self.router.dismiss(url)
            self._num_lost += 1  # once more: of requests that began until the router knew, one may have gone there all the same

    def _watch_for(self, index: int) -> None:
        """From now on it has RETURN_S to serve again, where its clock does not run already."""
        ctx = self._restarting
        assert ctx is not None
        self._away.setdefault(index, time.monotonic())
        if index not in self._clocks:
            wait = ExitStack()
            wait.enter_context(
                ctx.health.waiting(f"inference.{index} to serve again", deadline_s=scaled(RETURN_S))
            )
            self._clocks[index] = time.monotonic(), wait

    def _stop_clock(self, index: int) -> None:
        if index in self._clocks:
            self._clocks.pop(index)[1].close()

    def _set_clocks(self) -> None:
        """The clock of one that is back stands while it can only wait for the next version and others serve, and begins anew after that."""
        for index in self._away:
            if self._is_gone and self.is_serving and self.roster[index].phase is Phase.STALE:
                self._stop_clock(index)
            else:
                self._watch_for(index)

    async def _tend(self) -> None:
        """Bring back who is away. Ends only by an error: what that is, `check` says, and whoever waits for an engine."""
        ctx = self._restarting
        assert ctx is not None
        while True:
            await asyncio.sleep(TEND_S)
            if not self._away:
                continue
            listening = await asyncio.to_thread(rendezvous.find_endpoints, ctx, "inference")
            self._note_ends({(endpoint.index, endpoint.incarnation) for endpoint in listening})
            for endpoint in listening:
                await self._meet(endpoint)
            for index in self.roster.at(Phase.STALE):
                await self._bring(index)
            self._set_clocks()
            for index, (since_s, _) in self._clocks.items():
                if time.monotonic() - since_s > scaled(RETURN_S):
                    why = (
                        self.roster[index].why
                        or "it listens, and no version came that it could take"
                    )
                    raise RunFailed(
                        f"engine {index} did not serve again within {scaled(RETURN_S):g} s ({why}); read its log"
                    )

    def _note_ends(self, listening: Collection[tuple[int, int]]) -> None:
        """The launcher withdraws an address once it has killed whoever listened there: then nobody need wait for that one's caches."""
        for index in self.roster.at(Phase.FENCED):
            if self.apart is not None and (index, self.roster[index].incarnation) not in listening:
                self.apart.ended(index)

    async def _meet(self, endpoint: rendezvous.Endpoint) -> None:
        """Take note of an engine that was started again."""
        index, known = endpoint.index, self.roster[endpoint.index].incarnation
        if endpoint.incarnation <= known:
            return
        await self._fence(
            index, known, f"engine {index} was started again"
        )  # no news where we know that it was lost
        self.roster.listens(index, endpoint.incarnation)
        self._retired.append(self.engines[index])
        self.engines[index] = EngineClient(
            endpoint.url, self._token, f"engine {index}", self._model
        )
        if self.apart is not None:
            self.apart.returned(index, endpoint.info)

    async def _bring(self, index: int) -> None:
        """An engine that has come back, to the wanted version; where its publisher has removed that one already, it waits for the next."""
        async with self._updating:
            incarnation, published = self.roster[index].incarnation, self._published
            if self.roster[index].phase is not Phase.STALE:
                return
            try:
                if published is None:
                    if self.roster.took(index, incarnation, START_VERSION):
                        await self._admit(index, incarnation)
                elif not published.folder.is_dir():
                    self._note_gone()
                elif failures := await self._take_together(published, [index]):
                    raise failures[index]
            except WeightsDiffer:
                raise
            except RunFailed as error:
                if (
                    isinstance(error, UpdateFailed)
                    and published is not None
                    and not published.folder.is_dir()
                ):
                    self._note_gone()
                    return
                await self._fence(index, incarnation, str(error))

    def _note_gone(self) -> None:
        self._is_gone = True
        self._ring()

    def _ring(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.check()
            await self._changed.wait()
