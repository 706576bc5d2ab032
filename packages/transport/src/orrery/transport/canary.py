"""The canary: a fixed prompt whose log-probs every engine has to give as the trainer computes them, right after each update.

- The trainer computes them with the weights of a version and publishes both together (`Published.canary`).
- Once an engine has resumed, the fleet asks the engine itself, not the router. No batch is cut until it has answered (`is_proving`),
  and an engine that was started again gets no request before.
- Fingerprints say which weights arrived. The canary says that what answers computes with them, and computes the same.
- The tokens are drawn from the vocabulary by the run's seed: unlikely text, whose log-probs move with any change of the weights.
- What is compared is the mean of |difference| over tokens: where a mixture chooses another expert, one token may be far off.
- Beyond `trainer.mismatch.canary_logprob_difference` it is WeightsDiffer, a sentence with engine and version that ends the run.
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
    """The prompt, and how far the mean log-prob of its tokens after the first may be off."""

    token_ids: tuple[int, ...]
    bound: float

    @classmethod
    def of(cls, manifest: "Manifest") -> "Canary | None":
        """The run's; None where the manifest has no bound."""
        bound = manifest.trainer.mismatch.canary_logprob_difference
        return None if bound is None else cls(canary_tokens(manifest), bound)


def canary_tokens(manifest: "Manifest") -> tuple[int, ...]:
    """Ids that are the same in every process of the run: NUM_TOKENS, or as many as a request may have and still sample one."""
    length = min(NUM_TOKENS, manifest.inference.max_model_len_tokens - 1)
    chosen = random.Random(manifest.seed)
    return tuple(chosen.randrange(manifest.model.vocab_size) for _ in range(length))


async def prove(engine: "EngineClient", canary: Canary, version: int, known: Sequence[float]) -> tuple[float, float]:
    """The mean |difference| and the seconds that it took, of one engine that has resumed with `version`.

    Raises WeightsDiffer where it is beyond the bound, after pausing the engine; UpdateFailed where it gives no log-probs; EngineGone.
    """
    from orrery.transport.engine import GenerationFailed, UpdateFailed, WeightsDiffer  # not at the top: a trainer lacks its packages

    begin = time.perf_counter()
    try:
        found = await engine.prompt_logprobs(canary.token_ids, f"canary-{version}", scaled(TIMEOUT_S))
    except GenerationFailed as error:
        raise UpdateFailed(f"{engine.name} did not answer the canary of version {version}: {error}") from error
    if len(found) != len(known):
        raise UpdateFailed(f"{engine.name} gave {len(found)} log-probs of the canary of version {version}, not {len(known)}")
    difference = float(np.abs(np.asarray(found) - np.asarray(known)).mean())
    if not difference <= canary.bound:  # also where it is no number
        with suppress(OrreryError):  # the run ends anyway
            await engine.pause()
        raise WeightsDiffer(
            f"{engine.name}: with version {version} its log-probs of the canary are {difference:.3g} from the trainer's on average, more "
            f"than trainer.mismatch.canary_logprob_difference = {canary.bound:g}; it does not compute what is trained, the run stops"
        )
    return difference, time.perf_counter() - begin
