"""The commands `render`, `check`, `show`, `diff`, `explain` and `hardware`."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from orrery.manifest.budget.options import format_value
from orrery.manifest.check import lookup, nearest, parse_path
from orrery.manifest.diff import RECEIPT, Receipt, diff_receipts, read_receipt
from orrery.manifest.diff import diff as differences
from orrery.manifest.errors import OrreryError
from orrery.manifest.explain import explain as explanations
from orrery.manifest.identity import (
    Workspace,
    canonical_json,
    find_workspace,
    id12,
    load,
    pretty_json,
    run_dir,
)
from orrery.manifest.json_file import read_object
from orrery.manifest.machine import Adapted, adapt, describe, this_machine, write_axis, write_run
from orrery.manifest.plan import notes, refusal
from orrery.manifest.render import Rendered, render_all, run_files, write
from orrery.manifest.render import render as render_run
from orrery.manifest.schema import Manifest

app = typer.Typer(
    help="Specs and manifests.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# `orrery.tasks.check` prints a line with this prefix per valid manifest.
FIRST_LINE = "tasks.train[0]: "
# imports of `orrery.tasks.check` that login nodes may lack
TASK_PACKAGES = ("numpy", "pyarrow", "reasoning_gym", "tokenizers")
NOTE = "  note: "
NAMES = "Names of runs. Default: all runs."
RUN = "A run's name, its folder, or the path of a manifest"
Names = Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", help=NAMES)]
Run = Annotated[str, typer.Argument(metavar="RUN", help=f"{RUN}.")]
Side = Annotated[str, typer.Argument(metavar="RUN", help=f"{RUN} or of a receipt.")]


@dataclass(frozen=True)
class Named:
    manifest: Manifest | None
    receipt: Receipt | None


def manifest_of(run: str) -> Manifest:
    if (folder := _folder(run)) is not None:
        return load(folder / "manifest.json")
    if run.endswith(".json") or "/" in run:
        return load(Path(run))
    return render_run(find_workspace(), run).manifest


def named(run: str) -> Named:
    path = Path(run)
    if path.is_file() and _is_receipt(path):
        beside = path.with_name("manifest.json")
        return Named(load(beside) if beside.is_file() else None, read_receipt(path))
    manifest, folder = manifest_of(run), _folder(run)
    if folder is None and not (run.endswith(".json") or "/" in run):
        folder = run_dir(find_workspace().root / "runs", manifest)
    if folder is None or not (folder / RECEIPT).is_file():
        return Named(manifest, None)
    return Named(manifest, read_receipt(folder / RECEIPT))


def _folder(run: str) -> Path | None:
    if (Path(run) / "manifest.json").is_file():
        return Path(run)
    if "/" in run or run.endswith(".json"):
        return None
    path = find_workspace().root / "runs" / run
    return path if (path / "manifest.json").is_file() else None


def _is_receipt(path: Path) -> bool:
    try:
        return path.name == RECEIPT or read_object(path, "").keys() == {"schema", "run", "stages"}
    except OrreryError:
        return False


def _chosen(names: list[str] | None) -> list[Rendered]:
    workspace = find_workspace()
    if not names:
        return render_all(workspace)
    return [render_run(workspace, name) for name in dict.fromkeys(names)]


def check_tasks(manifests: list[tuple[str, Manifest]]) -> list[str]:
    """Return the notes of `orrery.tasks.check` about (name, manifest) pairs.

    Raise OrreryError for the first invalid task. Skip the check if `TASK_PACKAGES` are missing.
    """
    if not manifests:
        return []
    if lacks := [name for name in TASK_PACKAGES if find_spec(name) is None]:
        return [f"{NOTE}the init stage checks the tasks, as this Python lacks {', '.join(lacks)}"]
    with tempfile.TemporaryDirectory(prefix="orrery-") as folder:
        paths = [Path(folder) / f"{number}.json" for number in range(len(manifests))]
        for path, (_, manifest) in zip(paths, manifests, strict=True):
            path.write_bytes(canonical_json(manifest))
        done = subprocess.run(
            [sys.executable, "-m", "orrery.tasks.check", *map(str, paths)],
            cwd=find_workspace().root,
            capture_output=True,
            text=True,
        )
    if done.returncode == 0:
        return [line for line in done.stdout.splitlines() if line.startswith(NOTE)]
    last = done.stderr.strip().rpartition("\n")[2] or f"it ended with code {done.returncode}"
    if not last.startswith("error: "):
        raise OrreryError(
            f"the check of tasks crashed ({last}). Type `orrery check RUN` for each run"
        )
    num_passed = sum(line.startswith(FIRST_LINE) for line in done.stdout.splitlines())
    raise OrreryError(f"{manifests[num_passed][0]}: {last.removeprefix('error: ')}")


def _spelled(run: Rendered) -> tuple[str, Manifest]:
    return f"{find_workspace().shown(run.file)}: {run.manifest.name}", run.manifest


def _must_start(word: str, manifest: Manifest) -> None:
    if (told := refusal(manifest)) is not None:
        raise OrreryError(f"{word}: {told}")


ON_THIS_MACHINE = "Write copies of the runs that fit this machine's GPUs (RUN_on_h100)."


@app.command()
def render(
    names: Names = None,
    on_this_machine: Annotated[
        bool, typer.Option("--on-this-machine", help=ON_THIS_MACHINE)
    ] = False,
) -> None:
    """Render runs to manifests/. Write nothing if a run is wrong."""
    workspace = find_workspace()

    def wrote(path: Path, changed: bool) -> None:
        print(f"{'wrote' if changed else 'kept '} {workspace.shown(path)}")

    if on_this_machine and not names:
        raise OrreryError(
            "--on-this-machine: needs a run. Type `orrery render RUN --on-this-machine`"
        )
    if on_this_machine:
        machine = this_machine()
        adapted = [adapt(workspace, name, machine) for name in dict.fromkeys(names or [])]
        for one in adapted:
            _must_start(f"{one.run.manifest.name}, not written", one.run.manifest)
    else:
        adapted = [Adapted(run, None, {}) for run in _chosen(names)]
    runs = [one.run for one in adapted]
    said = check_tasks([_spelled(run) for run in runs])
    for run, text, fitting in adapted:
        for field, value in fitting.items():
            print(f"set {field} to {format_value(value)}, so that {run.manifest.name} fits")
        if text is not None:
            write_run(workspace, run, text)
            wrote(run.file, True)
    write(workspace, runs, wrote)
    if names:
        for note in [*(note for run in runs for note in notes(run.manifest)), *said]:
            print(note)
    for run in runs if on_this_machine else ():
        print(f"start with `make demo RUN={run.manifest.name}`")


AXIS = "The file of the axis. Default: jsonnet/hardware/this_machine.libsonnet."


@app.command()
def hardware(
    path: Annotated[Path | None, typer.Argument(metavar="[FILE]", help=AXIS)] = None,
) -> None:
    """Print this machine's devices and write its hardware axis."""
    workspace, machine = find_workspace(), this_machine()
    path = path or workspace.root / "jsonnet" / "hardware" / "this_machine.libsonnet"
    print(describe(machine))
    write_axis(workspace, machine, path)
    print(f"wrote {workspace.shown(path)}")


@app.command()
def check(names: Names = None) -> None:
    """Check runs, and that manifests/ is up to date.

    RUN may also be a manifest's path. If RUN is given, also check that Orrery can start it.
    """
    workspace = find_workspace()
    given = [(n, load(n)) for n in names or [] if n.endswith(".json")]
    rest = [n for n in names or [] if not n.endswith(".json")]
    runs = _chosen(rest) if rest or not names else []
    said = check_tasks([*given, *map(_spelled, runs)])
    for word, manifest in given:
        _must_start(word, manifest)
        print(f"{word}: {manifest.name} is a manifest", *notes(manifest), sep="\n")
    for run in runs:
        name = run.manifest.name
        _check_written(workspace, run)
        if names:
            _must_start(name, run.manifest)
        print(f"{name} {id12(run.manifest)}", *notes(run.manifest), sep="\n")
    if names:
        for note in said:
            print(note)
    else:
        _check_known(workspace)


def _check_written(workspace: Workspace, run: Rendered) -> None:
    name = run.manifest.name
    path, remedy = workspace.manifest_path(name), f"run `orrery render {name}` and commit it"
    if not path.is_file():
        raise OrreryError(f"{workspace.shown(path)}: is missing; {remedy}")
    if path.read_bytes() != pretty_json(run.manifest).encode():
        what = "its layout was edited"
        if changed := differences(load(path), run.manifest):
            what = f"{changed[0]}" + (f" and {len(changed) - 1} more" if changed[1:] else "")
        raise OrreryError(f"{workspace.shown(path)}: is stale ({what}); {remedy}")


def _check_known(workspace: Workspace) -> None:
    known = run_files(workspace)
    for path in sorted((workspace.root / "manifests").glob("*.json")):
        if path.stem not in known:
            near = nearest(path.stem, list(known))
            hint = f"did {near!r} take its place? " if near else ""
            shown = workspace.shown(path)
            raise OrreryError(f"{shown}: no run has this name; {hint}type `rm {shown}`")


FIELD = "Only this field, such as trainer.optimizer."
SHOW_RECEIPT = "Print the run's receipt instead."


@app.command()
def show(
    run: Side,
    field: Annotated[str | None, typer.Argument(help=FIELD)] = None,
    receipt: Annotated[bool, typer.Option("--receipt", help=SHOW_RECEIPT)] = False,
) -> None:
    """Print a run's manifest, or one field of it."""
    if receipt:
        data = named(run).receipt
        if data is None:
            raise OrreryError(
                f"{run}: has no receipt yet, because no stage has ended. Type `orrery status`"
            )
        if field is not None:
            data = lookup(data, parse_path(field), f"{run}: receipt")
        print(json.dumps(data, indent=2))
        return
    manifest = manifest_of(run)
    if field is None:
        print(pretty_json(manifest), end="")
    else:
        data = lookup(manifest.model_dump(mode="json"), parse_path(field), run)
        print(json.dumps(data, indent=2, sort_keys=True))


EVERYTHING = "Compare times, job ids and earlier attempts in receipts too."


@app.command()
def diff(
    before: Side,
    after: Side,
    everything: Annotated[bool, typer.Option("--all", help=EVERYTHING)] = False,
) -> None:
    """Print the differences of two runs, before → after.

    Compare manifests and, if both runs have them, receipts.
    """
    a, b = named(before), named(after)
    if not (a.manifest and b.manifest) and not (a.receipt and b.receipt):
        alone = before if a.manifest is None else after
        raise OrreryError(
            f"{alone}: a receipt without a manifest.json beside it can only be compared with "
            "another receipt"
        )
    if a.manifest and b.manifest:
        for difference in differences(a.manifest, b.manifest):
            print(difference)
    if a.receipt and b.receipt:
        for difference in diff_receipts(a.receipt, b.receipt, everything):
            print(difference)


@app.command()
def explain(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name.")],
    field: Annotated[
        str, typer.Argument(help="A field, such as trainer.optimizer.lr, or an object of fields.")
    ],
) -> None:
    """Say which spec file gave a field its value."""
    for explanation in explanations(find_workspace(), run, field):
        print(explanation)


def run_app(program: Callable[[], object]) -> int:
    try:
        program()
    except OrreryError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def main() -> None:
    sys.exit(run_app(app))


if __name__ == "__main__":
    main()
