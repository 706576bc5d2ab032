"""MaxRL (Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning"): the mean reward divides.

A_i = (R_i − mean(R)) / mean(R), zero where the mean is not positive: rare successes weigh as maximum likelihood would weigh them.
"""

import numpy as np

from orrery.manifest.schema import MaxRl


def advantages(rewards: np.ndarray, algorithm: MaxRl) -> np.ndarray:
    """f32 [n] from f32 [n]; exactly zero where all rewards are equal or their mean is not positive."""
    exact = rewards.astype(np.float64)
    mean = exact.mean()
    if mean <= 0 or (rewards == rewards[0]).all():
        return np.zeros(len(rewards), dtype=np.float32)
    return ((exact - mean) / mean).astype(np.float32)
