"""The batches that were trained, kept in the run directory: `rollouts/step_<n>.safetensors`.

Each file holds one batch as columns, with a dict of JSON values beside them; it appears whole or not at all. `prune` keeps the newest ones
(`orchestrator.keep_batches`).
"""

from pathlib import Path
from typing import Any

from orrery.manifest.publish import make_folder
from orrery.transport import safetensors_columns
from orrery.transport.column_bytes import MicroBatch
from orrery.transport.columns import Columns


def batch_path(run_dir: Path, step: int) -> Path:
    return Path(run_dir) / "rollouts" / f"step_{step}.safetensors"


def write_batch(run_dir: Path, step: int, batch: MicroBatch, **info: Any) -> Path:
    """Keep batch `step` (one `Columns` or the documents it is made of); replaces an earlier attempt's."""
    path = batch_path(run_dir, step)
    make_folder(path.parent)
    safetensors_columns.write(path, batch, {"step": step, **info})
    return path


def read_batch(run_dir: Path, step: int) -> tuple[Columns, dict[str, Any]]:
    """(columns, info) of batch `step`, mapped from the file."""
    return safetensors_columns.read(batch_path(run_dir, step))


def prune(run_dir: Path, step: int, keep: int) -> None:
    """Once batch `step` is there: of it and those before it, keep the newest `keep`."""
    for old in steps(run_dir):
        if old <= step - keep:
            batch_path(run_dir, old).unlink(missing_ok=True)


def steps(run_dir: Path) -> list[int]:
    """The steps whose batches are kept, rising."""
    names = [
        path.stem.removeprefix("step_")
        for path in (Path(run_dir) / "rollouts").glob("step_*.safetensors")
    ]
    return sorted(int(name) for name in names if name.isdigit())
