"""Runs by the word that a person types: a run's name (`reverse_text`) or its folder (`reverse_text-0123456789ab`)."""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from orrery.launcher import lock
from orrery.launcher.site import check_network, cluster, load_site
from orrery.launcher.slurm.allocation import INSIDE, allocation
from orrery.launcher.supervisor import Job, done_path
from orrery.manifest.check import nearest
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import id12, load, pretty_json, run_dir
from orrery.manifest.plan import plan, stage
from orrery.manifest.publish import write_atomic
from orrery.manifest.render import render_file
from orrery.manifest.schema import Manifest
from orrery.manifest.support import check_supported
from orrery.manifest.workspace import Workspace, find_workspace
from orrery.runtime.run_directory import begin, check_layout, has_layout

FOLDER = re.compile(r"(?P<name>[a-z0-9][a-z0-9_]*)-(?P<id12>[0-9a-f]{12})")


@dataclass(frozen=True)
class Run:
    """A manifest and where its run lives; the folder may not exist yet."""

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
    """Return every run folder that a launcher has worked in, newest first.

    Folders with other names are copies, and are skipped.
    """
    found = [
        path.parent
        for path in runs_root(workspace).glob("*/status.json")
        if FOLDER.fullmatch(path.parent.name)
    ]
    return sorted(found, key=lambda path: (path / "status.json").stat().st_mtime, reverse=True)


def find(word: str, workspace: Workspace | None = None) -> Run:
    """The run that `word` names; raises `OrreryError` with what there is."""
    workspace = workspace or find_workspace()
    word = Path(word).name if "/" in word else word
    folder = FOLDER.fullmatch(word)
    if folder is None:
        path = workspace.manifest_path(word)
        if not path.exists():
            names = sorted(path.stem for path in path.parent.glob("*.json"))
            near = nearest(word, names)
            hint = (
                f"did you mean {near!r}?"
                if near
                else f"the runs are {', '.join(names) or 'none yet; type `orrery render`'}"
            )
            raise OrreryError(f"run {word!r}: there is no {workspace.shown(path)}; {hint}")
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
            f"run {word!r}: {workspace.shown(checked_in)} is {manifest.name}-{id12(manifest)} now and {workspace.shown(path)} is gone; "
            f"type `orrery run {manifest.name} …` for the present one"
        )
    return Run(manifest, path)


def planned(word: str, workspace: Workspace) -> Run:
    """The run of a manifest by its path (`*.json`), which need not be one of `manifests/`, else as `find`."""
    if not word.endswith(".json"):
        return find(word, workspace)
    manifest = load(word)
    return Run(manifest, run_dir(runs_root(workspace), manifest))


def members(word: str, workspace: Workspace | None = None) -> list[Run]:
    """The runs of a group (`reverse_text_seeds`, a spec file of several runs), or the one run that `word` names."""
    workspace = workspace or find_workspace()
    spec = workspace.root / "jsonnet" / "runs" / f"{word}.jsonnet"
    if spec not in workspace.run_files or workspace.manifest_path(word).exists():
        return [find(word, workspace)]
    return [find(one.manifest.name, workspace) for one in render_file(workspace, spec)]


def _held(path: Path) -> Manifest | None:
    """Return the manifest in a run folder, or None.

    Raises `OrreryError` if the folder's name is another manifest's, or its layout is another
    release's.
    """
    file = path / "manifest.json"
    if not file.exists():
        return None
    check_layout(path)
    manifest = load(file)
    if run_dir(path.parent, manifest) != path:
        raise OrreryError(
            f"{file}: is of {run_dir('', manifest).name} by its hash: it was edited after the run began; "
            f"put it back, or remove {path.name} and start the run again"
        )
    return manifest


def job(word: str, stage_name: str, workspace: Workspace | None = None) -> Job:
    """The stage of a run, ready for `run_stage`: the run folder is made and holds its manifest."""
    workspace = workspace or find_workspace()
    run = find(word, workspace)
    stage_plan, site = stage(run.manifest, stage_name), load_site(workspace)
    check_supported(run.manifest)
    inside = (
        allocation(site, cluster(workspace), run.manifest.hardware, workspace)
        if INSIDE in os.environ
        else None
    )
    if inside is not None:
        check_network(site, stage_plan.num_nodes, f"{stage_name} of {run.manifest.name}")
    if inside is None and stage_plan.num_nodes > 1:
        raise OrreryError(
            f"hardware.num_nodes = {run.manifest.hardware.num_nodes}: {stage_name} needs {stage_plan.num_nodes} nodes and this is one; "
            f"type `snakemake --profile slurm {run.manifest.name}` on a cluster, or choose a hardware axis of one node"
        )
    lock_files = locks_of(run.manifest)
    lock_bytes = b"".join((workspace.root / file).read_bytes() for file in lock_files)
    if hashlib.sha256(lock_bytes).hexdigest() != run.manifest.python_lock_sha256:
        name = run.manifest.name
        adopt = (
            f" and `orrery adopt {name} {run.path.name}` to go on with it from here"
            if run.finished()
            else ""
        )
        raise OrreryError(
            f"{run.path.name}: {' + '.join(lock_files)} is not the lock that its manifest was rendered with; "
            f"type `orrery render {name}` for a run of the present lock{adopt}, or check the old lock out and type `make setup`"
        )
    begin(run.path)
    if not (run.path / "manifest.json").exists():
        write_atomic(run.path / "manifest.json", pretty_json(run.manifest).encode())
    sft = run.manifest.stages.sft
    num_steps = {"sft": sft.num_steps if sft else None, "rl": run.manifest.stages.rl.num_steps}.get(
        stage_name
    )
    num_devices = (
        None
        if run.manifest.hardware.accelerator == "cpu"
        else run.manifest.hardware.devices_per_node
    )
    resume = resume_command(run, stage_name, workspace, "slurm" if inside else "local")
    restarts = run.manifest.inference.max_restarts
    return Job(
        run.path,
        stage_plan,
        run.stages,
        num_devices,
        num_steps,
        resume,
        site,
        workspace,
        inside,
        restarts,
    )


def locks_of(manifest: Manifest) -> tuple[str, ...]:
    """The files whose bytes, one after another, `python_lock_sha256` is of, as jsonnet/lib/run.libsonnet has it."""
    if manifest.hardware.accelerator == "cpu":
        return ("locks/cpu.txt",)
    return "locks/orchestrator.txt", "locks/trainer.cuda.txt", "locks/inference.cuda.txt"


def resume_command(
    run: Run, stage_name: str, workspace: Workspace | None = None, profile: str = "local"
) -> str:
    """What goes on with the whole pipeline; `ORRERY_RESUME` is set by commands that wrap it (such as `make demo`)."""
    if given := os.environ.get("ORRERY_RESUME"):
        return given
    checked_in = (workspace or find_workspace()).manifest_path(run.manifest.name)
    if checked_in.exists() and load(checked_in) == run.manifest:
        return f"snakemake --profile {profile} {run.manifest.name}"
    return f"orrery run {run.path.name} {stage_name}"


def newest(workspace: Workspace) -> Path | None:
    """Return the run that works now, else the last one, of all that this release can read."""
    paths = list(filter(has_layout, all_runs(workspace)))
    return next(iter([path for path in paths if lock.holder(path) is not None] or paths), None)
