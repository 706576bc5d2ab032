"""Clock: policy versions, batch numbers and the one staleness formula.

- Versions start at 0. Batch n (from 1) trains version n − 1 and makes version n.
- A token may enter batch n only if its version ≥ n − 1 − `max_off_policy_steps`.
- Everything here that speaks of staleness (draining work in flight, sweeping the queue, how much to dispatch) uses that formula.
"""

from dataclasses import dataclass

NO_VERSION = -1


@dataclass
class Clock:
    """Where the run stands. `version` is what the engines hold, `next_batch` the batch that is cut next."""

    max_off_policy_steps: int
    num_batches: int
    next_batch: int = 1
    version: int = NO_VERSION

    def oldest_version(self, batch: int) -> int:
        """The oldest version that may enter `batch`."""
        return batch - 1 - self.max_off_policy_steps

    @property
    def oldest_useful(self) -> int:
        """The oldest version that may still enter any batch to come."""
        return self.oldest_version(self.next_batch)

    def batches_open_to(self, version: int) -> int:
        """How many of the batches to come may hold tokens of `version`."""
        last = min(version + 1 + self.max_off_policy_steps, self.num_batches)
        return max(0, last - self.next_batch + 1)

    @property
    def all_batches_taken(self) -> bool:
        return self.next_batch > self.num_batches
