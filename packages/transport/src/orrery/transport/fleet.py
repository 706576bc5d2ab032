"""The engines of a stage as one: generation through the router, control calls to every engine at once.

- In: the engines' addresses, and the router's where there are several. Out: generations; updates, each with a report.
- An update ends in attestation: every tensor that was published must stand in every engine with the publisher's fingerprint. Where
  it does not, engines stay paused: not one more token is sampled from weights nobody vouches for, and the run ends.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from orrery.manifest.errors import OrreryError
from orrery.transport.engine import START_VERSION, EngineClient, EngineMetrics, Generation, TensorAttestation, UpdateFailed

if TYPE_CHECKING:
    from orrery.transport.weight_wire import Published

T = TypeVar("T")


@dataclass(frozen=True)
class UpdateReport:
    """What one policy update did to the engines: durations over the slowest engine, tensors by how they were attested."""

    version: int
    digest: str
    pause_s: float  # asking all engines to pause, until the last has
    update_s: float  # start, update, finish
    attest_s: float  # fetching and comparing fingerprints
    paused_s: float  # from the first pause to the last resume: what generation lost
    attested: dict[str, int]  # {"resident": …, "as_consumed": …}, of one engine


class EngineFleet:
    """All engines of a stage as one: generation through the router (or the only engine), control calls to every engine at once."""

    def __init__(self, engine_urls: Sequence[str], router_url: str | None = None, token: str | None = None) -> None:
        """Raises OrreryError for several engines without a router."""
        if not engine_urls:
            raise OrreryError("engine fleet: no engine; give at least one engine address")
        if len(engine_urls) > 1 and router_url is None:
            raise OrreryError(f"engine fleet: {len(engine_urls)} engines need a router; set inference.router.kind to 'vllm_router'")
        self.engines = [EngineClient(url, token, name=f"engine {index}") for index, url in enumerate(engine_urls)]
        self.router = EngineClient(router_url, token, name="router") if router_url is not None else None
        self.version = START_VERSION  # of the last update that attested

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in [*self.engines, *([self.router] if self.router else [])]))

    async def generate(self, token_ids: Sequence[int] | np.ndarray, **options: Any) -> Generation:
        """`EngineClient.generate`, on whichever engine the router picks."""
        return await (self.router or self.engines[0]).generate(token_ids, **options)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort on every engine: only the router knows which one has the request, and it does not forward aborts by id."""
        await self._every(lambda engine: engine.abort(request_ids))

    async def pause(self) -> None:
        await self._every(EngineClient.pause)

    async def resume(self) -> None:
        await self._every(EngineClient.resume)

    async def metrics(self) -> list[EngineMetrics]:
        """One an engine, in order."""
        return await self._every(EngineClient.metrics)

    async def health(self) -> list[bool]:
        """One an engine, in order."""
        return await self._every(EngineClient.health)

    async def fingerprints(self) -> list[dict[str, TensorAttestation]]:
        """One an engine, in order."""
        return await self._every(EngineClient.fingerprints)

    async def update(self, published: "Published") -> UpdateReport:
        """Bring every engine to `published` with requests in flight: pause, load, attest, resume.

        Raises UpdateFailed (a RunFailed) naming engine and tensor; the engines then stay paused.
        """
        begin = time.perf_counter()
        await self.pause()
        paused = time.perf_counter()
        await self._every(lambda engine: engine.update_weights(published))
        updated = time.perf_counter()
        held = await self.fingerprints()
        for engine, attestations in zip(self.engines, held, strict=True):
            compare(published.version, published.fingerprints, attestations, engine.name)
        attested = time.perf_counter()
        await self.resume()
        self.version = published.version
        return UpdateReport(
            version=published.version,
            digest=published.digest,
            pause_s=paused - begin,
            update_s=updated - paused,
            attest_s=attested - updated,
            paused_s=time.perf_counter() - begin,
            attested=dict(Counter(each.how for each in held[0].values())),
        )

    async def _every(self, call: Callable[[EngineClient], Awaitable[T]]) -> list[T]:
        """`call` on all engines at once; waits for all, then raises the first failure, so that none is left half-way unobserved."""
        results = await asyncio.gather(*(call(engine) for engine in self.engines), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results  # type: ignore[return-value]


def compare(version: int, published: Mapping[str, int], held: Mapping[str, TensorAttestation], engine: str) -> None:
    """Raise UpdateFailed naming a tensor unless `held` is `published`, tensor by tensor."""
    different = sorted(name for name, value in published.items() if name in held and held[name].fingerprint != value)
    missing, unknown = sorted(published.keys() - held.keys()), sorted(held.keys() - published.keys())
    for names, verb in ((different, "differs from"), (missing, "is missing after"), (unknown, "is not part of")):
        if names:
            found = held.get(names[0])
            how = f" (attested {found.how})" if found else ""
            more = f" ({len(names) - 1} more like it)" if len(names) > 1 else ""
            tensor = f"{engine}: tensor {names[0]!r}{how}"
            raise UpdateFailed(f"{tensor} {verb} published version {version}{more}; the run stops before another token is sampled")
