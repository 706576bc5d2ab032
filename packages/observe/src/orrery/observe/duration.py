"""Durations as people read them."""


def duration(seconds: float) -> str:
    """`12.3 s`, `4 min 12 s`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"
