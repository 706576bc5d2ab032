"""Adopt another run's state, on other devices or in another layout.

The manifests may differ only in fields under FREE and not under BOUND.
"""

import json
import os
import shutil
import socket
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from orrery.launcher import status as statuses
from orrery.launcher.runs import Run, resume_command
from orrery.launcher.status import hold_lock, newest_checkpoint
from orrery.manifest.diff import diff
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import pretty_json
from orrery.manifest.publish import publish_folder, write_atomic
from orrery.runtime.run_directory import (
    ADOPTED,
    COMPLETE,
    LOCK,
    MANIFEST,
    STAGES,
    STATUS,
    WEIGHTS,
    WIRE,
)

FREE = (
    "name", "python_lock_sha256", "hardware", "trainer.mesh", "trainer.fsdp", "trainer.memory",
    "trainer.compile", "trainer.checkpoint", "inference", "orchestrator.admission",
    "orchestrator.keep_batches",
)  # fmt: skip
BOUND = ("inference.dtype", "inference.quantization", "inference.max_model_len_tokens")
# Not copied: it describes the other run, or is written again.
LEFT = (MANIFEST, STATUS, LOCK, "report", f"{STAGES}/report", f"{WEIGHTS}/{WIRE}")


def adopt(run: Run, other: Run) -> str:
    """Create the folder of `run` from the state of `other`, by one rename.

    Raise OrreryError if `run` has begun or cannot adopt `other`.
    """
    if run.path.exists():
        raise OrreryError(
            f"{run.path.name}: has already begun, and only a new run can adopt another. "
            f"Remove runs/{run.path.name} to begin anew"
        )
    if not other.finished():
        raise OrreryError(
            f"{other.path.name}: none of its stages is done, so it has no state to adopt. "
            f"Start {run.manifest.name} without it"
        )
    if changed := [one for one in diff(other.manifest, run.manifest) if not _is_free(one.field)]:
        more = f" and {len(changed) - 1} fields more" if changed[1:] else ""
        raise OrreryError(
            f"{run.path.name} would learn something else than {other.path.name}: "
            f"{changed[0]}{more}. "
            f"Only {', '.join(FREE)} may differ (without {', '.join(BOUND)}): "
            f"type `orrery diff {other.path.name} {run.manifest.name}` for all of them"
        )
    made = run.path.with_name(f".{run.path.name}.partial")
    with hold_lock(other.path), hold_lock(made):
        for left in made.iterdir():  # left by a killed process
            if left.name != LOCK:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        try:
            shutil.copytree(
                other.path,
                made,
                ignore=partial(_left, other.path),
                copy_function=partial(_same, other.path),
                dirs_exist_ok=True,
            )
            write_atomic(made / MANIFEST, pretty_json(run.manifest).encode())
            where = _stand(made, run, other)
            publish_folder(made, run.path)
        except BaseException as error:
            shutil.rmtree(made, ignore_errors=True)
            if isinstance(error, shutil.Error):  # copytree has an error per file
                why = error.args[0][0][2]
                raise OrreryError(f"{run.path.name}: cannot adopt the other run: {why}") from error
            raise
    return where


def _stand(made: Path, run: Run, other: Run) -> str:
    done = Run(run.manifest, made).finished()
    next_stage = next(stage for stage in run.stages if stage not in done)
    step = newest_checkpoint(made, next_stage)
    begins = "begins" if step is None else f"goes on after step {step}"
    where = f"done: {', '.join(done)}; {next_stage} {begins}"
    checkpoint = None if step is None else {"stage": next_stage, "step": step}
    row = {"run": other.path.name, "done": done, "checkpoint": checkpoint}
    write_atomic(made / ADOPTED, (json.dumps(row) + "\n").encode())
    if (last := statuses.read(other.path)) is not None:
        command = resume_command(run, next_stage)
        message = f"adopted from {other.path.name}: {where}; type `{command}` to go on"
        replace(
            last, stage=next_stage, state="stopped", message=message, launcher_pid=os.getpid(),
            host=socket.gethostname(), slurm_job=None, roles=[],
        ).write(made)  # fmt: skip
    return where


def _is_free(field: str) -> bool:
    def under(names: tuple[str, ...]) -> bool:
        return any(field == name or field.startswith((f"{name}.", f"{name}[")) for name in names)

    return under(FREE) and not under(BOUND)


def _left(root: Path, folder: str, names: list[str]) -> list[str]:
    inside = Path(folder).relative_to(root)
    found = [name for name in names if (inside / name).as_posix() in LEFT]
    if inside.as_posix() in ("checkpoints", "checkpoints/sft"):
        steps = [name for name in names if name != "sft"]
        found += [name for name in steps if not (root / inside / name / COMPLETE).exists()]
    return found


def _same(root: Path, source: str, target: str) -> None:
    inside = Path(source).relative_to(root)
    if inside.parts[0] in ("weights", "checkpoints") or (
        inside.parts[0] == "rollouts" and inside.suffix == ".safetensors"
    ):
        with suppress(OSError):
            os.link(source, target)
            return
    shutil.copy2(source, target)
