"""A run's directory: its paths, the version of its layout, its attempts, and its checkpoints.

- Every file's name stands here. `<process>` is `trainer.0`.
- `layout` holds LAYOUT. A folder of another layout is refused, never migrated.
- An attempt first makes the folder `attempts/<k>/`. mkdir is exclusive, and the folder is synced,
  so two launchers have distinct attempts.
- Only attempt k writes `checkpoints/[sft/]step_<n>.attempt_<k>/`. A process left on an unreachable
  node writes elsewhere.
- A run resumes from the newest complete step.
"""

import os
import re
from pathlib import Path
from typing import NamedTuple

from orrery.manifest.errors import OrreryError
from orrery.manifest.json_file import read_regular
from orrery.manifest.publish import make_folder, sync, write_atomic

LAYOUT = 2
LAYOUT_FILE = "layout"
ATTEMPTS = "attempts"
COMPLETE = "COMPLETE"  # the marker of a whole checkpoint
MANIFEST = "manifest.json"
STATUS = "status.json"
LOCK = ".lock"
ADOPTED = "adopted.json"  # the state that `orrery adopt` copied
STAGES, WEIGHTS, WIRE = "stages", "weights", "wire"
_CHECKPOINT = re.compile(r"step_(?P<step>[0-9]+)\.attempt_(?P<attempt>[0-9]+)")


# Paths --------------------------------------------------------------------------------------------


def stage_dir(run_dir: Path, stage: str) -> Path:
    return Path(run_dir) / STAGES / stage


def done_path(run_dir: Path, stage: str) -> Path:
    """Return the marker of a finished stage, which is written last."""
    return stage_dir(run_dir, stage) / "DONE"


def inputs_path(run_dir: Path, stage: str) -> Path:
    """Return the file with a stage's verified inputs: {path: sha256}."""
    return stage_dir(run_dir, stage) / "inputs.json"


def result_path(run_dir: Path, stage: str) -> Path:
    return stage_dir(run_dir, stage) / "result.json"


def endpoints_dir(run_dir: Path, stage: str) -> Path:
    return stage_dir(run_dir, stage) / "endpoints"


def health_dir(run_dir: Path, stage: str) -> Path:
    return stage_dir(run_dir, stage) / "health"


def fence_dir(run_dir: Path, stage: str) -> Path:
    """Return the folder of `<process>.<attempt>.<incarnation>`, the engines to end."""
    return stage_dir(run_dir, stage) / "fenced"


def request_path(run_dir: Path, stage: str) -> Path:
    """Return the marker that asks a stage for a checkpoint and its end."""
    return stage_dir(run_dir, stage) / "wind_down"


def no_requeue_path(run_dir: Path, stage: str) -> Path:
    """Return the marker that keeps a preempted job out of the queue."""
    return stage_dir(run_dir, stage) / "stay"


def logs_dir(run_dir: Path) -> Path:
    return Path(run_dir) / "logs"


def log_path(run_dir: Path, process: str) -> Path:
    return logs_dir(run_dir) / f"{process}.log"


def flight_recorder_dir(run_dir: Path) -> Path:
    """Return the folder of `rank_<n>`, which torch writes."""
    return logs_dir(run_dir) / "flight_recorder"


def metrics_dir(run_dir: Path) -> Path:
    return Path(run_dir) / "metrics"


def metrics_path(run_dir: Path, process: str) -> Path:
    return metrics_dir(run_dir) / f"{process}.jsonl"


def weights_path(run_dir: Path, name: str) -> Path:
    """Return the weights of stage `name`, an exported step (`step_<n>`), or WIRE's versions."""
    return Path(run_dir) / WEIGHTS / name


def rollouts_dir(run_dir: Path) -> Path:
    return Path(run_dir) / "rollouts"


def evaluated_path(run_dir: Path) -> Path:
    return rollouts_dir(run_dir) / "evaluate.jsonl"


def report_page(run_dir: Path) -> Path:
    return Path(run_dir) / "report" / "index.html"


def code_dir(run_dir: Path) -> Path:
    """Return the folder of the code's snapshots, by digest."""
    return Path(run_dir) / "code"


# Layout -------------------------------------------------------------------------------------------


def begin(run_dir: Path) -> None:
    """Make the folder of a new run, with its layout. Keep an existing folder."""
    make_folder(run_dir)
    sync(run_dir.parent)  # Snakemake makes the folder first
    if not (run_dir / MANIFEST).exists():
        write_atomic(run_dir / LAYOUT_FILE, f"{LAYOUT}\n".encode())


def check_layout(run_dir: Path) -> None:
    """Raise OrreryError if a run's folder has another layout."""
    file = run_dir / LAYOUT_FILE
    try:
        found = int(read_regular(file))
    except FileNotFoundError:
        found = 1  # the first layout had no layout file
    except ValueError:
        raise OrreryError(
            f"{file}: does not hold a number; write {LAYOUT} if this release began the run, else "
            f"{_anew(run_dir)}"
        ) from None
    if found != LAYOUT:
        which = "an older" if found < LAYOUT else "a newer"
        raise OrreryError(
            f"{run_dir}: {which} release of Orrery began this run (layout {found}, and this "
            f"release reads layout {LAYOUT} alone); finish it with that release, or "
            f"{_anew(run_dir)}"
        )


def has_layout(run_dir: Path) -> bool:
    try:
        check_layout(run_dir)
    except OrreryError:
        return False
    return True


def _anew(run_dir: Path) -> str:
    aside = run_dir.with_name(f".{run_dir.name}")
    return f"type `mv {run_dir} {aside}` and start the run again to begin anew"


# Attempts -----------------------------------------------------------------------------------------


def begin_attempt(run_dir: Path) -> int:
    """Claim the next attempt's number, from 1. The claim is durable and unique."""
    folder = run_dir / ATTEMPTS
    make_folder(folder)
    number = last_attempt(run_dir) + 1
    while True:
        try:
            os.mkdir(folder / str(number))
        except FileExistsError:
            number += 1
            continue
        sync(folder)
        return number


def last_attempt(run_dir: Path) -> int:
    folder = run_dir / ATTEMPTS
    return max((int(path.name) for path in folder.glob("*") if path.name.isdecimal()), default=0)


# Checkpoints --------------------------------------------------------------------------------------


class Checkpoint(NamedTuple):
    """One attempt's checkpoint of a step, ordered by step, then by attempt."""

    step: int
    attempt: int

    @property
    def name(self) -> str:
        return f"step_{self.step}.attempt_{self.attempt}"


def checkpoints_dir(run_dir: Path, stage: str = "rl") -> Path:
    folder = Path(run_dir) / "checkpoints"
    return folder if stage == "rl" else folder / stage


def checkpoint_named(name: str) -> Checkpoint | None:
    found = _CHECKPOINT.fullmatch(name)
    return Checkpoint(int(found["step"]), int(found["attempt"])) if found else None


def whole_checkpoints(run_dir: Path, stage: str = "rl") -> list[Checkpoint]:
    found = (
        checkpoint_named(path.parent.name)
        for path in checkpoints_dir(run_dir, stage).glob(f"step_*/{COMPLETE}")
    )
    return sorted(one for one in found if one is not None)
