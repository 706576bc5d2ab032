"""Durations as people read them."""


def duration(seconds: float) -> str:
    """`12.3 s`, `4 min 12 s`, `3 h 5 min`, `41 days 16 h`: two units at most, the smaller one rounded."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if round(seconds) < 3600:
        return f"{round(seconds) // 60} min {round(seconds) % 60} s"
    if (minutes := round(seconds / 60)) < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} day{'s' if days > 1 else ''} {hours} h"
