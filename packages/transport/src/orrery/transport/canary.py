"""The canary: a fixed prompt whose log-probs every engine must compute like the trainer.

- The trainer computes the log-probs with a version's weights and publishes both
  (`Published.canary`).
- After each update the fleet asks every engine itself, not the router. No batch is cut until all
  have answered (`is_proving`). A restarted engine gets no request before it has answered.
- Fingerprints show which weights arrived. The canary shows that the engine computes with them.
- The run's seed draws the tokens: unlikely text, whose log-probs change with any change of the
  weights.
- The measure is the mean |difference| over tokens, because one token may be far off if a mixture
  chooses another expert. Beyond `trainer.mismatch.canary_logprob_difference`, WeightsDiffer ends
  the run and names engine and version.
"""

import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from orrery.manifest.errors import OrreryError
from orrery.observe.deadline import scaled

if TYPE_CHECKING:
    from orrery.manifest.schema import Manifest
    from orrery.transport.engine import EngineClient

NUM_TOKENS = 32
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Canary:
    """The prompt, and the bound on the mean |difference| of log-probs after its first token."""

    token_ids: tuple[int, ...]
    bound: float

    @classmethod
    def of(cls, manifest: "Manifest") -> "Canary | None":
        """Return the run's canary, or None if the manifest has no bound."""
        bound = manifest.trainer.mismatch.canary_logprob_difference
        return None if bound is None else cls(canary_tokens(manifest), bound)


def canary_tokens(manifest: "Manifest") -> tuple[int, ...]:
    """Return the canary's token ids, which are the same in every process of the run.

    Their number is NUM_TOKENS, or less if the engines' context is shorter.
    """
    length = min(NUM_TOKENS, manifest.inference.max_model_len_tokens - 1)
    chosen = random.Random(manifest.seed)
    return tuple(chosen.randrange(manifest.model.vocab_size) for _ in range(length))


async def prove(
    engine: "EngineClient", canary: Canary, version: int, known: Sequence[float]
) -> tuple[float, float]:
    """Ask a resumed engine for the canary of `version`; return the mean |difference| and the
    seconds.

    Pauses the engine and raises WeightsDiffer if the difference is beyond the bound. Raises
    UpdateFailed if the engine gives no log-probs, and EngineGone.
    """
    from orrery.transport.engine import (
        GenerationFailed,
        UpdateFailed,
        WeightsDiffer,
    )  # a trainer lacks its packages

    begin = time.perf_counter()
    try:
        found = await engine.prompt_logprobs(
            canary.token_ids, f"canary-{version}", scaled(TIMEOUT_S)
        )
    except GenerationFailed as error:
        raise UpdateFailed(
            f"{engine.name} did not answer the canary of version {version}: {error}"
        ) from error
    if len(found) != len(known):
        raise UpdateFailed(
            f"{engine.name} gave {len(found)} log-probs of the canary of version {version}, not {len(known)}"
        )
    difference = float(np.abs(np.asarray(found) - np.asarray(known)).mean())
    if not difference <= canary.bound:  # also true for NaN
        with suppress(OrreryError):  # the run ends anyway
            await engine.pause()
        raise WeightsDiffer(
            f"{engine.name}: with version {version} its log-probs of the canary are {difference:.3g} from the trainer's on average, more "
            f"than trainer.mismatch.canary_logprob_difference = {canary.bound:g}; it does not compute what is trained, the run stops"
        )
    return difference, time.perf_counter() - begin
