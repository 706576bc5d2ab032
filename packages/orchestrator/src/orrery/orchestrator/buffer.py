"""Sink: whole groups in, batches out; what may train waits here.

- A group trains on its survivors if two or more rewards remain. Else it is dropped
  (`too_few_survivors`). The baseline includes rewards of 0 for members that ran out of time. Their
  tokens are not trained.
- Advantages are computed once, over the whole group. A group of zero advantages carries no signal.
- `drop_zero_advantage_groups` puts such groups into `spare`. Once `max_sampled_ratio` times the
  batch has been sampled, they fill it. The loss keeps its denominator, so the step is small.
- `spare` holds at most the need of the coming batches. The oldest leave first (`zero_advantage`).
- A batch is exactly `rollouts_per_batch` rollouts, oldest group first; the rest of a group that does not fit leads the next batch.
- The sweep at the cut is the staleness guarantee: a kept group with a sampled token older than the bound leaves whole (`stale_in_queue`).
- Every rollout that leaves without training is counted by its reason; too many in a row without one group to train is an error.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from orrery.manifest.errors import RunFailed
from orrery.manifest.schema import Orchestrator
from orrery.orchestrator.algorithms import advantages
from orrery.orchestrator.groups import CompleteGroup
from orrery.orchestrator.rollout import ENGINE_GONE, Rollout

BARREN_BATCHES = (
    10  # this many batches' worth of rollouts in a row, and nothing to train on, is starvation
)


@dataclass(frozen=True)
class Sample:
    """A rollout that may train."""

    rollout: Rollout
    advantage: float
    group_id: int
    member: int
    task_index: int
    dispatch_version: int

    @cached_property  # asked for at every event while the sample is queued
    def oldest_version(self) -> int:
        return int(self.rollout.sampled_versions.min())


class RolloutBuffer:
    """The queue between generation and training."""

    def __init__(self, settings: Orchestrator):
        self.algorithm, self.rollouts_per_batch = settings.algorithm, settings.rollouts_per_batch
        self.drop_zero = settings.drop_zero_advantage_groups
        self.budget = math.ceil(
            settings.max_sampled_ratio * settings.rollouts_per_batch
        )  # rollouts to sample for a batch
        self.most_spare = (
            settings.max_batches_ahead + 2
        ) * settings.rollouts_per_batch  # generation is never further ahead
        self.queue: deque[list[Sample]] = deque()  # finished groups, in order of completion
        self.spare: deque[list[Sample]] = deque()  # groups without signal
        self.num_sampled = 0  # samples so far, less the budget of each cut batch
        self.dropped: Counter[str] = Counter()  # rollouts by reason, over the whole run
        self._barren: Counter[str] = Counter()  # the same, since the last group that could train
        self._words: dict[str, str] = {}  # reason -> the newest sentence behind it

    @property
    def num_queued(self) -> int:
        return _size(self.queue)

    @property
    def has_batch(self) -> bool:
        """Return whether a batch is ready. Spare groups count once the batch's budget is spent."""
        lacking = self.rollouts_per_batch - self.num_queued
        return lacking <= 0 or (self.num_sampled >= self.budget and _size(self.spare) >= lacking)

    def room(self, num_batches: int) -> int:
        """Return the rollouts to sample for the next `num_batches` batches, with those in flight.

        This exceeds a batch's budget if too few rollouts are left because others went stale.
        """
        lacking = num_batches * self.rollouts_per_batch - self.num_queued
        if not self.drop_zero:
            return lacking
        unspent = num_batches * self.budget - self.num_sampled
        return min(
            lacking, max(unspent, self.rollouts_per_batch - self.num_queued - _size(self.spare))
        )

    def add(self, group: CompleteGroup) -> bool:
        """Keep or drop the group; return whether it carries signal."""
        survivors = group.survivors
        if not survivors or len(survivors) + group.num_zeros < 2:
            self.count("too_few_survivors", len(survivors))
            return False
        rewards = [*(rollout.reward for rollout in survivors.values()), *[0.0] * group.num_zeros]
        gained = advantages(np.asarray(rewards, dtype=np.float32), self.algorithm)[: len(survivors)]
        request, has_signal = group.request, bool(gained.any())
        samples = [
            Sample(
                rollout,
                float(advantage),
                request.group_id,
                member,
                request.task_index,
                group.version,
            )
            for (member, rollout), advantage in zip(survivors.items(), gained, strict=True)
        ]
        self.num_sampled += len(samples)
        if has_signal or not self.drop_zero:
            self.queue.append(samples)
        else:
            self.spare.append(samples)
            while _size(self.spare) - len(self.spare[0]) >= self.most_spare:
                self.count("zero_advantage", len(self.spare.popleft()))
        self._barren.clear()
        return has_signal

    def sweep(self, oldest_version: int) -> None:
        """Drop kept groups that hold a token older than `oldest_version`."""
        for groups in (self.queue, self.spare):
            stale = [
                group
                for group in groups
                if min(sample.oldest_version for sample in group) < oldest_version
            ]
            for group in stale:
                self.count("stale_in_queue", len(group))
            if stale:
                fresh = [
                    group
                    for group in groups
                    if min(sample.oldest_version for sample in group) >= oldest_version
                ]
                groups.clear()
                groups.extend(fresh)

    def take_batch(self, oldest_version: int) -> list[Sample] | None:
        """The next batch, every token of it at least `oldest_version`; None while there is not enough."""
        self.sweep(oldest_version)
        if not self.has_batch:
            return None
        batch = _take(self.queue, self.rollouts_per_batch)
        batch += _take(self.spare, self.rollouts_per_batch - len(batch))
        self.num_sampled = max(0, self.num_sampled - self.budget)
        return batch

    def count(self, reason: str, num_rollouts: int, detail: str | None = None) -> None:
        """Rollouts that leave without training."""
        if num_rollouts:
            self.dropped[reason] += num_rollouts
            if (
                reason != ENGINE_GONE
            ):  # says nothing of what is trained on, and ends by itself: engines may be lost so often and no more
                self._barren[reason] += num_rollouts
        if detail:
            self._words[reason] = detail

    def check_not_starved(self) -> None:
        """Raises RunFailed, with reasons and counts, when nothing that leaves can be trained on."""
        limit = BARREN_BATCHES * self.rollouts_per_batch
        if sum(self._barren.values()) < limit:
            return
        reasons = ", ".join(f"{reason} {count}" for reason, count in self._barren.most_common())
        reason = self._barren.most_common(1)[0][0]
        advice = {
            "timeout": "raise orchestrator.rollout_timeout_s, or lower orchestrator.admission.max_in_flight",
            "stale_in_flight": "raise orchestrator.max_off_policy_steps, or lower orchestrator.admission.max_in_flight",
            "stale_in_queue": "raise orchestrator.max_off_policy_steps, or lower orchestrator.admission.max_in_flight",
        }.get(reason, "mend what the reasons name")
        words = f" Last {reason}: {self._words[reason]}." if reason in self._words else ""
        raise RunFailed(
            f"orchestrator: the last {sum(self._barren.values())} rollouts gave nothing to train on ({reasons}); {advice}.{words}"
        )


def _size(groups: deque[list[Sample]]) -> int:
    return sum(len(group) for group in groups)


def _take(groups: deque[list[Sample]], most: int) -> list[Sample]:
    """Remove up to `most` samples from the front. The rest of a split group stays in front."""
    taken: list[Sample] = []
    while groups and len(taken) < most:
        group = groups.popleft()
        room = most - len(taken)
        taken.extend(group[:room])
        if group[room:]:
            groups.appendleft(group[room:])
    return taken
