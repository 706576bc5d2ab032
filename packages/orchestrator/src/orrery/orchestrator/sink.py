"""Sink: whole groups in, batches out; what may train waits here.

- A group trains on its survivors, if two or more remain; else it is dropped (`too_few_survivors`).
- Advantages are computed once, over the whole group. A group whose advantages are all zero is dropped here (`zero_advantage`), before
  it counts for anything, so a batch never shrinks: the next groups fill it.
- A batch is exactly `rollouts_per_batch` rollouts, oldest group first; the rest of a group that does not fit leads the next batch.
- The sweep at the cut is the staleness guarantee: a queued group with a sampled token older than the bound leaves whole (`stale_in_queue`).
- Every rollout that leaves without training is counted by its reason; too many in a row without one group to train is an error.
"""

from collections import Counter, deque
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from orrery.manifest.errors import RunFailed
from orrery.manifest.schema import Algorithm
from orrery.orchestrator.algorithms import advantages
from orrery.orchestrator.groups import CompleteGroup
from orrery.orchestrator.rollout import ENGINE_GONE, Rollout

BARREN_BATCHES = 10  # this many batches' worth of rollouts in a row, and nothing to train on, is starvation


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


class Sink:
    """The queue between generation and training."""

    def __init__(self, algorithm: Algorithm, rollouts_per_batch: int, drop_zero_advantage_groups: bool):
        self.algorithm, self.rollouts_per_batch, self.drop_zero = algorithm, rollouts_per_batch, drop_zero_advantage_groups
        self.queue: deque[list[Sample]] = deque()  # finished groups, in order of completion
        self.dropped: Counter[str] = Counter()  # rollouts by reason, over the whole run
        self._barren: Counter[str] = Counter()  # the same, since the last group that could train
        self._words: dict[str, str] = {}  # reason -> the newest sentence behind it

    @property
    def num_queued(self) -> int:
        return sum(len(group) for group in self.queue)

    def add(self, group: CompleteGroup) -> bool:
        """Queue the group, or drop it; True where it may train."""
        survivors = group.survivors
        if len(survivors) < 2:
            self.count("too_few_survivors", len(survivors))
            return False
        rewards = np.asarray([rollout.reward for rollout in survivors.values()], dtype=np.float32)
        gained = advantages(rewards, self.algorithm)
        if self.drop_zero and not gained.any():
            self.count("zero_advantage", len(survivors))
            return False
        request = group.request
        self.queue.append([
            Sample(rollout, float(advantage), request.group_id, member, request.task_index, group.version)
            for (member, rollout), advantage in zip(survivors.items(), gained, strict=True)
        ])  # fmt: skip
        self._barren.clear()
        return True

    def sweep(self, oldest_version: int) -> None:
        """Drop queued groups that hold a token older than `oldest_version`."""
        keep: deque[list[Sample]] = deque()
        for group in self.queue:
            if min(sample.oldest_version for sample in group) < oldest_version:
                self.count("stale_in_queue", len(group))
            else:
                keep.append(group)
        self.queue = keep

    def cut(self, oldest_version: int) -> list[Sample] | None:
        """The next batch, every token of it at least `oldest_version`; None while there is not enough."""
        self.sweep(oldest_version)
        if self.num_queued < self.rollouts_per_batch:
            return None
        batch: list[Sample] = []
        while len(batch) < self.rollouts_per_batch:
            group = self.queue.popleft()
            room = self.rollouts_per_batch - len(batch)
            batch.extend(group[:room])
            if group[room:]:
                self.queue.appendleft(group[room:])
        return batch

    def count(self, reason: str, num_rollouts: int, detail: str | None = None) -> None:
        """Rollouts that leave without training."""
        if num_rollouts:
            self.dropped[reason] += num_rollouts
            if reason != ENGINE_GONE:  # says nothing of what is trained on, and ends by itself: engines may be lost so often and no more
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
            "zero_advantage": "every rollout of a group gets the same reward: "
            "make the task easier or harder, warm-start longer, or raise orchestrator.algorithm.group_size",
            "timeout": "raise orchestrator.rollout_timeout_s, or lower orchestrator.admission.max_in_flight",
            "stale_in_flight": "raise orchestrator.max_off_policy_steps, or lower orchestrator.admission.max_in_flight",
            "stale_in_queue": "raise orchestrator.max_off_policy_steps, or lower orchestrator.admission.max_in_flight",
        }.get(reason, "mend what the reasons name")
        words = f" Last {reason}: {self._words[reason]}." if reason in self._words else ""
        raise RunFailed(
            f"orchestrator: the last {sum(self._barren.values())} rollouts gave nothing to train on ({reasons}); {advice}.{words}"
        )
