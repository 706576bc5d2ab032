"""Recover lost engines. The launcher kills a fenced engine and starts its next process."""

import asyncio
import time
from collections.abc import Collection
from contextlib import ExitStack
from typing import TYPE_CHECKING

from orrery.manifest.errors import RunFailed
from orrery.orchestrator.engines.messages import START_VERSION, UpdateFailed, WeightsDiffer
from orrery.runtime import process_control
from orrery.runtime.timing import scaled
from orrery.wire import rendezvous

if TYPE_CHECKING:
    from orrery.orchestrator.engines.client import EngineClient
    from orrery.orchestrator.engines.pool import EnginePool
    from orrery.runtime.role_context import RoleContext

TEND_S = 0.25
RETURN_S = 600.0


class EngineRecovery:
    def __init__(self, pool: "EnginePool", ctx: "RoleContext") -> None:
        self.pool, self.ctx = pool, ctx
        self.num_lost, self.last_loss = 0, ""
        self.retired: list[EngineClient] = []
        self._looking, self._looked_s = asyncio.Lock(), 0.0
        self._looks: set[asyncio.Task[None]] = set()
        self._away: dict[int, float] = {}
        self._clocks: dict[int, tuple[float, ExitStack]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._tend(), name="tend")
        # Wake waiting calls, so that they raise `_tend`'s error.
        self._task.add_done_callback(lambda _: self.pool.wake())

    async def close(self) -> None:
        tasks = [*self._looks, *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _, wait in self._clocks.values():
            wait.close()

    def check(self) -> None:
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    async def look_for_losses(self) -> None:
        """Fence every engine that does not answer, even if the caller is cancelled."""
        look = asyncio.create_task(self._look(time.monotonic()), name="look for losses")
        self._looks.add(look)
        look.add_done_callback(self._looks.discard)
        await asyncio.shield(look)

    async def _look(self, asked_s: float) -> None:
        pool, registry = self.pool, self.pool.registry
        async with self._looking:
            if self._looked_s > asked_s:
                return
            self._looked_s = time.monotonic()
            up = registry.up
            looked_at = [(index, registry[index].incarnation) for index in up]
            deaths = await asyncio.gather(*(pool.engines[index].death() for index in up))
            for (index, incarnation), why in zip(looked_at, deaths, strict=True):
                if why is not None:
                    await self.fence(index, incarnation, why)

    async def fence(self, index: int, incarnation: int, why: str) -> None:
        ctx, pool = self.ctx, self.pool
        if not pool.registry.failed(index, incarnation, why):
            return
        ctx.log.warning("engine %d is fenced: %s", index, why)
        ctx.metrics.write(
            None, event="engine_fenced", engine=index, incarnation=incarnation, why=why
        )
        pool.admitted.discard(index)
        self.num_lost, self.last_loss = self.num_lost + 1, why
        self._start_clock(index)
        url = pool.engines[index].url
        role = f"inference.{index}"
        await asyncio.to_thread(
            process_control.fence, ctx.run_dir, ctx.stage, ctx.attempt, role, incarnation, why
        )
        # Call the router last: a slow router must not delay the restart.
        await self.dismiss(url)

    async def dismiss(self, url: str) -> None:
        if self.pool.router is not None:
            await self.pool.router.dismiss(url)
            self.num_lost += 1

    def note_return(self, index: int, incarnation: int) -> None:
        if index not in self._away:
            return
        away_s, version = time.monotonic() - self._away.pop(index), self.pool.registry.wanted
        self._stop_clock(index)
        self.ctx.log.info(
            "engine %d serves again, at version %d, after %.1f s", index, version, away_s
        )
        self.ctx.metrics.write(
            None,
            event="engine_healthy",
            engine=index,
            incarnation=incarnation,
            version=version,
            away_s=away_s,
        )

    def _start_clock(self, index: int) -> None:
        self._away.setdefault(index, time.monotonic())
        if index not in self._clocks:
            what, wait = f"inference.{index} to serve again", ExitStack()
            wait.enter_context(self.ctx.health.waiting(what, deadline_s=scaled(RETURN_S)))
            self._clocks[index] = time.monotonic(), wait

    def _stop_clock(self, index: int) -> None:
        if index in self._clocks:
            self._clocks.pop(index)[1].close()

    def set_deadlines(self) -> None:
        """Start each lost engine's RETURN_S clock. Stop it while the engine waits for a version."""
        pool = self.pool
        for index in self._away:
            is_stale = pool.registry[index].is_stale
            if pool.is_version_gone and pool.is_serving and is_stale:
                self._stop_clock(index)
            else:
                self._start_clock(index)

    async def _tend(self) -> None:
        """Bring lost engines back. Raise RunFailed if an engine does not serve within RETURN_S."""
        while True:
            await asyncio.sleep(TEND_S)
            if not self._away:
                continue
            listening = await asyncio.to_thread(rendezvous.find_endpoints, self.ctx, "inference")
            self._note_ends({(endpoint.index, endpoint.incarnation) for endpoint in listening})
            for endpoint in listening:
                await self._note_restart(endpoint)
            for index in self.pool.registry.stale:
                await self._bring_back(index)
            self.set_deadlines()
            for index, (since_s, _) in self._clocks.items():
                if time.monotonic() - since_s > scaled(RETURN_S):
                    why = self.pool.registry[index].why
                    why = why or "it listens, but no loadable version was published"
                    raise RunFailed(
                        f"engine {index} did not serve again within {scaled(RETURN_S):g} s "
                        f"({why}); read its log"
                    )

    def _note_ends(self, listening: Collection[tuple[int, int]]) -> None:
        pool = self.pool
        if pool.disaggregated is None:
            return
        for index in pool.registry.fenced:
            if (index, pool.registry[index].incarnation) not in listening:
                pool.disaggregated.ended(index)

    async def _note_restart(self, endpoint: rendezvous.Endpoint) -> None:
        pool, index = self.pool, endpoint.index
        known = pool.registry[index].incarnation
        if endpoint.incarnation <= known:
            return
        await self.fence(index, known, f"engine {index} was started again")
        pool.registry.listens(index, endpoint.incarnation)
        self.retired.append(pool.engines[index])
        pool.engines[index] = pool.client(index, endpoint.url)
        if pool.disaggregated is not None:
            pool.disaggregated.returned(index, endpoint.info)

    async def _bring_back(self, index: int) -> None:
        pool = self.pool
        async with pool.updating:
            incarnation, published = pool.registry[index].incarnation, pool.published
            if not pool.registry[index].is_stale:
                return
            try:
                if published is None:
                    if pool.registry.took(index, incarnation, START_VERSION):
                        await pool.admit(index, incarnation)
                elif not published.folder.is_dir():
                    pool.note_version_gone()
                elif failures := await pool.transfer(published, [index]):
                    raise failures[index]
            except WeightsDiffer:
                raise
            except RunFailed as error:
                is_removed = published is not None and not published.folder.is_dir()
                if isinstance(error, UpdateFailed) and is_removed:
                    pool.note_version_gone()
                    return
                await self.fence(index, incarnation, str(error))
