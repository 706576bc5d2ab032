"""Restarts: whether an engine that has ended is started again. Pure.

- `most` is the manifest's `inference.max_restarts`: so often a stage, over all engines.
- Never after a person's mistake (exit code 2): a second start would say the same.
- Not after two incarnations in a row that ended before they served: a third would too, and each costs the minutes that loading takes.
"""

from collections import Counter

from orrery.manifest.errors import OrreryError

ROLE = "inference"  # whom the others can do without for a while


class Restarts:
    """Of one stage."""

    def __init__(self, most: int):
        self.most = most
        self.by_name: Counter[str] = Counter()
        self._vain: Counter[str] = Counter()  # incarnations in a row that never served

    def refusal(self, name: str, has_served: bool, code: int | None) -> str | None:
        """Why `name`, which ended with `code`, is not started again; None where it is, and then this counts as done.

        Empty where nobody expected it: the manifest allows none.
        """
        self._vain[name] = 0 if has_served else self._vain[name] + 1
        if not self.most:
            return ""
        if code == OrreryError.exit_code:
            return "it is not started again, for it would say the same"
        if self._vain[name] > 1:
            return "it ended twice before it served, so it is not started again"
        if self.by_name.total() >= self.most:
            return f"engines were started again {self.most} times, and inference.max_restarts allows no more"
        self.by_name[name] += 1
        return None
