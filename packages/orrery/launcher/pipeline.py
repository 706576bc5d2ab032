"""The checked-in runs for the Snakefile: targets, stages, their order and their submission.

A checked-in manifest that differs from its rendered spec is an OrreryError.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from orrery.launcher.describe_plan import describe_stage
from orrery.launcher.site import Site, cluster, load_site
from orrery.launcher.slurm.job_script import sbatch_options
from orrery.manifest import plan as plans
from orrery.manifest.check import nearest
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import pretty_json, run_dir
from orrery.manifest.render import Rendered, render_all, render_file
from orrery.manifest.schema import Manifest
from orrery.manifest.workspace import Workspace, find_workspace
from orrery.runtime.run_directory import done_path

STAGES = get_args(plans.StageName)
RUNS = Path("runs")
MARKER = re.compile(str(done_path(RUNS / "(?P<run>[^/]+)", "(?P<stage>[^/]+)")))


@dataclass(frozen=True)
class Pipeline:
    """The checked-in runs.

    - `folders`: run folders by target (a run's name or a spec file's stem).
    - `manifests`: by run folder.
    - `broken`: a sentence for each spec file that does not render.
    """

    folders: dict[str, list[str]]
    manifests: dict[str, Manifest]
    broken: list[str]
    workspace: Workspace
    site: Site

    def check_targets(self, targets: Iterable[str]) -> None:
        """Raise `OrreryError` if a target is not a run, a group of runs or a marker."""
        for target in sorted({*targets} - {*self.folders}):
            marker = MARKER.fullmatch(os.path.normpath(target))
            if marker is None:
                hint = _near(target, self.folders, "`ls manifests jsonnet/runs` shows all names")
                raise OrreryError(
                    f"run {target!r}: no run, and no group of runs, has this name; {hint}"
                )
            run, stage = marker["run"], marker["stage"]
            if run not in self.manifests:
                hint = _near(run, self.manifests, "type a run's name in place of the path")
                raise OrreryError(
                    f"target {target}: no checked-in manifest has the run folder {run!r}; {hint}"
                )
            stages = [one.name for one in plans.plan(self.manifests[run])]
            if stage not in stages:
                raise OrreryError(
                    f"target {target}: this run has no stage {stage!r}; "
                    f"choose from {', '.join(stages)}"
                )

    def before(self, run: str, stage: str) -> list[str]:
        after = plans.stage(self.manifests[run], stage).after
        return [str(done_path(RUNS / run, one)) for one in after]

    def no_slurm(self) -> str:
        try:
            cluster(self.workspace)
        except OrreryError as error:
            return f"note: no submission is shown: {error}"
        return ""

    def sbatch(self, run: str, stage: str) -> str:
        if self.site.slurm is None:
            return ""
        manifest = self.manifests[run]
        return sbatch_options(manifest.hardware, plans.stage(manifest, stage), self.site.slurm)

    def describe(self, run: str, stage: str) -> str:
        return "\n".join(describe_stage(self.manifests[run], stage, self.site, self.workspace))


def _rendered(workspace: Workspace) -> tuple[list[Rendered], list[str]]:
    try:
        return render_all(workspace), []
    except OrreryError as error:
        first = error
    whole, broken = [], []
    for path in workspace.run_files:
        try:
            render_file(workspace, path)
            whole.append(path)
        except OrreryError as error:
            broken.append(str(error))
    if not broken:  # each file renders alone: two files name one run
        raise first
    return render_all(workspace, whole), broken


def targets_of(argv: Sequence[str]) -> list[str]:
    """Return the command line's targets. `workflow` does not have them yet."""
    from snakemake.cli import get_argument_parser

    if "snakemake" not in argv[0]:
        return []
    return list(get_argument_parser().parse_args(argv[1:]).targets)


def _near(name: str, known: Iterable[str], otherwise: str) -> str:
    near = nearest(name, list(known))
    return f"did you mean {near!r}?" if near else otherwise


def checked_in(workspace: Workspace | None = None) -> Pipeline:
    """Return all checked-in runs. Raise OrreryError for a missing or stale manifest."""
    workspace = workspace or find_workspace()
    targets: dict[str, list[str]] = {}
    groups: dict[str, list[str]] = {}
    manifests: dict[str, Manifest] = {}
    rendered, broken = _rendered(workspace)
    for run in rendered:
        name, path = run.manifest.name, workspace.manifest_path(run.manifest.name)
        if not path.is_file() or path.read_bytes() != pretty_json(run.manifest).encode():
            state = "differs from what its spec renders to now" if path.is_file() else "is missing"
            raise OrreryError(
                f"{workspace.shown(path)}: {state} ({workspace.shown(run.file)}); "
                f"type `orrery render {name}` and review the change"
            )
        folder = run_dir(".", run.manifest).name
        targets[name] = [folder]
        groups.setdefault(run.file.stem, []).append(folder)
        manifests[folder] = run.manifest
    return Pipeline({**groups, **targets}, manifests, broken, workspace, load_site(workspace))
