"""The parts of an engine's HTTP interface that several roles share."""

import random
from typing import TYPE_CHECKING

from orrery.runtime.timing import scaled

if TYPE_CHECKING:
    from orrery.manifest.schema import Manifest

ENGINE_HEADER = "X-Orrery-Engine"  # index of the answering engine
SESSION_HEADER = "X-Session-ID"  # read by vllm-router's consistent_hash policy
# Clients close idle connections before the server does (uvicorn: after 5 s).
KEEPALIVE_S = 3.0
UPDATE_S = 300.0  # longest update of the engines, scaled
NUM_CANARY_TOKENS = 32


def request_s(manifest: "Manifest") -> float:
    """Return the timeout of a request, for the client and every proxy before the engine.

    The orchestrator usually ends a slow rollout earlier, but its clock stops during an update.
    """
    return 2 * manifest.orchestrator.rollout_timeout_s + scaled(UPDATE_S)


def canary_tokens(manifest: "Manifest") -> tuple[int, ...]:
    """Return the canary's token ids, equal in all processes. A short context gets fewer ids."""
    length = min(NUM_CANARY_TOKENS, manifest.inference.max_model_len_tokens - 1)
    chosen = random.Random(manifest.seed)
    return tuple(chosen.randrange(manifest.model.vocab_size) for _ in range(length))
