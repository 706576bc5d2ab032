"""GRPO (Shao et al. 2024, DeepSeekMath, eq. 3): the group's mean is the baseline.

A_i = R_i − mean(R). Dividing by the group's standard deviation, as the paper does, weighs easy and hard problems up (Liu et al. 2025,
"Dr. GRPO"); `normalize_std` asks for it. The standard deviation is the population's.
"""

import numpy as np

from orrery.manifest.schema import Grpo

STD_FLOOR = (
    1e-6  # a group of nearly equal rewards has nothing to say; do not let rounding speak for it
)


def advantages(rewards: np.ndarray, algorithm: Grpo) -> np.ndarray:
    """f32 [n] from f32 [n]; exactly zero where all rewards are equal."""
    if (rewards == rewards[0]).all():
        return np.zeros(len(rewards), dtype=np.float32)
    exact = rewards.astype(np.float64)
    centred = exact - exact.mean()
    if algorithm.normalize_std:
        centred /= max(exact.std(), STD_FLOOR)
    return centred.astype(np.float32)
