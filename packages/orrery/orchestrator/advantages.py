"""Collect groups (rollouts of one problem), and compute their advantages.

- Equal rewards give advantages of exactly 0.
- Timeouts with a reward of 0 count in the group's mean reward, but are not trained.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from orrery.manifest.schema import Algorithm, Grpo, MaxRl
from orrery.orchestrator.dispatch import GroupDropped, GroupRequest, Request
from orrery.orchestrator.rollout import Failed, Rollout

STD_FLOOR = 1e-6  # a smaller deviation is only a rounding error


def grpo(rewards: np.ndarray, algorithm: Grpo) -> np.ndarray:
    """Return A_i = R_i − mean(R) for rewards R (GRPO: Shao et al. 2024, DeepSeekMath, eq. 3).

    If `normalize_std`, divide by the rewards' population standard deviation, as in the paper. Very
    easy and very hard problems then weigh more (Liu et al. 2025, "Dr. GRPO").
    """
    if (rewards == rewards[0]).all():
        return np.zeros(len(rewards), dtype=np.float32)
    exact = rewards.astype(np.float64)
    centred = exact - exact.mean()
    if algorithm.normalize_std:
        centred /= max(exact.std(), STD_FLOOR)
    return centred.astype(np.float32)


def max_rl(rewards: np.ndarray, algorithm: MaxRl) -> np.ndarray:
    """Return A_i = (R_i − mean(R)) / mean(R) for rewards R. Return zeros if mean(R) ≤ 0.

    Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning".
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


@dataclass
class Group:
    request: GroupRequest
    survivors: list[Rollout] = field(default_factory=list)
    num_zeros: int = 0
    num_ended: int = 0


def with_advantages(group: Group, algorithm: Algorithm) -> list[Rollout]:
    rewards = [*(rollout.reward for rollout in group.survivors), *[0.0] * group.num_zeros]
    gained = advantages(np.asarray(rewards, dtype=np.float32), algorithm)
    return [
        replace(rollout, advantage=float(advantage))
        for rollout, advantage in zip(
            group.survivors, gained, strict=False
        )  # the last advantages belong to timeouts, which are not trained
    ]


class Groups:
    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}

    @property
    def num_rollouts(self) -> int:
        return sum(len(group.survivors) for group in self._groups.values())

    def add(self, request: Request, outcome: Rollout | Failed) -> Group | None:
        group = self._groups.setdefault(request.group.key, Group(request.group))
        group.num_ended += 1
        if isinstance(outcome, Rollout):
            group.survivors.append(outcome)
        else:
            group.num_zeros += outcome.is_zero
        if group.num_ended < request.group.size:
            return None
        del self._groups[request.group.key]
        # Make the batch independent of the order of arrival.
        group.survivors.sort(key=lambda rollout: rollout.member)
        return group

    def drop_engine(self, engine: int) -> int:
        before = self.num_rollouts
        for group in self._groups.values():
            group.survivors = [each for each in group.survivors if each.engine != engine]
        return before - self.num_rollouts

    def drop(self, dropped: GroupDropped) -> int:
        group = self._groups.pop(dropped.group.key, None)
        return len(group.survivors) if group else 0
