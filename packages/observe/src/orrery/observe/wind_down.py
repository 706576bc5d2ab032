"""Wind-down: an RL stage that is asked to end soon writes a checkpoint of where it is, and goes on from there next time.

- In: the file `stages/<stage>/wind_down`, which the launcher writes when its time is nearly over.
- Out: processes that run to their own end leave with exit code WOUND_DOWN; it is neither a failure nor the stage's end.
- The orchestrator alone looks at the file; the trainer's ranks hear of it over the rollout wire, all at the same step.
- Other stages take no notice: they are short, or go on from their checkpoints (SFT) without it.
"""

import os
from pathlib import Path

WOUND_DOWN = 75  # EX_TEMPFAIL of sysexits.h: try again later
STAGES = ("rl",)
NAME = "wind_down"


class WoundDown(Exception):
    """This process has wound down: a resumed run goes on after batch `step`; 0 where none was trained."""

    def __init__(self, step: int):
        super().__init__(f"wound down at step {step}")
        self.step = step


def path(run_dir: Path, stage: str) -> Path:
    """The file that asks for it."""
    return Path(run_dir) / "stages" / stage / NAME


def is_asked(run_dir: Path, stage: str) -> bool:
    """Whether `stage` is to wind down."""
    if stage not in STAGES:
        return False
    file = path(run_dir, stage)
    try:
        return file.name in os.listdir(
            file.parent
        )  # a listing: a network file system may remember for long that a name was not there
    except FileNotFoundError:
        return False
