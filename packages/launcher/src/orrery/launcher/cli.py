"""`orrery`: one command line for specs (from the manifest room) and for runs.

- Results go to stdout, everything else to stderr; an `OrreryError`, or the system's refusal (`OSError`), is one line `error: …` and an exit
  code, never a traceback.
- Imports stand inside the commands: `orrery show` must not wait for what only `orrery run` needs.
"""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from orrery.manifest import cli as manifest_cli
from orrery.manifest.errors import OrreryError, explain_os_error

T = TypeVar("T")

app = typer.Typer(
    name="orrery",
    help="Declarative, reproducible reinforcement learning on language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.registered_commands += manifest_cli.app.registered_commands


def _say_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        from orrery.observe.provenance import commit

        print(f"orrery {version('orrery-launcher')}, commit {commit(Path(__file__).parent)}")
        raise typer.Exit()


@app.callback()
def _before(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, help="Say version and commit."
        ),
    ] = False,
) -> None:
    pass


RunWord = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run's name (reverse_text) or its folder in runs/ (reverse_text-0123456789ab).",
    ),
]


@app.command()
def run(
    word: RunWord,
    stage: Annotated[
        str, typer.Argument(metavar="STAGE", help="init, sft, rl, evaluate or report.")
    ],
) -> None:
    """Run one stage here: start its processes, watch them, end them together. `snakemake` calls this for every stage in order."""
    from orrery.launcher.runs import job
    from orrery.launcher.supervisor import run_stage

    one = job(word, stage)
    outcome = run_stage(one)
    print(
        outcome.message if outcome.state == "done" else f"error: {outcome.message}",
        file=sys.stderr,
        flush=True,
    )
    if outcome.again and one.allocation is not None:
        import time

        time.sleep(
            600
        )  # until Slurm has put the job back in the queue, which ends this process; else the job has failed
    raise typer.Exit(outcome.exit_code)


@app.command()
def adopt(
    word: RunWord,
    other: Annotated[
        str,
        typer.Argument(metavar="OTHER", help="The run that it goes on from, by name or folder."),
    ],
) -> None:
    """Begin a run where another stands: the same learning on other devices, or in another layout of trainer and engines."""
    from orrery.launcher.adopt import adopt
    from orrery.launcher.runs import find, resume_command

    run = find(word)
    where = adopt(run, find(other))
    rest = next(stage for stage in run.stages if stage not in run.finished())
    print(f"{run.path.name}: {where}\ngo on with `{resume_command(run, rest)}`")


@app.command()
def plan(
    word: manifest_cli.Run,
    stage: Annotated[
        str | None,
        typer.Argument(
            metavar="[STAGE]", help="One stage, with its srun lines; without it all of the run."
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            "--write",
            metavar="FOLDER",
            help="Write the manifest and each stage's submission script into this new folder.",
        ),
    ] = None,
) -> None:
    """Say what a run's stages would be on this site: nodes, devices, images, submission, command lines. Starts nothing."""
    from orrery.launcher.describe_plan import describe_stage
    from orrery.launcher.runs import planned
    from orrery.launcher.site import load_site
    from orrery.manifest.workspace import find_workspace

    workspace = find_workspace()
    run, site = planned(word, workspace), load_site(workspace)
    if to is not None:
        from orrery.launcher.plan_files import write_plan

        print(*write_plan(run, [stage] if stage else run.stages, site, workspace, to), sep="\n")
        return
    for name in [stage] if stage else run.stages:
        lines = describe_stage(run.manifest, name, site, workspace)
        print("\n".join(line for line in lines if stage or not line.startswith("  srun")))


@app.command()
def status(
    word: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]", help="Without it: the newest run, and a line for each of the others."
        ),
    ] = None,
) -> None:
    """Say where a run stands: its stages, its processes, what each does or waits for."""
    from orrery.launcher.describe import describe, overview
    from orrery.launcher.runs import all_runs, find, members, newest
    from orrery.launcher.site import load_site
    from orrery.manifest.workspace import find_workspace

    workspace = find_workspace()
    on_cluster = load_site(workspace).slurm is not None
    if word is not None:
        _print_each(
            lambda run: "\n".join(describe(run, on_cluster=on_cluster)), members(word, workspace)
        )
        return
    shown = newest(workspace)
    if shown is None:
        profile = "slurm" if on_cluster else "local"
        raise OrreryError(
            f"no run has started here; type `snakemake --profile {profile} reverse_text` (`orrery check` lists the runs)"
        )

    def line(path: Path) -> str:
        return (
            "\n".join(describe(find(path.name, workspace), on_cluster=on_cluster))
            if path == shown
            else overview(path)
        )

    _print_each(line, [shown, *(path for path in all_runs(workspace) if path != shown)])


def _print_each(text: Callable[[T], str], runs: Iterable[T]) -> None:
    """Print `text(run)` for every run.

    The error of an unreadable run comes last, with a non-zero exit code.
    """
    errors = []
    for run in runs:
        try:
            print(text(run))
        except OrreryError as error:
            errors.append(error)
    for other in errors[:-1]:
        print(f"error: {other}", file=sys.stderr)
    if errors:
        raise errors[-1]


@app.command()
def logs(
    word: RunWord,
    role: Annotated[
        str | None,
        typer.Argument(
            metavar="[ROLE]", help="trainer, or one process: trainer.0. Without it: all."
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on printing what is added.")
    ] = False,
    num_lines: Annotated[
        int, typer.Option("-n", "--lines", min=0, help="So many last lines of each; 0: all.")
    ] = 50,
) -> None:
    """Print what a run's processes wrote."""
    from orrery.launcher.describe import log_lines, log_paths
    from orrery.launcher.runs import find

    try:
        for line in log_lines(log_paths(find(word).path, role), num_lines, follow):
            print(line, flush=follow)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@app.command()
def stop(
    word: RunWord,
    checkpoint: Annotated[
        bool,
        typer.Option(
            "--checkpoint", help="Let the RL stage write a checkpoint first and end by itself."
        ),
    ] = False,
) -> None:
    """End a run that is going, or cancel its Slurm jobs, also those that wait; it stays resumable."""
    from orrery.launcher.runs import find
    from orrery.launcher.site import load_site
    from orrery.launcher.stop import stop_run
    from orrery.manifest.workspace import find_workspace

    workspace = find_workspace()
    print(stop_run(find(word, workspace).path, load_site(workspace).slurm is not None, checkpoint))


@app.command()
def report(
    word: RunWord,
    summary: Annotated[
        bool,
        typer.Option(
            "--summary", help="Print the last line of the run, or of each run of a group, instead."
        ),
    ] = False,
) -> None:
    """Draw a run's report anew, finished or not, and print its path."""
    import subprocess

    from orrery.launcher import status as statuses
    from orrery.launcher.runs import find, members, resume_command
    from orrery.manifest.json_file import read_regular

    if summary:
        for run in members(word):
            text = run.path / "report" / "summary.txt"
            if not text.exists():
                raise OrreryError(
                    f"{run.path.name}: it has no report yet; type `{resume_command(run, 'report')}`"
                )
            print(read_regular(text).decode(errors="replace").strip())
        return
    found = find(word)
    last = statuses.read(found.path)
    if last is None:
        raise OrreryError(f"{found.path.name}: not started; type `{resume_command(found, 'init')}`")
    argv = [
        sys.executable,
        "-m",
        "orrery.observe.report",
        "--run-dir",
        str(found.path),
        "--stage",
        "report",
        "--attempt",
        str(last.attempt),
    ]
    code = subprocess.run(argv).returncode
    if code:
        raise typer.Exit(code)
    print(found.path / "report" / "index.html")


@app.command()
def export(
    word: RunWord,
    step: Annotated[
        int | None,
        typer.Option("--step", help="The step of a complete checkpoint; the newest without it."),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", help="The folder to write; weights/step_<n> of the run without it."),
    ] = None,
    stage: Annotated[str, typer.Option("--stage", help="rl or sft: whose checkpoint.")] = "rl",
) -> None:
    """Turn a checkpoint into a Hugging Face folder, of a run that goes on or has ended, and print its path; with Slurm in a small job."""
    from orrery.launcher import export as exports
    from orrery.launcher.runs import find, resume_command
    from orrery.launcher.site import load_site
    from orrery.manifest.workspace import find_workspace

    workspace = find_workspace()
    found = find(word, workspace)
    if not (found.path / "manifest.json").exists():
        raise OrreryError(f"{found.path.name}: not started; type `{resume_command(found, 'init')}`")
    raise typer.Exit(exports.run(found, stage, step, to, workspace, load_site(workspace)))


@app.command()
def deployment(
    word: manifest_cli.Run,
    kind: Annotated[str, typer.Argument(metavar="ROUTER", help="dynamo or llm_d.")],
    image: Annotated[
        str,
        typer.Option(
            "--image", help="The engines' image: vLLM and this project; for Dynamo, Dynamo too."
        ),
    ],
    claim: Annotated[
        str,
        typer.Option("--claim", help="The volume claim whose root is the folder of the weights."),
    ],
    proxy_image: Annotated[
        str, typer.Option("--proxy-image", help="llm-d's routing proxy, where prefill is apart.")
    ] = "",
    to: Annotated[
        Path | None, typer.Option("--to", help="The folder to write; RUN-ROUTER here without it.")
    ] = None,
) -> None:
    """Write what Dynamo or llm-d needs on Kubernetes to serve a run's engines, and print the paths. Applies nothing."""
    import subprocess
    import tempfile

    from orrery.manifest.identity import canonical_json

    manifest = manifest_cli.manifest_of(word)
    if kind not in ("dynamo", "llm_d"):
        raise OrreryError(f"deployment: there is no router {kind!r}; choose from dynamo, llm_d")
    for option, value in (("--image", image), ("--claim", claim)):
        if not value.strip():
            raise OrreryError(f"deployment: {option} is empty; name what the cluster calls it")
    with tempfile.TemporaryDirectory(prefix="orrery-") as folder:
        path = Path(folder) / "manifest.json"
        path.write_bytes(canonical_json(manifest))
        argv = [
            sys.executable,
            "-m",
            "orrery.inference.deployments",
            kind,
            str(path),
            "--image",
            image,
            "--claim",
            claim,
        ]
        argv += ["--proxy-image", proxy_image, "--to", str(to or Path(f"{manifest.name}-{kind}"))]
        raise typer.Exit(subprocess.run(argv).returncode)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)
def bench(
    context: typer.Context,
    figure: Annotated[
        str | None,
        typer.Argument(
            metavar="[AREA/FIGURE | trainer RUN …]",
            help="Measure this figure anew, or a run's trainer.",
        ),
    ] = None,
    table: Annotated[
        bool, typer.Option("--table", help="Print every recorded figure against its goal.")
    ] = False,
) -> None:
    """Measure a figure, or print all that are recorded; `orrery bench trainer --help` says how a run's trainer is measured."""
    from orrery.launcher import bench as benchmarks
    from orrery.manifest.workspace import find_workspace

    if figure == "trainer":
        raise typer.Exit(benchmarks.trainer(context.args))
    if "--help" in (figure, *context.args):
        print(context.get_help())
        return
    if context.args:
        raise OrreryError(
            f"bench: there is no option {context.args[0]!r}; type `orrery bench --help`"
        )
    root = find_workspace().root / "benchmarks"
    if figure is not None:
        raise typer.Exit(benchmarks.run(root, figure))
    if not table:
        raise OrreryError(
            "bench: say what; type `orrery bench --table`, `orrery bench AREA/FIGURE`, or `orrery bench trainer RUN`"
        )
    benchmarks.print_table(root)


@app.command()
def doctor(
    probe: Annotated[
        bool,
        typer.Option(
            "--probe/--no-probe", help="At a site with Slurm: look at its nodes, in one small job."
        ),
    ] = True,
) -> None:
    """Look at this machine and, where the site file names one, at the cluster: what a run needs, what is there, what mends it."""
    from orrery.launcher.doctor import examine
    from orrery.launcher.doctor_site import examine_site
    from orrery.launcher.site import load_site
    from orrery.manifest.workspace import find_workspace

    workspace = find_workspace()
    site = load_site(workspace)
    if site.slurm is not None and probe:
        print("asking the nodes, which takes up to two minutes …", file=sys.stderr, flush=True)
    findings = [*examine(workspace), *examine_site(workspace, site, probe)]
    for one in findings:
        mark = "ok  " if not one.mend else "FAIL" if one.must else "note"
        print(f"{mark} {one.what:<22} {one.found}" + (f": {one.mend}" if one.mend else ""))
    raise typer.Exit(1 if any(one.mend and one.must for one in findings) else 0)


def main() -> None:
    """The console script."""
    try:
        app()
    except OrreryError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except BrokenPipeError:
        raise SystemExit(
            141
        ) from None  # the reader of our stdout has left (`orrery logs … | head`)
    except OSError as error:
        print(f"error: {explain_os_error(error)}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
