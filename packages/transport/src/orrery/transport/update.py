"""One engine and one update: pause, load, attest. Requests in flight wait, and go on with the new weights on the cache they have.

- It ends in attestation: every tensor that was published must stand in the engine with the publisher's fingerprint.
- An engine that did not come through stays paused: not one more token is sampled from weights nobody vouches for.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

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


async def update_engine(engine: EngineClient, published: "Published") -> UpdateReport:
    """Bring one engine to `published` and have it go on. Raises EngineGone, UpdateFailed, or WeightsDiffer naming engine and tensor."""
    begin = time.perf_counter()
    await engine.pause()
    paused = time.perf_counter()
    await engine.update_weights(published)
    updated = time.perf_counter()
    found = await engine.attested()
    if found is None or found.digest != published.digest:
        compare(published.version, published.fingerprints, await engine.fingerprints(), engine.name)
        raise WeightsDiffer(f"{engine.name}: what it holds has not the digest {published.digest} of version {published.version}")
    attested = time.perf_counter()
    await engine.resume()
    return UpdateReport(
        version=published.version,
        digest=published.digest,
        pause_s=paused - begin,
        update_s=updated - paused,
        attest_s=attested - updated,
        paused_s=time.perf_counter() - begin,
        attested=found.how,
    )


def compare(version: int, published: Mapping[str, int], held: Mapping[str, TensorAttestation], engine: str) -> None:
    """Raise WeightsDiffer naming a tensor unless `held` is `published`, tensor by tensor."""
    different = sorted(name for name, value in published.items() if name in held and held[name].fingerprint != value)
    missing, unknown = sorted(published.keys() - held.keys()), sorted(held.keys() - published.keys())
    for names, verb in ((different, "differs from"), (missing, "is missing after"), (unknown, "is not part of")):
        if names:
            found = held.get(names[0])
            how = f" (attested {found.how})" if found else ""
            more = f" ({len(names) - 1} more like it)" if len(names) > 1 else ""
            tensor = f"{engine}: tensor {names[0]!r}{how}"
            raise WeightsDiffer(f"{tensor} {verb} published version {version}{more}; the run stops before another token is sampled")
