"""One engine and one update: pause, load, attest, resume, prove (`canary`).

- Requests in flight wait, and go on with the new weights on the cache they have.
- It ends in attestation: every tensor that was published must stand in the engine with the publisher's fingerprint.
- An engine that did not come through stays paused: not one more token is sampled from weights nobody vouches for.
"""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orrery.transport.canary import Canary, prove
from orrery.transport.engine import EngineClient, TensorAttestation, WeightsDiffer

if TYPE_CHECKING:
    from orrery.transport.weight_wire import Published


@dataclass(frozen=True)
class UpdateReport:
    """What one policy update did to the engine that was paused longest; tensors by how they were attested."""

    version: int
    digest: str
    pause_s: float  # until it had paused
    update_s: float  # start, update, finish
    attest_s: float  # fetching and comparing fingerprints
    paused_s: float  # from asking it to pause until it had resumed: what generation lost
    attested: dict[str, int]  # {"resident": …, "as_consumed": …}
    canary_s: float = 0.0  # duration of the canary, after the engine had resumed
    canary_difference: float | None = None  # mean |difference| to the trainer; None: not asked


async def update_engine(
    engine: EngineClient,
    published: "Published",
    canary: Canary | None = None,
    proving: AbstractContextManager[object] | None = None,
) -> UpdateReport:
    """Bring one engine to `published` and resume it.

    With a `canary` the engine must then answer it. `proving` is entered before the engine samples a
    token, and left after its answer. Raises EngineGone, UpdateFailed, or WeightsDiffer with engine
    and tensor.
    """
    begin = time.perf_counter()
    await engine.pause()
    paused = time.perf_counter()
    await engine.update_weights(published)
    updated = time.perf_counter()
    found = await engine.attested()
    if found is None or found.digest != published.digest:
        compare(published.version, published.fingerprints, await engine.fingerprints(), engine.name)
        raise WeightsDiffer(
            f"{engine.name}: what it holds has not the digest {published.digest} of version {published.version}"
        )
    attested = time.perf_counter()
    with nullcontext() if proving is None else proving:
        await engine.resume()
        resumed = time.perf_counter()
        proof: tuple[float | None, float] = (None, 0.0)
        if canary is not None and published.canary:
            proof = await prove(engine, canary, published.version, published.canary)
    return UpdateReport(
        version=published.version,
        digest=published.digest,
        pause_s=paused - begin,
        update_s=updated - paused,
        attest_s=attested - updated,
        paused_s=resumed - begin,
        attested=found.how,
        canary_difference=proof[0],
        canary_s=proof[1],
    )


def compare(
    version: int, published: Mapping[str, int], held: Mapping[str, TensorAttestation], engine: str
) -> None:
    """Raise WeightsDiffer naming a tensor unless `held` is `published`, tensor by tensor."""
    different = sorted(
        name
        for name, value in published.items()
        if name in held and held[name].fingerprint != value
    )
    missing, unknown = (
        sorted(published.keys() - held.keys()),
        sorted(held.keys() - published.keys()),
    )
    for names, verb in (
        (different, "differs from"),
        (missing, "is missing after"),
        (unknown, "is not part of"),
    ):
        if names:
            found = held.get(names[0])
            how = f" (attested {found.how})" if found else ""
            more = f" ({len(names) - 1} more like it)" if len(names) > 1 else ""
            tensor = f"{engine}: tensor {names[0]!r}{how}"
            raise WeightsDiffer(
                f"{tensor} {verb} published version {version}{more}; the run stops before another token is sampled"
            )
