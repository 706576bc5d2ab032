"""Scale deadlines by ORRERY_DEADLINE_SCALE (default 1), pace metrics, and format durations."""

import math
import os

from orrery.manifest.errors import OrreryError

SCALE = "ORRERY_DEADLINE_SCALE"
LONGEST_S = 60.0
HAND_OVER_S = 30.0  # maximum time for a site to leave the etcd cluster
SHARE_OF_AGE = 1e-3


def scaled(seconds: float) -> float:
    text = os.environ.get(SCALE, "1")
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not (math.isfinite(scale) and scale > 0):
        raise OrreryError(
            f"{SCALE}: {text!r} is not a positive number; set [roles] deadline_scale in the site "
            f"file to a number such as 1.0"
        )
    return seconds * scale


def period_s(age_s: float, shortest_s: float) -> float:
    return max(shortest_s, min(LONGEST_S, SHARE_OF_AGE * age_s))


class Pace:
    """Decide when the next metrics row is due. Poll `due` at least every `shortest_s`."""

    def __init__(self, shortest_s: float, now_s: float):
        self._shortest_s, self._begin_s, self._next_s = shortest_s, now_s, now_s

    def due(self, now_s: float) -> bool:
        if now_s < self._next_s - 0.5 * self._shortest_s:
            return False
        # Add to the due time, not to `now_s`, or early rows shorten the mean period.
        self._next_s = max(self._next_s + period_s(now_s - self._begin_s, self._shortest_s), now_s)
        return True


def duration(seconds: float) -> str:
    """Format as `12.3 s`, `4 min 12 s` or `41 days 16 h`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if round(seconds) < 3600:
        return f"{round(seconds) // 60} min {round(seconds) % 60} s"
    if (minutes := round(seconds / 60)) < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} day{'s' if days > 1 else ''} {hours} h"
