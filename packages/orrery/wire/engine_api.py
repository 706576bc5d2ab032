"""The parts of an engine's HTTP interface that several roles must agree on."""

import random
from typing import TYPE_CHECKING

from orrery.runtime.timing import scaled

if TYPE_CHECKING:
    from orrery.manifest.schema import Manifest

ENGINE_HEADER = "X-Orrery-Engine"  # index of the engine that answers
SESSION_HEADER = "X-Session-ID"  # vllm-router's consistent_hash policy reads it
# The client closes idle connections before the server does (uvicorn: after 5 s).
KEEPALIVE_S = 3.0
UPDATE_S = 300.0  # for the engines to load a version, scaled
NUM_CANARY_TOKENS = 32


def request_s(manifest: "Manifest") -> float:
    """Return how long the client, and everything between it and the engine, waits for a request.

    The orchestrator ends a rollout earlier, but its clock stops during an update. This limit is
    for a connection that never ends.
    """
    return 2 * manifest.orchestrator.rollout_timeout_s + scaled(UPDATE_S)


def canary_tokens(manifest: "Manifest") -> tuple[int, ...]:
    """Return the canary's token ids, which are the same in every process of the run.

    Their number is NUM_CANARY_TOKENS, or less if the engines' context is shorter.
    """
    length = min(NUM_CANARY_TOKENS, manifest.inference.max_model_len_tokens - 1)
    chosen = random.Random(manifest.seed)
    return tuple(chosen.randrange(manifest.model.vocab_size) for _ in range(length))
