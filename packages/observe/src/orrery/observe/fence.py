"""Fence: a process that nobody asks any more, and that is to be ended so that it can be started again.

- In: the orchestrator's `ask`, when an engine does not answer as it should; it may be dead, hang, or hold weights that are nobody's.
- Out: a file in `stages/<stage>/fenced/`, which the launcher looks for: what still runs under that name it kills, and counts as ended.
- A file carries attempt and incarnation: what was asked of one incarnation is never done to the next.
- What has been done is forgotten, so that a look is over what is new. A launcher that dies before that leaves a file of its own attempt,
  and the next one begins with an empty folder.
"""

from dataclasses import dataclass
from pathlib import Path

from orrery.manifest.publish import write_atomic


@dataclass(frozen=True)
class Fenced:
    """Incarnation `incarnation` of process `name` (`inference.1`), and why."""

    name: str
    incarnation: int
    why: str


def fence_dir(run_dir: Path, stage: str) -> Path:
    return Path(run_dir) / "stages" / stage / "fenced"


def ask(run_dir: Path, stage: str, attempt: int, name: str, incarnation: int, why: str) -> None:
    """Have the launcher end this incarnation."""
    folder = fence_dir(run_dir, stage)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{name}.{attempt}.{incarnation}", why.encode())


def asked(run_dir: Path, stage: str, attempt: int) -> list[Fenced]:
    """All that was asked in this attempt and is not forgotten."""
    found = []
    folder = fence_dir(run_dir, stage)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        name, _, numbers = path.name.rpartition(f".{attempt}.")
        if name and not path.name.startswith(".") and numbers.isdigit():
            found.append(Fenced(name, int(numbers), path.read_text()))
    return found


def forget(run_dir: Path, stage: str, attempt: int, one: Fenced) -> None:
    """It is done, or that incarnation has gone by itself."""
    (fence_dir(run_dir, stage) / f"{one.name}.{attempt}.{one.incarnation}").unlink(missing_ok=True)
