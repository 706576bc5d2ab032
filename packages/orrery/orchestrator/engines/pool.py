"""Generate on a stage's engines, and update their weights.

- No engine stays paused to wait for a slow or lost engine.
- With restarts, a failed engine is fenced: it gets no requests until its next process (incarnation)
  has the wanted version. While no engine serves, requests and updates wait.
- The run ends if weights are wrong, a lost engine does not return, or all engines refuse a version.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.orchestrator.engines.client import (
    Canary,
    EngineClient,
    RouterClient,
    UpdateReport,
    update_engine,
)
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
from orrery.orchestrator.engines.recovery import EngineRecovery
from orrery.orchestrator.engines.requests import SharedRequests
from orrery.runtime.timing import scaled
from orrery.wire.weight_wire.leases import ROUND_S, LeaseClient

if TYPE_CHECKING:
    from orrery.orchestrator.guests.pool import GuestPool
    from orrery.runtime.role_context import RoleContext
    from orrery.wire.weight_wire import Published

T = TypeVar("T")

# Time left to other engines' transfers after one is interrupted
ALONG_S = ROUND_S + 30.0


class Phase(StrEnum):
    STARTING = "starting"
    STALE = "stale"
    UPDATED = "updated"
    HEALTHY = "healthy"
    FENCED = "fenced"


@dataclass
class EngineState:
    """One engine's state. `incarnation`: number of restarts, −1 until a process listens."""

    incarnation: int = -1
    phase: Phase = Phase.STARTING
    version: int | None = None
    why: str = ""  # reason for fencing

    @property
    def is_stale(self) -> bool:
        return self.phase is Phase.STALE


class EngineRegistry:
    """The state machine of every engine.

        starting ──listens──▶ stale ──took──▶ updated ──serves──▶ healthy
           stale, updated or healthy ──failed──▶ fenced ──listens (a later incarnation)──▶ stale
           healthy or updated, another version wanted ──▶ stale

    Events of older incarnations are ignored. The wanted version never falls.
    """

    def __init__(self, num_engines: int, version: int):
        self._at_start = self.wanted = version
        self._engines = [EngineState() for _ in range(num_engines)]

    def __getitem__(self, index: int) -> EngineState:
        return self._engines[index]

    def add(self) -> int:
        self._engines.append(EngineState())
        return len(self._engines) - 1

    def at(self, *phases: Phase) -> list[int]:
        return [index for index, engine in enumerate(self._engines) if engine.phase in phases]

    @property
    def up(self) -> list[int]:
        return self.at(Phase.STALE, Phase.UPDATED, Phase.HEALTHY)

    @property
    def stale(self) -> list[int]:
        return self.at(Phase.STALE)

    @property
    def fenced(self) -> list[int]:
        return self.at(Phase.FENCED)

    def listens(self, index: int, incarnation: int) -> bool:
        if incarnation <= self._engines[index].incarnation:
            return False
        self._engines[index] = EngineState(incarnation, Phase.STALE, self._at_start)
        return True

    def want(self, version: int) -> None:
        if version < self.wanted:
            raise AssertionError(f"the wanted version falls from {self.wanted} to {version}")
        if version > self.wanted:
            for index in self.at(Phase.UPDATED, Phase.HEALTHY):
                self._engines[index].phase = Phase.STALE
        self.wanted = version

    def took(self, index: int, incarnation: int, version: int) -> bool:
        """Record that the engine has attested `version`. Return whether it may serve."""
        engine = self._engines[index]
        if engine.incarnation != incarnation or engine.phase is not Phase.STALE:
            return False
        engine.version = version
        if version == self.wanted:
            engine.phase = Phase.UPDATED
        return version == self.wanted

    def serves(self, index: int, incarnation: int) -> bool:
        engine = self._engines[index]
        if engine.incarnation != incarnation or engine.phase is not Phase.UPDATED:
            return False
        engine.phase = Phase.HEALTHY
        return True

    def failed(self, index: int, incarnation: int, why: str) -> bool:
        """Fence the engine. Return False if it was fenced, has restarted, or never listened."""
        engine = self._engines[index]
        if engine.incarnation != incarnation or engine.phase in (Phase.STARTING, Phase.FENCED):
            return False
        engine.phase, engine.version, engine.why = Phase.FENCED, None, why
        return True


class EnginePool:
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
        leases: LeaseClient | None = None,
        max_samples: int = 1,
        num_ranks: Sequence[int] = (),
        max_local_prefill_tokens: int = 0,
    ) -> None:
        """Raise OrreryError without engines, or if several engines lack a router and `handovers`.

        - `restarting`: this process's context if the launcher restarts engines.
        - `handovers`: as in `DisaggregatedEngines`, but empty without disaggregated prefill.
        - `leases`: asks the trainer to keep a version during direct transfers.
        """
        if not engine_urls:
            raise OrreryError("engine pool: has no engine; give at least one engine address")
        if len(engine_urls) > 1 and router_url is None and not handovers:
            raise OrreryError(
                f"engine pool: {len(engine_urls)} engines need a router; "
                "set inference.router.kind to 'vllm_router'"
            )
        self._token, self._model, self._canary = token, model, canary
        self._leases, self._num_ranks = leases, num_ranks or [1] * len(engine_urls)
        self.engines = [self.client(index, url) for index, url in enumerate(engine_urls)]
        self.router = (
            None if router_url is None else RouterClient(router_url, token, "router", model)
        )
        self.registry = EngineRegistry(len(engine_urls), START_VERSION)
        for index, incarnation in enumerate(incarnations or [0] * len(engine_urls)):
            self.registry.listens(index, incarnation)
            self.registry.took(index, incarnation, START_VERSION)
            self.registry.serves(index, incarnation)
        self.version = START_VERSION  # version of the newest complete update
        self.published: Published | None = None  # version that engines must hold
        self.is_version_gone = False
        self.updating = asyncio.Lock()
        self.admitted = set(range(len(engine_urls)))  # engines that get requests
        self._proving: set[int] = set()
        self._not_resumed: set[int] = set()  # engines that the running update still pauses
        self._on_resumed: Callable[[], None] = lambda: None
        self._reports: dict[int, UpdateReport] = {}
        self._changed = asyncio.Event()
        self.recovery = None if restarting is None else EngineRecovery(self, restarting)
        self.guests: GuestPool | None = None  # engines of other sites
        self._shared = SharedRequests(self.generate_each, self.abort, max_samples)
        self.disaggregated = None
        if handovers:
            self.disaggregated = DisaggregatedEngines(
                self.engines, handovers, self.admitted, self._look_for_losses,
                self._num_ranks, max_local_prefill_tokens,
            )  # fmt: skip

    def client(self, index: int, url: str) -> EngineClient:
        ranks = self._num_ranks[index]
        return EngineClient(url, self._token, f"engine {index}", self._model, ranks)

    async def __aenter__(self) -> Self:
        if self.recovery is not None:
            self.recovery.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self.disaggregated is not None:
            await self.disaggregated.close()
        clients = [*self.engines, *([self.router] if self.router else [])]
        if self.recovery is not None:
            await self.recovery.close()
            clients += self.recovery.retired
        await asyncio.gather(*(client.close() for client in clients))

    @property
    def is_serving(self) -> bool:
        if self.disaggregated is not None:
            return self.disaggregated.is_serving
        return bool(self.admitted)

    @property
    def is_proving(self) -> bool:
        """Return whether a resumed engine still lacks a correct canary answer."""
        return bool(self._proving)

    def check(self) -> None:
        if self.recovery is not None:
            self.recovery.check()
        if self.guests is not None:
            self.guests.check()

    async def generate(
        self, token_ids: Sequence[int] | np.ndarray, *, share: str | None = None, **options: Any
    ) -> Generation:
        """Run `EngineClient.generate` on one engine. Raise EngineGone if it was lost.

        Calls with equal `share` may become one engine request. They may differ only in `request_id`
        and `session`.
        """
        if share is None or self.disaggregated is not None:
            return await self._asked(lambda front: front.generate(token_ids, **options))
        here = partial(self._shared.generate, share, token_ids, **options)
        if self.guests is None:
            return await here()
        return await self.guests.draw(here, share, token_ids, **options)

    async def generate_each(self, *request: Any, **options: Any) -> None:
        await self._asked(
            lambda _: (self.router or self.engines[0]).generate_each(*request, **options)
        )

    async def _asked(self, ask: Callable[[EngineClient | DisaggregatedEngines], Awaitable[T]]) -> T:
        recovery = self.recovery
        if recovery is None:
            return await ask(self._front())
        if not self.is_serving:  # the request's timeout does not end this wait
            await self._until(lambda: self.is_serving)
        lost_before = recovery.num_lost
        try:
            return await ask(self._front())
        except OrreryError as error:
            await recovery.look_for_losses()
            if recovery.num_lost > lost_before:
                raise EngineGone(f"{error}; {recovery.last_loss}") from error
            raise

    def _front(self) -> EngineClient | DisaggregatedEngines:
        return self.disaggregated or self.router or self.engines[0]

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests on every engine, because routers do not forward aborts."""
        among = None
        if self.disaggregated is not None:
            self.disaggregated.abort(request_ids)
            among = self.disaggregated.consumers
        await self._every(lambda engine: engine.abort(request_ids), among)

    async def metrics(self) -> dict[int, EngineMetrics]:
        every = await self._every(EngineClient.metrics)
        return {index: metrics for index, metrics in every.items() if index in self.admitted}

    async def health(self) -> list[bool]:
        return list(await asyncio.gather(*(engine.health() for engine in self.engines)))

    async def fingerprints(self) -> dict[int, dict[str, TensorAttestation]]:
        return await self._every(EngineClient.fingerprints)

    async def update(
        self, published: "Published", on_resumed: Callable[[], None] = lambda: None
    ) -> UpdateReport | None:
        """Return the report with the longest pause, or None if the trainer dropped the version.

        Call `on_resumed` once all engines have resumed, before their canary calls.
        """
        async with self.updating:
            self.registry.want(published.version)
            self.published, self.is_version_gone = published, False
            self._reports.clear()
            if self.recovery is not None:
                self.recovery.set_deadlines()
            stale = self.registry.stale
            self._not_resumed, self._on_resumed = set(stale), on_resumed
            incarnations = {index: self.registry[index].incarnation for index in stale}
            failures = await self.transfer(published, stale)
            self._not_resumed.clear()
            self._raise_if_fatal(failures, len(stale))
            for index, error in failures.items():
                why = f"update to version {published.version}: {error}"
                assert self.recovery is not None
                await self.recovery.fence(index, incarnations[index], why)
        await self._until(lambda: bool(self._reports) or self.is_version_gone)
        if not self._reports:
            return None
        self.version = published.version
        if self.guests is not None:
            await asyncio.to_thread(self.guests.publish, published)
        return max(self._reports.values(), key=lambda report: report.paused_s)

    def _raise_if_fatal(self, failures: Mapping[int, BaseException], num_engines: int) -> None:
        """Raise a failure that no restart repairs, or any failure if engines never restart."""
        errors = sorted(failures.values(), key=lambda error: isinstance(error, UpdateInterrupted))
        for error in errors:
            is_fatal = isinstance(error, WeightsDiffer) or not isinstance(error, RunFailed)
            if self.recovery is None or is_fatal:
                raise error
        refused = [error for error in errors if isinstance(error, UpdateFailed)]
        if refused and len(refused) == len(errors) == num_engines:
            raise errors[0]  # every engine refused the version

    async def transfer(
        self, published: "Published", indices: list[int]
    ) -> dict[int, BaseException]:
        """Update these engines. Return failures by index.

        A lost engine interrupts direct transfers to other engines. Retry while the trainer keeps
        the version (lease).
        """
        failures: dict[int, BaseException] = {}
        if not indices:  # all are lost, and load the version on return
            return failures
        waiting, num_blameless, begin_s = list(indices), 0, None
        try:
            while True:
                leased: Published | None = published
                if self._leases is not None:
                    names = [self.engines[index].name for index in waiting]
                    leased = await self._leases.start_transfer(published, names)
                begin_s = time.perf_counter() if begin_s is None else begin_s
                failed: dict[int, BaseException] = {}
                if leased is not None:
                    failed = await self._transfer_once(waiting, leased, begin_s)
                    failures = {i: e for i, e in failures.items() if i not in waiting} | failed
                if leased is None or any(isinstance(e, VersionGone) for e in failed.values()):
                    self.note_version_gone()
                    interrupted = UpdateInterrupted
                    return {i: e for i, e in failures.items() if not isinstance(e, interrupted)}
                waiting = [i for i, e in failed.items() if isinstance(e, UpdateInterrupted)]
                # Stop retrying after two interruptions that no lost engine explains.
                num_blameless += len(waiting) == len(failed)
                if not waiting or num_blameless > 1 or self.recovery is None:
                    return failures
        finally:
            if self._leases is not None:
                self._leases.release()

    async def _transfer_once(
        self, indices: list[int], leased: "Published", begin: float
    ) -> dict[int, BaseException]:
        limits: dict[int, asyncio.Timeout] = {}

        async def update(index: int) -> None:
            try:
                async with asyncio.timeout(None) as limits[index]:
                    try:
                        await self._update_one(index, leased, begin)
                    finally:
                        del limits[index]  # an exited timeout cannot be rescheduled
            except TimeoutError as error:
                raise EngineGone(
                    f"engine {index} was still in a weight transfer {scaled(ALONG_S):g} s after "
                    "another engine's part of it had failed"
                ) from error
            except UpdateFailed as error:
                if isinstance(error, UpdateInterrupted):
                    end_s = asyncio.get_running_loop().time() + scaled(ALONG_S)
                    for limit in limits.values():
                        if limit.when() is None:
                            limit.reschedule(end_s)
                elif self._leases is not None:
                    self._leases.abandon(leased)
                # Ask the engine: the error may not mention a dead worker.
                if isinstance(error, WeightsDiffer):
                    raise
                if (why := await self.engines[index].death()) is not None:
                    raise EngineGone(why) from error
                raise
            except BaseException:
                if self._leases is not None:
                    self._leases.abandon(leased)
                raise

        results = await asyncio.gather(*map(update, indices), return_exceptions=True)
        pairs = zip(indices, results, strict=True)
        return {index: each for index, each in pairs if isinstance(each, BaseException)}

    async def _update_one(self, index: int, published: "Published", begin: float) -> None:
        engine, incarnation = self.engines[index], self.registry[index].incarnation
        started = time.perf_counter()
        checks = self._canary, self._prove(index), partial(self._resumed, index)
        report = await update_engine(engine, published, *checks)
        report = replace(report, paused_s=report.paused_s + started - begin)
        if self.registry.took(index, incarnation, published.version):
            await self.admit(index, incarnation)
            self._reports[index] = report
            self.wake()

    def _resumed(self, index: int) -> None:
        if self._not_resumed:
            self._not_resumed.discard(index)
            if not self._not_resumed:
                self._on_resumed()

    @contextmanager
    def _prove(self, index: int) -> Iterator[None]:
        """Keep `is_proving` true during the canary call, and permanently after WeightsDiffer."""
        self._proving.add(index)
        try:
            yield
        except BaseException as error:
            if not isinstance(error, WeightsDiffer):
                self._proving.discard(index)
            raise
        self._proving.discard(index)

    async def admit(self, index: int, incarnation: int) -> None:
        url, is_new = self.engines[index].url, index not in self.admitted
        if is_new and self.router is not None:
            await self.router.admit(url)
        if not self.registry.serves(index, incarnation):
            if is_new and self.recovery is not None:
                await self.recovery.dismiss(url)
            return
        self.admitted.add(index)
        if self.recovery is not None:
            self.recovery.note_return(index, incarnation)
        self.wake()

    async def _every(
        self, call: Callable[[EngineClient], Awaitable[T]], among: Collection[int] | None = None
    ) -> dict[int, T]:
        up = self.registry.up
        up = [index for index in up if among is None or index in among]
        results = await asyncio.gather(
            *(call(self.engines[index]) for index in up), return_exceptions=True
        )
        by_index = dict(zip(up, results, strict=True))
        if self.recovery is not None and any(isinstance(r, EngineGone) for r in results):
            await self.recovery.look_for_losses()
            fenced = self.registry.fenced
            by_index = {index: by_index[index] for index in up if index not in fenced}
        for result in by_index.values():
            if isinstance(result, BaseException):
                raise result
        return by_index  # type: ignore[return-value]

    async def _look_for_losses(self) -> None:
        if self.recovery is not None:
            await self.recovery.look_for_losses()

    def note_version_gone(self) -> None:
        self.is_version_gone = True
        self.wake()

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.check()
            await self._changed.wait()
