"""Admission: how many rollouts may be in flight. A permit is one rollout.

- Always: 0 ≤ taken; every permit taken is given back once.
- Lowering the limit never cancels; it only stops refilling.
"""

from orrery.manifest.schema import AdaptiveAdmission, FixedAdmission


class Admission:
    """A counter of permits under a limit that the manifest fixes."""

    def __init__(self, settings: FixedAdmission | AdaptiveAdmission):
        self.limit = settings.max_in_flight
        self.taken = 0

    @property
    def free(self) -> int:
        return max(0, self.limit - self.taken)

    def take(self) -> None:
        if self.taken >= self.limit:
            raise AssertionError(f"permit {self.taken + 1} of {self.limit} taken")
        self.taken += 1

    def give_back(self, count: int = 1) -> None:
        if count > self.taken:
            raise AssertionError(f"{count} permits given back, {self.taken} taken")
        self.taken -= count
