"""Deadlines: what the code allows for a start, or for another process, times what the site says (`ORRERY_DEADLINE_SCALE`, 1 without it).

A slow file system or a busy machine makes everything slower alike; a deadline that the manifest sets is not scaled.
"""

import math
import os

from orrery.manifest.errors import OrreryError

SCALE = "ORRERY_DEADLINE_SCALE"


def scaled(seconds: float) -> float:
    """`seconds` for this site. Raises `OrreryError` where the scale is not a positive number."""
    text = os.environ.get(SCALE, "1")
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not (math.isfinite(scale) and scale > 0):
        raise OrreryError(
            f"{SCALE}: {text!r} is not a positive number; set [roles] deadline_scale in the site file to one, such as 1.0"
        )
    return seconds * scale
