"""The pipeline's view of the checked-in runs, for the Snakefile: which stages, in which order, under which target.

- Refuses with one sentence when a checked-in manifest is not what its spec renders to now: what runs is what was reviewed.
"""

from dataclasses import dataclass

from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import pretty_json, run_dir
from orrery.manifest.plan import plan
from orrery.manifest.render import render_all
from orrery.manifest.workspace import Workspace, find_workspace


@dataclass(frozen=True)
class Pipeline:
    """Run folders by target (a run's name, or a spec file's stem for all of its runs); the stages before a (folder, stage)."""

    folders: dict[str, list[str]]
    after: dict[tuple[str, str], tuple[str, ...]]

    def before(self, run: str, stage: str) -> list[str]:
        """The markers that `stage` of the run folder `run` waits for."""
        return [f"runs/{run}/stages/{one}/DONE" for one in self.after[run, stage]]


def checked_in(workspace: Workspace | None = None) -> Pipeline:
    """Every checked-in run; raises `OrreryError` for a manifest that is missing or stale."""
    workspace = workspace or find_workspace()
    targets: dict[str, list[str]] = {}
    groups: dict[str, list[str]] = {}
    after: dict[tuple[str, str], tuple[str, ...]] = {}
    for run in render_all(workspace):
        name, path = run.manifest.name, workspace.manifest_path(run.manifest.name)
        if not path.is_file() or path.read_text(encoding="utf-8") != pretty_json(run.manifest):
            state = "differs from what its spec renders to now" if path.is_file() else "is missing"
            raise OrreryError(
                f"{workspace.shown(path)}: {state} ({workspace.shown(run.file)}); type `orrery render {name}` and review the change"
            )
        folder = run_dir(".", run.manifest).name
        targets[name] = [folder]
        groups.setdefault(run.file.stem, []).append(folder)
        for stage in plan(run.manifest):
            after[folder, stage.name] = stage.after
    return Pipeline({**groups, **targets}, after)
