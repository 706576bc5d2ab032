"""Adoption: a run that begins where another stands, on other devices or in another layout.

- In: a run that has not begun, and one that nobody works on. Their manifests may differ in what says where and how work is done (`FREE`),
  not in what is learnt.
- Out: the run's folder with all that the other has of finished stages and whole checkpoints, and `adopted.json`; its next stage resumes
  there. The other run stays as it is.
- Weights, checkpoints and batches are never written over, so both folders name the same files where the file system allows it.
- The folder appears whole or not at all.
"""

import json
import os
import shutil
import socket
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from orrery.launcher import lock
from orrery.launcher import status as statuses
from orrery.launcher.receipt import ADOPTED
from orrery.launcher.runs import Run, resume_command
from orrery.launcher.supervisor import newest_checkpoint
from orrery.manifest.diff import diff
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import pretty_json
from orrery.manifest.publish import publish_folder, write_atomic
from orrery.runtime.run_directory import COMPLETE

FREE = ("name", "python_lock_sha256", "hardware", "trainer.mesh", "trainer.fsdp", "trainer.memory", "trainer.compile", "trainer.checkpoint",
        "inference", "orchestrator.admission", "orchestrator.keep_batches")  # fmt: skip
BOUND = ("inference.dtype", "inference.quantization", "inference.max_model_len_tokens")
LEFT = (
    "manifest.json",
    "status.json",
    lock.NAME,
    "report",
    "stages/report",
    "weights/wire",
)  # the other's own, or made anew


def adopt(run: Run, other: Run) -> str:
    """Make the folder of `run`, standing where `other` stands; says where that is. Raises OrreryError, and then makes nothing."""
    if run.path.exists():
        raise OrreryError(
            f"{run.path.name}: it has begun; only a run that has not can adopt another (remove runs/{run.path.name} to drop it)"
        )
    if not other.finished():
        raise OrreryError(
            f"{other.path.name}: no stage of it is done, so there is nothing to adopt; start {run.manifest.name} by itself"
        )
    if changed := [one for one in diff(other.manifest, run.manifest) if not _is_free(one.field)]:
        raise OrreryError(
            f"{run.path.name} would learn something else than {other.path.name}: {changed[0]}"
            f"{f' and {len(changed) - 1} fields more' if changed[1:] else ''}; only {', '.join(FREE)} may differ "
            f"(without {', '.join(BOUND)}): type `orrery diff {other.path.name} {run.manifest.name}` for all of them"
        )
    made = run.path.with_name(f".{run.path.name}.partial")
    with lock.hold(other.path), lock.hold(made):
        for left in made.iterdir():  # by one that was killed
            if left.name != lock.NAME:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        try:
            shutil.copytree(
                other.path,
                made,
                ignore=partial(_left, other.path),
                copy_function=partial(_same, other.path),
                dirs_exist_ok=True,
            )
            write_atomic(made / "manifest.json", pretty_json(run.manifest).encode())
            where = _stand(made, run, other)
            publish_folder(made, run.path)
        except BaseException as error:
            shutil.rmtree(made, ignore_errors=True)
            if isinstance(error, shutil.Error):  # of copytree: what failed of each file
                raise OrreryError(
                    f"{run.path.name}: nothing is adopted: {error.args[0][0][2]}"
                ) from error
            raise
    return where


def _stand(made: Path, run: Run, other: Run) -> str:
    """Write down in the new folder where it stands, and say it."""
    done = Run(run.manifest, made).finished()
    next_stage = next(stage for stage in run.stages if stage not in done)
    step = newest_checkpoint(made, next_stage)
    where = f"done: {', '.join(done)}; {next_stage} {'begins' if step is None else f'goes on after step {step}'}"
    checkpoint = None if step is None else {"stage": next_stage, "step": step}
    write_atomic(
        made / ADOPTED,
        (
            json.dumps({"run": other.path.name, "done": done, "checkpoint": checkpoint}) + "\n"
        ).encode(),
    )
    if (last := statuses.read(other.path)) is not None:  # keep only the time of its last work
        message = f"adopted from {other.path.name}: {where}; type `{resume_command(run, next_stage)}` to go on"
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
    """What stays behind: `LEFT`, and checkpoints that are not whole."""
    inside = Path(folder).relative_to(root)
    found = [name for name in names if (inside / name).as_posix() in LEFT]
    if inside.as_posix() in ("checkpoints", "checkpoints/sft"):
        found += [
            name
            for name in names
            if name != "sft" and not (root / inside / name / COMPLETE).exists()
        ]
    return found


def _same(root: Path, source: str, target: str) -> None:
    """The same file under another name where it is never written again and both names may stand for one file; else a copy of it."""
    inside = Path(source).relative_to(root)
    if inside.parts[0] in ("weights", "checkpoints") or (
        inside.parts[0] == "rollouts" and inside.suffix == ".safetensors"
    ):
        with suppress(OSError):
            os.link(source, target)
            return
    shutil.copy2(source, target)
