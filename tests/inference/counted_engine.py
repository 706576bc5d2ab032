"""An engine that counts its steps and computed tokens: `python -m counted_engine`.

vLLM's metrics lack both. A preempted request's tokens count each time. The two numbers are in the
run directory's file `scheduled`.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from orrery.inference import __main__
from orrery.inference.patches import registry

correct = registry.correct_server


def scheduled(run_dir: Path) -> np.ndarray:
    """i64 [2], shared with the engine: steps, tokens."""
    path = run_dir / "scheduled"
    return np.memmap(path, np.int64, "r+" if path.exists() else "w+", shape=(2,))


def correct_and_count(manifest: Any) -> None:
    """Before the engine core is forked off."""
    correct(manifest)
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule, counts = (
        Scheduler.schedule,
        scheduled(Path(sys.argv[sys.argv.index("--run-dir") + 1])),
    )

    def schedule_and_count(self: Any, *args: Any, **options: Any) -> Any:
        step = schedule(self, *args, **options)
        counts[:] += (step.total_num_scheduled_tokens > 0, step.total_num_scheduled_tokens)
        return step

    Scheduler.schedule = schedule_and_count


if __name__ == "__main__":
    registry.correct_server = correct_and_count
    __main__.main()
