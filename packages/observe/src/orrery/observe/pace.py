"""Pace: how often what goes on for weeks is written down. Closely at first, then at every thousandth of its age, and once a minute at last.

A run of six weeks has 65,000 rows of such a series, one of an hour 4,000.
"""

LONGEST_S = 60.0
SHARE_OF_AGE = 1e-3


def period_s(age_s: float, shortest_s: float) -> float:
    """Seconds from one row to the next of a series that is `age_s` old."""
    return max(shortest_s, min(LONGEST_S, SHARE_OF_AGE * age_s))


class Pace:
    """Says when the next row is due, to somebody who asks at least every `shortest_s`."""

    def __init__(self, shortest_s: float, now_s: float):
        self._shortest_s, self._begin_s, self._next_s = shortest_s, now_s, now_s

    def due(self, now_s: float) -> bool:
        if (
            now_s < self._next_s - 0.5 * self._shortest_s
        ):  # a look that comes a little early, by a timer's jitter, is not left out
            return False
        # From when it was due, not from now: so half a period early once is not so every time, for who asks more often.
        self._next_s = max(self._next_s + period_s(now_s - self._begin_s, self._shortest_s), now_s)
        return True
