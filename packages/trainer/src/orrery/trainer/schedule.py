"""Learning-rate schedules as pure functions: `factor(schedule, step, num_steps)` multiplies the optimizer's `lr` at optimizer step `step`.

- Steps count from 1; the last is `num_steps`. Warm-up is linear and reaches 1 at step `warmup_steps`, so no step has rate 0 because of it.
- A decay starts from 1 at the end of what stands before it and reaches `final_fraction` exactly at `num_steps`.
- Pure: a resumed run computes the same factors, nothing is stored in checkpoints.
"""

import math
from collections.abc import Callable

from orrery.manifest.schema import (
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    Schedule,
    WsdSchedule,
)


def _constant(schedule: ConstantSchedule, step: int, num_steps: int) -> float:
    return 1.0


def _linear(schedule: LinearSchedule, step: int, num_steps: int) -> float:
    return _fall(schedule.final_fraction, _progress(step, schedule.warmup_steps, num_steps))


def _cosine(schedule: CosineSchedule, step: int, num_steps: int) -> float:
    cosine = 0.5 * (1.0 + math.cos(math.pi * _progress(step, schedule.warmup_steps, num_steps)))
    return schedule.final_fraction + (1.0 - schedule.final_fraction) * cosine


def _wsd(schedule: WsdSchedule, step: int, num_steps: int) -> float:
    decay_start = max(num_steps - schedule.decay_steps, schedule.warmup_steps)
    return _fall(schedule.final_fraction, _progress(step, decay_start, num_steps))


def _fall(final_fraction: float, progress: float) -> float:
    """A straight line from 1 to `final_fraction`, written so that both ends are exact."""
    return final_fraction + (1.0 - final_fraction) * (1.0 - progress)


def _progress(step: int, start: int, end: int) -> float:
    """How far `step` is on the way from `start` to `end`, in [0, 1]; an empty way has not begun."""
    return min(max((step - start) / (end - start), 0.0), 1.0) if end > start else 0.0


_SHAPES: dict[str, Callable[..., float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "wsd": _wsd,
}


def factor(schedule: Schedule, step: int, num_steps: int) -> float:
    """The share of the peak rate at `step` (1 … num_steps), in [0, 1]. A warm-up as long as the run never ends."""
    if step < schedule.warmup_steps:
        return step / schedule.warmup_steps
    return _SHAPES[schedule.kind](schedule, step, num_steps)
