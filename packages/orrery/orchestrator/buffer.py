"""Collect complete groups, and return batches of their rollouts.

- A group without a finished rollout or with fewer than two rewards is dropped
  (`too_few_survivors`).
- With `drop_zero_advantage_groups`, a group with only zero advantages is spare. A batch uses spare
  groups only after `max_sampled_ratio` · `rollouts_per_batch` rollouts were sampled.
- A batch has exactly `rollouts_per_batch` rollouts, oldest group first, and no stale group.
"""

import math
from collections import Counter, deque
from collections.abc import Callable

from orrery.manifest.errors import RunFailed
from orrery.manifest.schema import Orchestrator
from orrery.orchestrator.advantages import Group, with_advantages
from orrery.orchestrator.rollout import ENGINE_GONE, Rollout

BARREN_BATCHES = 10  # the run ends after so many batches' worth of untrainable rollouts in a row
RAISE = {  # drop reason → setting to raise
    "timeout": "rollout_timeout_s",
    "stale_in_flight": "max_off_policy_steps",
    "stale_in_queue": "max_off_policy_steps",
}


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
        """Return how many more rollouts to sample for `num_batches` batches.

        The sampling budget limits this number, but always allows one complete batch.
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
        """Drop groups with a rollout of a dropped engine. Return the number of rollouts."""
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
