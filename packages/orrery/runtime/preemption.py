"""Stop a stage at a checkpoint before its job ends, and end single engines.

- Preemption: the launcher writes `stages/<stage>/wind_down` when the job's time is nearly over.
  The orchestrator alone reads it. Trainer ranks get the request over the rollout wire, all at the
  same step. Then every process raises `Preempted` and exits with EXIT_PREEMPTED, which is neither
  a failure nor the end of the stage.
- Only stages in STAGES are preempted. Others are short, or resume from their own checkpoints.
- Fence: the orchestrator writes `stages/<stage>/fenced/<name>.<attempt>.<incarnation>` if an
  engine does not answer. The launcher kills that incarnation, and may start the next.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from orrery.manifest.publish import write_atomic

EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: try again later
STAGES = ("rl",)
NAME = "wind_down"


class Preempted(Exception):
    """The stage stopped after batch `step` (0: before the first batch) and can be resumed."""

    def __init__(self, step: int):
        super().__init__(f"wound down at step {step}")
        self.step = step


def request_path(run_dir: Path, stage: str) -> Path:
    return Path(run_dir) / "stages" / stage / NAME


def is_requested(run_dir: Path, stage: str) -> bool:
    if stage not in STAGES:
        return False
    file = request_path(run_dir, stage)
    try:
        return file.name in os.listdir(file.parent)  # NFS caches that a single name was missing
    except FileNotFoundError:
        return False


@dataclass(frozen=True)
class Fenced:
    """Incarnation `incarnation` of process `name` (`inference.1`) must end, because of `why`."""

    name: str
    incarnation: int
    why: str


def fence_dir(run_dir: Path, stage: str) -> Path:
    return Path(run_dir) / "stages" / stage / "fenced"


def fence(run_dir: Path, stage: str, attempt: int, name: str, incarnation: int, why: str) -> None:
    """Request that the launcher end this incarnation."""
    folder = fence_dir(run_dir, stage)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{name}.{attempt}.{incarnation}", why.encode())


def fenced(run_dir: Path, stage: str, attempt: int) -> list[Fenced]:
    """Return the open requests of this attempt."""
    found = []
    folder = fence_dir(run_dir, stage)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        name, _, numbers = path.name.rpartition(f".{attempt}.")
        if name and not path.name.startswith(".") and numbers.isdigit():
            found.append(Fenced(name, int(numbers), path.read_text()))
    return found


def forget_fence(run_dir: Path, stage: str, attempt: int, one: Fenced) -> None:
    """Remove a request whose incarnation has ended."""
    (fence_dir(run_dir, stage) / f"{one.name}.{attempt}.{one.incarnation}").unlink(missing_ok=True)
