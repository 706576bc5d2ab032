"""Collect groups (rollouts of one problem), compute their advantages, and cut batches.

- A group without finished rollouts or with fewer than two rewards is dropped.
- With `drop_zero_advantage_groups`, groups with only zero advantages are spare: a batch uses
  them only after `max_sampled_ratio` · `rollouts_per_batch` sampled rollouts.
- A batch takes the oldest groups first, and no stale group.
"""

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from orrery.manifest.errors import RunFailed
from orrery.manifest.schema import Algorithm, Grpo, MaxRl, Orchestrator
from orrery.orchestrator.dispatch import GroupDropped, GroupRequest, Request
from orrery.orchestrator.rollout import ENGINE_GONE, Failed, Rollout

STD_FLOOR = 1e-6  # smaller deviations are rounding errors
BARREN_BATCHES = 10  # so many batches of untrainable rollouts in a row end the run
RAISE = {  # drop reason → setting to increase
    "timeout": "rollout_timeout_s",
    "stale_in_flight": "max_off_policy_steps",
    "stale_in_queue": "max_off_policy_steps",
}


def grpo(rewards: np.ndarray, algorithm: Grpo) -> np.ndarray:
    """Return A_i = R_i − mean(R) for rewards R (GRPO: Shao et al. 2024, DeepSeekMath, eq. 3).

    If `normalize_std`, divide by the rewards' population standard deviation, as in the paper. Very
    easy and hard problems then weigh more (Liu et al. 2025, "Dr. GRPO").
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
    """Return finished rollouts with advantages, computed with `num_zeros` more rewards of 0."""
    rewards = [*(rollout.reward for rollout in group.survivors), *[0.0] * group.num_zeros]
    gained = advantages(np.asarray(rewards, dtype=np.float32), algorithm)
    return [
        replace(rollout, advantage=float(advantage))
        for rollout, advantage in zip(group.survivors, gained, strict=False)
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
        # Arrival order must not matter.
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


class RolloutBuffer:
    def __init__(self, settings: Orchestrator):
        self.algorithm, self.rollouts_per_batch = settings.algorithm, settings.rollouts_per_batch
        self.drop_zero = settings.drop_zero_advantage_groups
        self.budget = math.ceil(settings.max_sampled_ratio * settings.rollouts_per_batch)
        self.max_spare = (settings.max_batches_ahead + 2) * settings.rollouts_per_batch
        self.queue: deque[list[Rollout]] = deque()
        self.spare: deque[list[Rollout]] = deque()
        self.num_sampled = 0
        self.dropped: Counter[str] = Counter()
        self._barren: Counter[str] = Counter()
        self._details: dict[str, str] = {}

    @property
    def num_queued(self) -> int:
        return _size(self.queue)

    @property
    def has_batch(self) -> bool:
        lacking = self.rollouts_per_batch - self.num_queued
        return lacking <= 0 or (self.num_sampled >= self.budget and _size(self.spare) >= lacking)

    def room(self, num_batches: int) -> int:
        """Return how many more rollouts `num_batches` batches need.

        The sampling budget limits this number, but always allows one batch.
        """
        lacking = num_batches * self.rollouts_per_batch - self.num_queued
        if not self.drop_zero:
            return lacking
        unspent = num_batches * self.budget - self.num_sampled
        missing = self.rollouts_per_batch - self.num_queued - _size(self.spare)
        return min(lacking, max(unspent, missing))

    def add(self, group: Group) -> bool:
        """Keep or drop the group. Return whether any advantage differs from 0."""
        num_survivors = len(group.survivors)
        if not num_survivors or num_survivors + group.num_zeros < 2:
            self.count("too_few_survivors", num_survivors)
            return False
        rollouts = with_advantages(group, self.algorithm)
        has_signal = any(rollout.advantage for rollout in rollouts)
        self.num_sampled += len(rollouts)
        if has_signal or not self.drop_zero:
            self.queue.append(rollouts)
        else:
            self.spare.append(rollouts)
            while _size(self.spare) - len(self.spare[0]) >= self.max_spare:
                self.count("zero_advantage", len(self.spare.popleft()))
        self._barren.clear()
        return has_signal

    def sweep(self, oldest_version: int) -> None:
        for groups, reason in ((self.queue, "stale_in_queue"), (self.spare, "zero_advantage")):
            fresh = []
            for group in groups:
                if min(rollout.oldest_version for rollout in group) >= oldest_version:
                    fresh.append(group)
                else:
                    self.count(reason, len(group))
            if len(fresh) < len(groups):
                groups.clear()
                groups.extend(fresh)

    def drop_engines(self, is_dropped: Callable[[int], bool], reason: str) -> int:
        """Drop groups with a rollout of a dropped engine. Return the number of dropped rollouts."""
        num_dropped = 0
        for groups in (self.queue, self.spare):
            kept = [group for group in groups if not any(is_dropped(one.engine) for one in group)]
            num_dropped += _size(groups) - sum(map(len, kept))
            groups.clear()
            groups.extend(kept)
        self.count(reason, num_dropped)
        return num_dropped

    def take_batch(self, oldest_version: int) -> list[Rollout] | None:
        if not self.has_batch:
            return None
        self.sweep(oldest_version)
        if not self.has_batch:
            return None
        batch = _take(self.queue, self.rollouts_per_batch)
        batch += _take(self.spare, self.rollouts_per_batch - len(batch))
        self.num_sampled = max(0, self.num_sampled - self.budget)
        return batch

    def count(self, reason: str, num_rollouts: int, detail: str | None = None) -> None:
        if num_rollouts:
            self.dropped[reason] += num_rollouts
            if reason != ENGINE_GONE:
                self._barren[reason] += num_rollouts
        if detail:
            self._details[reason] = detail

    def check_not_starved(self) -> None:
        num_lost = sum(self._barren.values())
        if num_lost < BARREN_BATCHES * self.rollouts_per_batch:
            return
        reasons = ", ".join(f"{reason} {count}" for reason, count in self._barren.most_common())
        reason = self._barren.most_common(1)[0][0]
        advice = "fix these causes"
        if reason in RAISE:
            advice = f"raise orchestrator.{RAISE[reason]}"
            advice += ", or lower orchestrator.admission.max_in_flight"
        last = f" Last {reason}: {self._details[reason]}." if reason in self._details else ""
        raise RunFailed(
            f"orchestrator: none of the last {num_lost} rollouts can be trained ({reasons}); "
            f"{advice}.{last}"
        )


def _size(groups: deque[list[Rollout]]) -> int:
    return sum(len(group) for group in groups)


def _take(groups: deque[list[Rollout]], most: int) -> list[Rollout]:
    taken: list[Rollout] = []
    while groups and len(taken) < most:
        group = groups.popleft()
        room = most - len(taken)
        taken.extend(group[:room])
        if group[room:]:
            groups.appendleft(group[room:])
    return taken
