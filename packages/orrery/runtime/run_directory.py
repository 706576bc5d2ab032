"""Name the paths of a run's directory, and manage its layout, attempts and checkpoints.

- A run whose layout file differs from LAYOUT is refused, not migrated.
- Each start of a stage is an attempt k of the run. It begins with an exclusive mkdir of
  `attempts/<k>/`, so launchers never share an attempt.
- Only attempt k writes `checkpoints/[sft/]step_<n>.attempt_<k>/`, so leftover processes never
  change a newer attempt's checkpoints.
"""

import hashlib
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from orrery.manifest.errors import OrreryError
from orrery.manifest.json_file import read_regular
from orrery.manifest.publish import make_folder, sync, write_atomic

LAYOUT = 2
LAYOUT_FILE = "layout"
ATTEMPTS = "attempts"
COMPLETE = "COMPLETE"
MANIFEST = "manifest.json"
STATUS = "status.json"
SITE_FILE = "site.json"
LOCK = ".lock"
ADOPTED = "adopted.json"  # the run that this run continues (`orrery adopt`)
STAGES, WEIGHTS, WIRE = "stages", "weights", "wire"
_CHECKPOINT = re.compile(r"step_(?P<step>[0-9]+)\.attempt_(?P<attempt>[0-9]+)")


# Paths


def stage_dir(run_dir: Path, stage: str) -> Path:
    return Path(run_dir) / STAGES / stage


def done_path(run_dir: Path, stage: str) -> Path:
    return stage_dir(run_dir, stage) / "DONE"  # the launcher writes this file last


def inputs_path(run_dir: Path, stage: str) -> Path:
    """Return the file that maps verified inputs to their digests."""
    return stage_dir(run_dir, stage) / "inputs.json"


def result_path(run_dir: Path, stage: str) -> Path:
    return stage_dir(run_dir, stage) / "result.json"


def endpoints_dir(run_dir: Path, stage: str) -> Path:
    return stage_dir(run_dir, stage) / "endpoints"


def health_dir(run_dir: Path, stage: str) -> Path:
    return stage_dir(run_dir, stage) / "health"


def fence_dir(run_dir: Path, stage: str) -> Path:
    """Return the folder of kill requests, `<process>.<attempt>.<restart number>`."""
    return stage_dir(run_dir, stage) / "fenced"


def request_path(run_dir: Path, stage: str) -> Path:
    """Return the marker that asks a stage to save and end."""
    return stage_dir(run_dir, stage) / "wind_down"


def no_requeue_path(run_dir: Path, stage: str) -> Path:
    """Return the marker that forbids requeuing a preempted job."""
    return stage_dir(run_dir, stage) / "stay"


def logs_dir(run_dir: Path) -> Path:
    return Path(run_dir) / "logs"


def log_path(run_dir: Path, process: str) -> Path:
    return logs_dir(run_dir) / f"{process}.log"


def flight_recorder_dir(run_dir: Path) -> Path:
    return logs_dir(run_dir) / "flight_recorder"


def metrics_dir(run_dir: Path) -> Path:
    return Path(run_dir) / "metrics"


def metrics_path(run_dir: Path, process: str) -> Path:
    return metrics_dir(run_dir) / f"{process}.jsonl"


def weights_path(run_dir: Path, name: str) -> Path:
    """Return a weights folder. `name`: a stage, `step_<n>` (export) or WIRE (policy versions)."""
    return Path(run_dir) / WEIGHTS / name


def rollouts_dir(run_dir: Path) -> Path:
    return Path(run_dir) / "rollouts"


def evaluated_path(run_dir: Path) -> Path:
    return rollouts_dir(run_dir) / "evaluate.jsonl"


def report_page(run_dir: Path) -> Path:
    return Path(run_dir) / "report" / "index.html"


def code_dir(run_dir: Path) -> Path:
    return Path(run_dir) / "code"


# Layout


def begin(run_dir: Path) -> None:
    make_folder(run_dir)
    sync(run_dir.parent)
    if not (run_dir / MANIFEST).exists():
        write_atomic(run_dir / LAYOUT_FILE, f"{LAYOUT}\n".encode())


def check_layout(run_dir: Path) -> None:
    file = run_dir / LAYOUT_FILE
    try:
        found = int(read_regular(file))
    except FileNotFoundError:
        found = 1  # layout 1 had no layout file
    except ValueError:
        raise OrreryError(
            f"{file}: not a number; write {LAYOUT} if this release began the run, or "
            f"{_anew(run_dir)}"
        ) from None
    if found != LAYOUT:
        which = "an older" if found < LAYOUT else "a newer"
        raise OrreryError(
            f"{run_dir}: {which} release of Orrery began this run (layout {found}, and this "
            f"release reads only layout {LAYOUT}); finish it with that release, or "
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


# Attempts


def begin_attempt(run_dir: Path) -> int:
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


# Checkpoints


class Checkpoint(NamedTuple):  # ordered by step, then attempt
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


# Shared memory and scratch folders

SHARED_MEMORY = Path("/dev/shm")
ENLARGE = f"enlarge it: `mount -o remount,size=... {SHARED_MEMORY}` (for a container: --shm-size)"


# environment variable: fsspec URL of the folder for checkpoint copies
CHECKPOINT_TARGET = "ORRERY_CHECKPOINT_TARGET"


def place(run_dir: Path) -> str:
    return hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:8]


def memory_prefix(run_dir: Path) -> str:
    """Return the prefix of a run's files in /dev/shm.

    The launcher removes these files before and after each stage.
    """
    return f"orrery-{run_dir.resolve().name.rpartition('-')[2]}-{place(run_dir)}-"


def saves_prefix(run_dir: Path) -> str:
    """Return the prefix of checkpoint copies in /dev/shm. They stay until saved to disk."""
    return f"{memory_prefix(run_dir).removesuffix('-')}.saves-"


def role_memory_prefix(run_dir: Path, name: str) -> str:
    return f"{memory_prefix(run_dir)}{name}-"


def remove_memory(name: str, root: Path = SHARED_MEMORY) -> list[Path]:
    """Remove files `*name*` in /dev/shm, and return their paths. Callers must close them first."""
    found = sorted(root.glob(f"*{name}*")) if root.exists() else []
    for path in found:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()
    return [path for path in found if not path.exists()]


def disk_prefix(run_dir: Path) -> str:
    """Return the prefix of the run's KV-cache folders.

    A new run in the same folder gets another prefix, because cache keys (policy versions) repeat.
    """
    manifest = (run_dir / MANIFEST).stat()
    which = f"{run_dir.resolve()} {manifest.st_ino} {manifest.st_mtime_ns}"
    return f"orrery-kv-{run_dir.name}-{hashlib.sha256(which.encode()).hexdigest()[:12]}-"


def disk_folder(run_dir: Path, stage: str) -> Path:
    return Path(tempfile.gettempdir()) / f"{disk_prefix(run_dir)}{stage}"


def start_prefix(run_dir: Path, engine: int | str | None = None) -> str:
    """Return a short prefix of engines' socket folders. Socket paths have at most 107 bytes."""
    return f"orrery-{place(run_dir)}-{'' if engine is None else f'{engine}-'}"


def remove_folders(prefix: str, root: Path) -> None:
    for path in root.glob(f"{prefix}*"):
        shutil.rmtree(path, ignore_errors=True)
