"""Restarts: whether an engine that has ended is started again. Pure.

- `most` is the manifest's `inference.max_restarts`: so often within a day (`WINDOW_S`), over all engines.
- Never after a person's mistake (exit code 2): a second start would say the same.
- Not after two incarnations in a row that ended before they served: a third would too, and each costs the minutes that loading takes.
"""

from collections import Counter, deque

from orrery.manifest.errors import OrreryError

ROLE = "inference"  # whom the others can do without for a while
WINDOW_S = (
    24 * 3600.0
)  # what breaks engines one after another shows within a day; losses of weeks past are those of a large machine


class Restarts:
    """Of one stage. `by_name` counts all of them."""

    def __init__(self, most: int):
        self.most = most
        self.by_name: Counter[str] = Counter()
        self._times_s: deque[float] = deque()  # of those within WINDOW_S
        self._vain: Counter[str] = Counter()  # incarnations in a row that never served

    @property
    def num_lately(self) -> int:
        """Within the WINDOW_S before the last call of `refusal`."""
        return len(self._times_s)

    def refusal(self, name: str, has_served: bool, code: int | None, now_s: float) -> str | None:
        """Why `name`, which ended with `code`, is not started again; None where it is, and then this counts as done at `now_s`.

        Empty where nobody expected it: the manifest allows none.
        """
        while self._times_s and self._times_s[0] <= now_s - WINDOW_S:
            self._times_s.popleft()
        self._vain[name] = 0 if has_served else self._vain[name] + 1
        if not self.most:
            return ""
        if code == OrreryError.exit_code:
            return "it is not started again, for it would say the same"
        if self._vain[name] > 1:
            return "it ended twice before it served, so it is not started again"
        if self.num_lately >= self.most:
            return f"engines were started again {self.most} times, and inference.max_restarts allows no more within a day"
        self.by_name[name] += 1
        self._times_s.append(now_s)
        return None
