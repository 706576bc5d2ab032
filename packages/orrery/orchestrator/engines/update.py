"""Update one engine: pause, load, attest, resume, then check the canary.

- Requests in flight wait, then continue with the new weights on their old KV cache.
- Attestation compares every tensor's fingerprint with the published fingerprint.
- The canary is a fixed prompt. Its log-probs must match the trainer's (`Published.canary`), which
  shows that the engine computes with these weights. Its tokens are random, because log-probs of
  unlikely text change with any change of the weights.
- An engine stays paused after a failure, so no token is sampled from unknown weights.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from orrery.manifest.errors import OrreryError
from orrery.orchestrator.engines.client import EngineClient
from orrery.orchestrator.engines.messages import (
    GenerationFailed,
    TensorAttestation,
    UpdateFailed,
    WeightsDiffer,
)
from orrery.runtime.timing import scaled
from orrery.wire.engine_api import canary_tokens

if TYPE_CHECKING:
    from orrery.manifest.schema import Manifest
    from orrery.wire.weight_wire import Published

CANARY_S = 120.0  # longest answer to the canary, scaled


@dataclass(frozen=True)
class Canary:
    """The prompt, and the bound on the mean |difference| of log-probs after its first token.

    The mean is bounded, because a single token differs much if a mixture chooses another expert.
    """

    token_ids: tuple[int, ...]
    bound: float

    @classmethod
    def of(cls, manifest: "Manifest") -> "Canary | None":
        bound = manifest.trainer.mismatch.canary_logprob_difference
        return None if bound is None else cls(canary_tokens(manifest), bound)


@dataclass(frozen=True)
class UpdateReport:
    version: int
    digest: str
    pause_s: float
    update_s: float  # start, load, finish
    attest_s: float  # fetching and comparing fingerprints
    paused_s: float  # from the pause request to the resume
    attested: dict[str, int]  # tensors by kind, "resident" or "as_consumed"
    canary_s: float = 0.0  # after the resume
    canary_difference: float | None = None  # mean |difference|, None: not checked


async def update_engine(
    engine: EngineClient,
    published: "Published",
    canary: Canary | None = None,
    proving: AbstractContextManager[object] | None = None,
) -> UpdateReport:
    """Update one engine to `published`, resume it, and check its `canary`, if any.

    The resume and the canary run inside `proving`. Raises EngineGone, UpdateFailed, WeightsDiffer.
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
            f"{engine.name}: its weights do not have the digest {published.digest} "
            f"of version {published.version}"
        )
    attested = time.perf_counter()
    difference, canary_s = None, 0.0
    with nullcontext() if proving is None else proving:
        await engine.resume()
        resumed = time.perf_counter()
        if canary is not None and published.canary:
            difference = await check_canary(engine, canary, published.version, published.canary)
            canary_s = time.perf_counter() - resumed
    return UpdateReport(
        version=published.version,
        digest=published.digest,
        pause_s=paused - begin,
        update_s=updated - paused,
        attest_s=attested - updated,
        paused_s=resumed - begin,
        attested=found.how,
        canary_s=canary_s,
        canary_difference=difference,
    )


async def check_canary(
    engine: EngineClient, canary: Canary, version: int, known: Sequence[float]
) -> float:
    """Return the mean |difference| of a resumed engine's canary log-probs to `known`.

    Beyond the bound, pause the engine and raise WeightsDiffer. Raises UpdateFailed, EngineGone.
    """
    try:
        found = await engine.prompt_logprobs(
            canary.token_ids, f"canary-{version}", scaled(CANARY_S)
        )
    except GenerationFailed as error:
        raise UpdateFailed(
            f"{engine.name} did not answer the canary of version {version}: {error}"
        ) from error
    if len(found) != len(known):
        raise UpdateFailed(
            f"{engine.name} gave {len(found)} log-probs of the canary of version {version}, "
            f"instead of {len(known)}"
        )
    difference = float(np.abs(np.asarray(found) - np.asarray(known)).mean())
    if not difference <= canary.bound:  # also true for NaN
        with suppress(OrreryError):  # the run ends anyway
            await engine.pause()
        raise WeightsDiffer(
            f"{engine.name}: with version {version} its log-probs of the canary are "
            f"{difference:.3g} from the trainer's on average, more than "
            f"trainer.mismatch.canary_logprob_difference = {canary.bound:g}; "
            "it computes another model than the trainer, so the run stops"
        )
    return difference


def compare(
    version: int, published: Mapping[str, int], held: Mapping[str, TensorAttestation], engine: str
) -> None:
    """Raise WeightsDiffer, with a tensor's name, unless the engine holds the published tensors."""
    common = published.keys() & held.keys()
    different = {name for name in common if held[name].fingerprint != published[name]}
    for names, verb in (
        (different, "differs from"),
        (published.keys() - held.keys(), "is missing after"),
        (held.keys() - published.keys(), "is not part of"),
    ):
        if names:
            name = min(names)
            how = f" (attested {held[name].how})" if name in held else ""
            more = f" ({len(names) - 1} more like it)" if len(names) > 1 else ""
            raise WeightsDiffer(
                f"{engine}: tensor {name!r}{how} {verb} published version {version}{more}; "
                "the run stops before it samples another token"
            )
