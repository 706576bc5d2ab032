"""Algorithms: pure functions from a group's rewards to its advantages, one file each; the trainer knows none of their names."""

from collections.abc import Callable
from typing import Any

import numpy as np

from orrery.manifest.schema import Algorithm
from orrery.orchestrator.algorithms import grpo, max_rl

ALGORITHMS: dict[str, Callable[[np.ndarray, Any], np.ndarray]] = {
    "grpo": grpo.advantages,
    "max_rl": max_rl.advantages,
}


def advantages(rewards: np.ndarray, algorithm: Algorithm) -> np.ndarray:
    """Advantage of every rollout of one group: f32 [n] from rewards f32 [n], n ≥ 2."""
    return ALGORITHMS[algorithm.kind](rewards, algorithm)
