"""Find a run by name or folder (`reverse_text-0123456789ab`), read its status, and lock it.

If `status.json` says `running` but the lock (flock) is free, the launcher was killed.
"""

import fcntl
import json
import os
import re
import shlex
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from orrery.launcher.slurm import queue
from orrery.manifest.check import meant
from orrery.manifest.diff import diff
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import Workspace, find_workspace, id12, load, pretty_json, run_dir
from orrery.manifest.json_file import read_as, read_object
from orrery.manifest.plan import plan
from orrery.manifest.publish import publish_folder, write_atomic
from orrery.manifest.render import render, render_file
from orrery.manifest.schema import Manifest
from orrery.manifest.shards import check_held
from orrery.runtime.run_directory import (
    ADOPTED,
    COMPLETE,
    LOCK,
    MANIFEST,
    SITE_FILE,
    STAGES,
    STATUS,
    WEIGHTS,
    WIRE,
    begin,
    check_layout,
    done_path,
    has_layout,
    whole_checkpoints,
)

FOLDER = re.compile(r"(?P<name>[a-z0-9][a-z0-9_]*)-(?P<id12>[0-9a-f]{12})")


@dataclass(frozen=True)
class Run:
    manifest: Manifest
    path: Path

    @property
    def stages(self) -> tuple[str, ...]:
        return tuple(one.name for one in plan(self.manifest))

    def finished(self) -> list[str]:
        return [name for name in self.stages if done_path(self.path, name).exists()]


def runs_root(workspace: Workspace) -> Path:
    return workspace.root / "runs"


def all_runs(workspace: Workspace) -> list[Path]:
    paths = (path.parent for path in runs_root(workspace).glob(f"*/{STATUS}"))
    found = [path for path in paths if FOLDER.fullmatch(path.name)]
    return sorted(found, key=lambda path: (path / STATUS).stat().st_mtime, reverse=True)


def find(word: str, workspace: Workspace | None = None) -> Run:
    workspace = workspace or find_workspace()
    word = Path(word).name if "/" in word else word
    folder = FOLDER.fullmatch(word)
    if folder is None:
        path = workspace.manifest_path(word)
        if not path.exists():
            names = sorted(path.stem for path in path.parent.glob("*.json"))
            hint = meant(word, names) if names else "there are none yet"
            hint += " If not," if hint.endswith("?") else "."
            raise OrreryError(
                f"run {word!r}: {workspace.shown(path)} does not exist; {hint} `orrery render "
                f"{word}` writes it, if a spec has this run"
            )
        manifest = load(path)
        path = run_dir(runs_root(workspace), manifest)
        return Run(_held(path) or manifest, path)
    path = runs_root(workspace) / word
    if (held := _held(path)) is not None:
        return Run(held, path)
    checked_in = workspace.manifest_path(folder["name"])
    manifest = load(checked_in)
    if id12(manifest) != folder["id12"]:
        raise OrreryError(
            f"run {word!r}: {workspace.shown(path)} does not exist, and "
            f"{workspace.shown(checked_in)} now makes the run {manifest.name}-{id12(manifest)}. "
            f"Type `orrery run {manifest.name} …` for that run"
        )
    return Run(manifest, path)


def planned(word: str, workspace: Workspace) -> Run:
    if not word.endswith(".json"):
        return find(word, workspace)
    manifest = load(word)
    return Run(manifest, run_dir(runs_root(workspace), manifest))


def outdated(run: Run, workspace: Workspace) -> str | None:
    """Return a warning if the manifest in manifests/ differs from its spec, else None."""
    name = run.manifest.name
    path = workspace.shown(workspace.manifest_path(name))
    try:
        rendered = render(workspace, name)
    except OrreryError as error:
        return f"{path}: is older than its spec, which cannot be rendered now: {error}"
    if rendered.manifest == run.manifest:
        return None
    spec = workspace.shown(rendered.file)
    return f"{path}: differs from its spec {spec}. Type `orrery render {name}` to update it"


def members(word: str, workspace: Workspace | None = None) -> list[Run]:
    workspace = workspace or find_workspace()
    spec = workspace.root / "jsonnet" / "runs" / f"{word}.jsonnet"
    if spec not in workspace.run_files or workspace.manifest_path(word).exists():
        return [find(word, workspace)]
    return [find(one.manifest.name, workspace) for one in render_file(workspace, spec)]


def _held(path: Path) -> Manifest | None:
    """Return the manifest in run folder `path`, if any. Raise OrreryError if it was edited."""
    file = path / MANIFEST
    if not file.exists():
        return None
    check_layout(path)
    manifest = load(file)
    if run_dir(path.parent, manifest) != path:
        raise OrreryError(
            f"{file}: its hash is that of {run_dir('', manifest).name}, so it was edited. "
            f"Restore the file, or remove {path.name} and start the run again"
        )
    return manifest


LAST_PORT = 65_000  # highest port of a site, which also uses ports after it


def place_site(
    word: str,
    address: str,
    listen: str,
    name: str,
    certificates: Path,
    shard: int | None,
    rewinds: bool = False,
) -> None:
    run = find(word)
    if run.manifest.trainer.elastic is None and run.manifest.orchestrator.guests is None:
        raise OrreryError(
            f"trainer.elastic and orchestrator.guests: null in {run.manifest.name}, so it has one "
            f"site. Type `orrery run {word} STAGE`, or choose a run with an axis of jsonnet/elastic"
        )
    check_address("ADDRESS:PORT", address)
    if listen:
        check_address("--listen", listen)
    place = {"listen": listen, "join": address, "name": name, "shard": shard, "rewinds": rewinds}
    begin(run.path)
    text = json.dumps(place | {"certificates": str(certificates.resolve())})
    with hold_lock(run.path):
        write_atomic(run.path / SITE_FILE, text.encode())


def check_shard(word: str, shard: int) -> None:
    """Raise OrreryError if `shard` is too large, or its files are incomplete."""
    workspace = find_workspace()
    sft = find(word, workspace).manifest.stages.sft
    if sft is None or sft.data.kind != "text":
        return
    data = sft.data
    if shard >= data.num_shards:
        raise OrreryError(
            f"--shard {shard}: stages.sft.data.num_shards is {data.num_shards}. Type a shard from "
            f"0 to {data.num_shards - 1}"
        )
    if data.shard_by is None:
        return
    try:
        check_held(workspace.root / data.path, data.split, (shard, data.num_shards))
    except OrreryError as error:
        raise OrreryError(f"stages.sft.data.{error}") from error


def check_address(field: str, value: str) -> None:
    found = re.fullmatch(r"\S+:([0-9]{1,5})", value)
    if found is None or not 0 < int(found[1]) <= LAST_PORT:
        raise OrreryError(
            f"{field} {value!r}: is no address with a port from 1 to {LAST_PORT}. Type for example "
            "10.0.0.1:29400"
        )


def resume_command(
    run: Run, stage_name: str, workspace: Workspace | None = None, profile: str = "local"
) -> str:
    """Return the command that resumes the run. ORRERY_RESUME overrides it."""
    if given := os.environ.get("ORRERY_RESUME"):
        return given
    if stage_name in ("sft", "rl") and (run.path / SITE_FILE).is_file():
        return _join_command(run, stage_name)
    checked_in = (workspace or find_workspace()).manifest_path(run.manifest.name)
    if checked_in.exists() and load(checked_in) == run.manifest:
        return f"snakemake --profile {profile} {run.manifest.name}"
    return f"orrery run {run.path.name} {stage_name}"


def _join_command(run: Run, stage_name: str) -> str:
    """Return the `orrery join` command of the site's last start."""
    place = read_object(run.path / SITE_FILE, "type `orrery join` again")
    words = ["orrery join", run.path.name, place["join"]]
    for option, default in (("listen", ""), ("name", "site"), ("shard", None)):
        if place.get(option) != default:
            words.append(f"--{option} {place[option]}")
    if place["certificates"] != str(Path("certificates").resolve()):
        words.append(f"--certificates {shlex.quote(place['certificates'])}")
    return " ".join(words if stage_name == "sft" else [*words, f"--stage {stage_name}"])


def newest(workspace: Workspace) -> Path | None:
    paths = list(filter(has_layout, all_runs(workspace)))
    return next(iter([path for path in paths if lock_holder(path) is not None] or paths), None)


# Status and lock

State = Literal["running", "stopping", "done", "failed", "stopped"]
LOOKED_AT_S = 1.0  # maximum wait for the lock, which `lock_holder` takes for a moment


@dataclass
class RoleStatus:
    """`pid` is 0 under Slurm. `exit` is None while the process runs."""

    name: str
    node: str
    pid: int
    port: int
    cores: list[int] | None
    state: Literal["running", "ended"]
    exit: str | None = None
    restarts: int = 0


@dataclass
class Status:
    stage: str
    attempt: int
    state: State
    message: str
    launcher_pid: int
    host: str
    slurm_job: str | None
    started_s: float
    ended_s: float | None = None
    roles: list[RoleStatus] = field(default_factory=list)

    def write(self, run_dir: Path) -> None:
        write_atomic(run_dir / STATUS, (json.dumps(asdict(self), indent=1) + "\n").encode())


def read_status(run_dir: Path) -> Status | None:
    path = run_dir / STATUS
    if not os.path.lexists(path):
        return None
    return read_as(path, Status, "it is not a launcher's status; remove it and start the run again")


def launcher_died(run_dir: Path, status: Status) -> bool:
    if status.state not in ("running", "stopping"):
        return False
    if status.slurm_job is None or status.host == socket.gethostname():
        return lock_holder(run_dir) is None
    try:
        state = queue.slurm_states([status.slurm_job]).get(status.slurm_job)
        return state is None or queue.state_of(state, status.slurm_job) not in ("running", "ending")
    except OrreryError:
        return False  # without Slurm's answer, the launcher may still run


def newest_checkpoint(run_dir: Path, stage: str = "rl") -> int | None:
    if stage not in ("sft", "rl"):
        return None
    return max((one.step for one in whole_checkpoints(run_dir, stage)), default=None)


def _lock_path(run_dir: Path) -> Path:
    return run_dir / LOCK


@dataclass(frozen=True)
class Holder:
    host: str
    pid: int

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    def __str__(self) -> str:
        return f"pid {self.pid}" + ("" if self.is_here else f" on {self.host}")


@contextmanager
def hold_lock(run_dir: Path, within_s: float = LOOKED_AT_S) -> Iterator[None]:
    run_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(_lock_path(run_dir), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        limit_s = time.monotonic() + within_s
        while not _locked(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > limit_s:
                who = f" ({found})" if (found := lock_holder(run_dir)) else ""
                raise OrreryError(
                    f"{run_dir}: another launcher is running this run{who}. Type "
                    f"`orrery status {run_dir.name}` to watch it or `orrery stop {run_dir.name}` "
                    "to end it"
                )
            time.sleep(0.02)
        text = f"{socket.gethostname()} {os.getpid()} {_started(os.getpid())}\n"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_holder(run_dir: Path) -> Holder | None:
    """Return the lock's holder, or None if the lock is free or names no live launcher."""
    try:
        descriptor = os.open(_lock_path(run_dir), os.O_RDONLY | os.O_NONBLOCK)
    except (FileNotFoundError, PermissionError):
        return None
    try:
        if _locked(descriptor, fcntl.LOCK_SH):
            return None
        words = os.pread(descriptor, 400, 0).decode(errors="replace").split()
    finally:
        os.close(descriptor)
    try:
        found, started = Holder(words[0], int(words[1])), int(words[2])
        return found if not found.is_here or _started(found.pid) == started else None
    except (IndexError, ValueError, OSError):
        return None


def _started(pid: int) -> int:
    """Return the process's start time in clock ticks since boot."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


# Adoption

FREE = (
    "name", "python_lock_sha256", "hardware", "trainer.mesh", "trainer.fsdp", "trainer.memory",
    "trainer.compile", "trainer.checkpoint", "inference", "orchestrator.admission",
    "orchestrator.keep_batches",
)  # fmt: skip
BOUND = ("inference.dtype", "inference.quantization", "inference.max_model_len_tokens")
# `adopt` does not copy these
LEFT = (MANIFEST, STATUS, LOCK, "report", f"{STAGES}/report", f"{WEIGHTS}/{WIRE}")


def adopt(run: Run, other: Run) -> str:
    """Copy the state of `other` into a new folder for `run`.

    Raise OrreryError if their manifests differ outside FREE.
    """
    if run.path.exists():
        raise OrreryError(
            f"{run.path.name}: has already begun, and only a new run can adopt another. "
            f"Remove runs/{run.path.name} to begin anew"
        )
    if not other.finished():
        raise OrreryError(
            f"{other.path.name}: no stage is done, so it has no state to adopt. "
            f"Start {run.manifest.name} without it"
        )
    bound = _bound(other.manifest, run.manifest)
    differences = diff(other.manifest, run.manifest)
    if changed := [one for one in differences if not _is_free(one.field, bound)]:
        more = f" and {len(changed) - 1} fields more" if changed[1:] else ""
        raise OrreryError(
            f"{run.path.name} would learn differently from {other.path.name}: "
            f"{changed[0]}{more}. "
            f"Only {', '.join(FREE)} may differ (except {', '.join(bound)}): "
            f"type `orrery diff {other.path.name} {run.manifest.name}` for all differences"
        )
    made = run.path.with_name(f".{run.path.name}.partial")
    with hold_lock(other.path), hold_lock(made):
        for left in made.iterdir():  # a killed process left these files
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
            if isinstance(error, shutil.Error):  # copytree collected one error per file
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
    if (last := read_status(other.path)) is not None:
        command = resume_command(run, next_stage)
        message = f"adopted from {other.path.name}: {where}; type `{command}` to go on"
        replace(
            last, stage=next_stage, state="stopped", message=message, launcher_pid=os.getpid(),
            host=socket.gethostname(), slurm_job=None, roles=[],
        ).write(made)  # fmt: skip
    return where


def _bound(before: Manifest, after: Manifest) -> tuple[str, ...]:
    """Return the exceptions to FREE: fields that may not differ, because they affect learning."""
    sft, elastic, found = after.stages.sft, after.trainer.elastic, list(BOUND)
    if sft is not None and before.max_text_tokens != after.max_text_tokens:
        data = (sft.data, sft.validation.data) if sft.validation else (sft.data,)
        if any(each.kind == "text" for each in data):
            found.append("trainer.memory.max_tokens_per_micro_batch")
    # Exchanges at checkpoints have no delay, so the interval affects learning.
    if elastic is not None and elastic.delay_steps:
        found.append("trainer.checkpoint.interval_steps")
    return tuple(found)


def _is_free(field: str, bound: tuple[str, ...]) -> bool:
    def under(names: tuple[str, ...]) -> bool:
        return any(field == name or field.startswith((f"{name}.", f"{name}[")) for name in names)

    return under(FREE) and not under(bound)


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
