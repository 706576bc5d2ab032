"""Algorithms: pure functions from the rewards of one group to its advantages.

Equal rewards give advantages of exactly 0. To add an algorithm, write a function, list it in
`ALGORITHMS`, and add its record to the manifest's schema.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from orrery.manifest.schema import Algorithm, Grpo, MaxRl

STD_FLOOR = 1e-6  # bounds rounding errors of nearly equal rewards


def grpo(rewards: np.ndarray, algorithm: Grpo) -> np.ndarray:
    """Return A_i = R_i − mean(R) (GRPO: Shao et al. 2024, DeepSeekMath, eq. 3).

    `normalize_std` divides by the population's standard deviation, as in the paper. It favours
    easy and hard problems (Liu et al. 2025, "Dr. GRPO").
    """
    if (rewards == rewards[0]).all():
        return np.zeros(len(rewards), dtype=np.float32)
    exact = rewards.astype(np.float64)
    centred = exact - exact.mean()
    if algorithm.normalize_std:
        centred /= max(exact.std(), STD_FLOOR)
    return centred.astype(np.float32)


def max_rl(rewards: np.ndarray, algorithm: MaxRl) -> np.ndarray:
    """Return A_i = (R_i − mean(R)) / mean(R), or 0 if the mean is not positive.

    MaxRL: Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning".
    """
    exact = rewards.astype(np.float64)
    mean = exact.mean()
    if mean <= 0 or (rewards == rewards[0]).all():
        return np.zeros(len(rewards), dtype=np.float32)
    return ((exact - mean) / mean).astype(np.float32)


ALGORITHMS: dict[str, Callable[[np.ndarray, Any], np.ndarray]] = {"grpo": grpo, "max_rl": max_rl}


def advantages(rewards: np.ndarray, algorithm: Algorithm) -> np.ndarray:
    """Return one group's advantages f32 [n] from its rewards f32 [n], n ≥ 2."""
    return ALGORITHMS[algorithm.kind](rewards, algorithm)
