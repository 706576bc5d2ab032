"""Stop a stage at a checkpoint before its job's time limit, and end single engines.

- Preemption: near the limit, the launcher writes `stages/<stage>/wind_down`. The orchestrator then
  stops all trainer ranks at one step.
- Fence: for an unresponsive engine, the orchestrator writes
  `stages/<stage>/fenced/<name>.<attempt>.<restarts>`, and the launcher kills that process.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from orrery.manifest.publish import write_atomic
from orrery.runtime.run_directory import fence_dir, request_path

EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h
STAGES = ("rl",)


class Preempted(Exception):
    """The stage stopped after batch `step` (0: before the first batch) and can resume."""

    def __init__(self, step: int):
        super().__init__(f"wound down at step {step}")
        self.step = step


def is_requested(run_dir: Path, stage: str) -> bool:
    if stage not in STAGES:
        return False
    file = request_path(run_dir, stage)
    try:
        return file.name in os.listdir(file.parent)  # `exists` may be stale on NFS
    except FileNotFoundError:
        return False


@dataclass(frozen=True)
class Fenced:
    """A request to kill process `name`, such as `inference.1`."""

    name: str
    incarnation: int
    why: str


def fence(run_dir: Path, stage: str, attempt: int, name: str, incarnation: int, why: str) -> None:
    folder = fence_dir(run_dir, stage)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{name}.{attempt}.{incarnation}", why.encode())


def fenced(run_dir: Path, stage: str, attempt: int) -> list[Fenced]:
    found = []
    folder = fence_dir(run_dir, stage)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        name, _, numbers = path.name.rpartition(f".{attempt}.")
        if name and not path.name.startswith(".") and numbers.isdigit():
            found.append(Fenced(name, int(numbers), path.read_text()))
    return found


def forget_fence(run_dir: Path, stage: str, attempt: int, one: Fenced) -> None:
    (fence_dir(run_dir, stage) / f"{one.name}.{attempt}.{one.incarnation}").unlink(missing_ok=True)
