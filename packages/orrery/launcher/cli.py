"""Define the `orrery` command. Results go to stdout, messages to stderr."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from orrery.manifest import cli as manifest_cli
from orrery.manifest.errors import OrreryError, explain_os_error

T = TypeVar("T")
REQUEUED_S = 600  # maximum wait for Slurm to end this process after a requeue

app = typer.Typer(
    name="orrery",
    help="Declarative, reproducible reinforcement learning on language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.registered_commands += manifest_cli.app.registered_commands


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        from orrery.manifest.identity import commit

        print(f"orrery {version('orrery')}, commit {commit(Path(__file__).parent)}")
        raise typer.Exit()


Version = Annotated[
    bool,
    typer.Option(
        "--version", callback=_print_version, is_eager=True, help="Print version and commit."
    ),
]


@app.callback()
def _before(version: Version = False) -> None:
    pass


RUN_HELP = "A run's name (reverse_text) or its folder in runs/ (reverse_text-0123456789ab)."
RunWord = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP)]


@app.command()
def run(
    word: RunWord,
    stage: Annotated[
        str, typer.Argument(metavar="STAGE", help="init, sft, rl, evaluate or report.")
    ],
) -> None:
    """Run one stage. `snakemake` runs all stages in order."""
    import os

    from orrery.launcher.supervisor import job, run_stage

    one = job(word, stage)
    os.chdir(one.workspace.root)  # paths of data and weights are relative to the checkout
    outcome = run_stage(one)
    prefix = "error: " if outcome.state == "failed" else ""
    print(f"{prefix}{outcome.message}", file=sys.stderr, flush=True)
    if outcome.requeue and one.allocation is not None:
        import time

        time.sleep(REQUEUED_S)
    raise typer.Exit(outcome.exit_code)


JOIN_HELP = "The --listen address of any site that runs. The first site names its own address."
LISTEN_HELP = "This site's address and the first of its ports. Without it: only dial other sites."
REWIND_HELP = "If no site runs, restart the run from the weight exchange of this site's checkpoint."
CERTIFICATES_HELP = "The folder of authority.pem, NAME.pem and NAME.key."
NAME_HELP = "This site's name, as in its certificate."
SHARD_HELP = "The shard of the data to train on. Without it: the lowest free shard."


@app.command()
def join(
    word: RunWord,
    address: Annotated[str, typer.Argument(metavar="ADDRESS:PORT", help=JOIN_HELP)],
    listen: Annotated[str, typer.Option("--listen", metavar="ADDRESS:PORT", help=LISTEN_HELP)] = "",
    name: Annotated[str, typer.Option("--name", help=NAME_HELP)] = "site",
    certificates: Annotated[Path, typer.Option("--certificates", help=CERTIFICATES_HELP)] = Path(
        "certificates"
    ),
    shard: Annotated[int | None, typer.Option("--shard", min=0, help=SHARD_HELP)] = None,
    stage: Annotated[str, typer.Option("--stage", help="The stage to train: sft or rl.")] = "sft",
    rewind: Annotated[bool, typer.Option("--rewind", help=REWIND_HELP)] = False,
) -> None:
    """Train at this site, as part of a run over several sites.

    With `trainer.elastic`, every site trains. With `orchestrator.guests`, one site trains, and
    the others lend engines (`orrery lend`).
    """
    from orrery.launcher.runs import check_shard, place_site

    if shard is not None and stage == "sft":
        check_shard(word, shard)
    place_site(word, address, listen, name, certificates, shard, rewind)
    run(word, stage)


DOOR_HELP = "The --listen address that the training site gave to `orrery join`."
BLOCKS_HELP = "The address at which to serve weights to other sites. Without it: serve none."


@app.command()
def lend(
    word: RunWord,
    address: Annotated[str, typer.Argument(metavar="ADDRESS:PORT", help=DOOR_HELP)],
    listen: Annotated[str, typer.Option("--listen", metavar="ADDRESS:PORT", help=BLOCKS_HELP)] = "",
    name: Annotated[str, typer.Option("--name", help=NAME_HELP)] = "site",
    certificates: Annotated[Path, typer.Option("--certificates", help=CERTIFICATES_HELP)] = Path(
        "certificates"
    ),
) -> None:
    """Lend an engine on this machine to a run at another site, until that run ends.

    The run must set `orchestrator.guests`.
    """
    from orrery.launcher.serve import lend
    from orrery.manifest.identity import find_workspace

    raise typer.Exit(lend(word, address, listen, name, certificates, find_workspace()))


@app.command()
def adopt(
    word: RunWord,
    other: Annotated[
        str, typer.Argument(metavar="OTHER", help="The run to go on from, by name or folder.")
    ],
) -> None:
    """Copy another run's state into a new run, for other devices or another parallel layout."""
    from orrery.launcher.runs import adopt, find, resume_command

    run = find(word)
    where = adopt(run, find(other))
    rest = next(stage for stage in run.stages if stage not in run.finished())
    print(f"{run.path.name}: {where}\ngo on with `{resume_command(run, rest)}`")


PLAN_STAGE_HELP = "One stage, with its srun lines. Without it: all stages."
TOKENS_HELP = "Mean tokens of a rollout with prompt. Default: a quarter of max_model_len_tokens."
SEARCH_HELP = "Print only the three fastest layouts of trainer and of engines that fit in memory."
JSON_HELP = "Print only memory and time, as JSON."
WRITE_HELP = "Write the manifest and each stage's submission script into this new folder."


@app.command()
def plan(
    word: manifest_cli.Run,
    stage: Annotated[str | None, typer.Argument(metavar="[STAGE]", help=PLAN_STAGE_HELP)] = None,
    to: Annotated[Path | None, typer.Option("--write", metavar="FOLDER", help=WRITE_HELP)] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=2, help=TOKENS_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
    search: Annotated[bool, typer.Option("--search", help=SEARCH_HELP)] = False,
) -> None:
    """Print a run's stages, nodes and commands, and estimate its memory and time."""
    import json

    from orrery.launcher.pipeline import describe_stage, write_plan
    from orrery.launcher.runs import outdated, planned
    from orrery.launcher.site import load_site
    from orrery.manifest.budget import table
    from orrery.manifest.budget.run import plan_run
    from orrery.manifest.identity import find_workspace

    workspace = find_workspace()
    run, site = planned(word, workspace), load_site(workspace)
    if word == run.manifest.name and (said := outdated(run, workspace)) is not None:
        print(f"warning: this plans the old run: {said}", file=sys.stderr)
    network = site.network.bytes_per_s if site.network else None
    if as_json and search:
        raise OrreryError("--search cannot print JSON; leave out --json or --search")
    if as_json:
        print(json.dumps(plan_run(run.manifest, tokens, network).as_json(), indent=2))
        return
    if search:
        host = table.HOST_BYTES
        if site.slurm is not None:
            host = float(site.slurm.memory_per_node_mb << 20)
        print(*table.search(run.manifest, tokens, network, host), sep="\n")
        return
    stages = [stage] if stage else run.stages
    if to is not None:
        print(*write_plan(run, stages, site, workspace, to), sep="\n")
        return
    told: set[str] = set()
    for name in stages:
        lines = describe_stage(run.manifest, name, site, workspace)
        if stage is None:
            lines = [line for line in lines if line not in told and not line.startswith("  srun")]
            told |= {line for line in lines if line.startswith("  note: ")}
        print("\n".join(lines))
    if stage is None:
        try:
            budget = plan_run(run.manifest, tokens, network)
        except OrreryError as error:
            print(f"\nmemory and time are not planned: {error}")
        else:
            lines = [*table.lines(budget)]
            if site.slurm is not None:
                found = table.host_misfits(budget, site.slurm.memory_per_node_mb)
                lines += [
                    f"  note: {sentence}, so `snakemake` refuses the run" for sentence in found
                ]
                late = table.warning_misfit(budget, site.slurm.warning_s)
                lines += [f"  note: {sentence}" for sentence in late]
            print("\nthe RL stage, planned", *lines, sep="\n")


STATUS_HELP = "Without it: the newest run, and a line for each other run."


@app.command()
def status(
    word: Annotated[str | None, typer.Argument(metavar="[RUN]", help=STATUS_HELP)] = None,
) -> None:
    """Print the state of a run's stages and processes."""
    from orrery.launcher.describe import describe, overview
    from orrery.launcher.runs import Run, all_runs, find, members, newest
    from orrery.launcher.site import load_site
    from orrery.manifest.identity import find_workspace

    workspace = find_workspace()
    on_cluster = load_site(workspace).slurm is not None

    def text(run: Run) -> str:
        return "\n".join(describe(run, on_cluster=on_cluster))

    if word is not None:
        _print_each(text, members(word, workspace))
        return
    shown = newest(workspace)
    if shown is None:
        profile = "slurm" if on_cluster else "local"
        raise OrreryError(
            f"no run has started here. Type `snakemake --profile {profile} reverse_text` "
            "(`orrery check` lists the runs)"
        )

    def line(path: Path) -> str:
        return text(find(path.name, workspace)) if path == shown else overview(path)

    _print_each(line, [shown, *(path for path in all_runs(workspace) if path != shown)])


def _print_each(text: Callable[[T], str], runs: Iterable[T]) -> None:
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


ROLE_HELP = "A role (trainer) or one process (trainer.0). Without it: all."


@app.command()
def logs(
    word: RunWord,
    role: Annotated[str | None, typer.Argument(metavar="[ROLE]", help=ROLE_HELP)] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Print new lines too.")] = False,
    num_lines: Annotated[
        int, typer.Option("-n", "--lines", min=0, help="The last lines of each log. 0: all.")
    ] = 50,
) -> None:
    """Print the logs of a run's processes."""
    from orrery.launcher.describe import log_lines, log_paths
    from orrery.launcher.runs import find

    try:
        for line in log_lines(log_paths(find(word).path, role), num_lines, follow):
            print(line, flush=follow)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


CHECKPOINT_HELP = "Let the RL stage write a checkpoint first and end by itself."


@app.command()
def stop(
    word: RunWord,
    checkpoint: Annotated[bool, typer.Option("--checkpoint", help=CHECKPOINT_HELP)] = False,
) -> None:
    """Stop a run, or cancel its Slurm jobs. The run can be resumed."""
    from orrery.launcher.runs import find
    from orrery.launcher.site import load_site
    from orrery.launcher.stage import stop_run
    from orrery.manifest.identity import find_workspace

    workspace = find_workspace()
    print(stop_run(find(word, workspace).path, load_site(workspace).slurm is not None, checkpoint))


RESTORE_STAGE_HELP = "The stage to resume: rl or sft."


@app.command()
def restore(
    word: RunWord,
    stage: Annotated[str, typer.Option("--stage", help=RESTORE_STAGE_HELP)] = "rl",
) -> None:
    """Fetch a run's newest checkpoint from the site file's `checkpoint_target`.

    If the run's folder was lost, run its earlier stages first.
    """
    import subprocess

    from orrery.launcher.runs import find, hold_lock
    from orrery.launcher.site import load_site
    from orrery.manifest.identity import find_workspace
    from orrery.runtime.run_directory import begin

    workspace = find_workspace()
    found = find(word, workspace)
    if not (target := load_site(workspace).roles.checkpoint_target):
        raise OrreryError(
            "[roles] checkpoint_target: missing in the site file; set it to the URL of the "
            "checkpoint copies"
        )
    begin(found.path)
    argv = [sys.executable, "-m", "orrery.trainer.uploader", "restore", target]
    with hold_lock(found.path):
        raise typer.Exit(subprocess.run([*argv, str(found.path), stage]).returncode)


SUMMARY_HELP = "Print the result and the weights' folder of the run, or of each run of a group."


@app.command()
def report(
    word: RunWord,
    summary: Annotated[bool, typer.Option("--summary", help=SUMMARY_HELP)] = False,
) -> None:
    """Write the report of a run, even if unfinished, and print its path."""
    import subprocess

    from orrery.launcher.runs import find, members, read_status, resume_command
    from orrery.launcher.serve import summary_line
    from orrery.manifest.json_file import read_regular
    from orrery.runtime.run_directory import report_page

    if summary:
        runs = members(word)
        for run in runs:
            text = report_page(run.path).with_name("summary.txt")
            if not text.exists():
                command = resume_command(run, "report")
                raise OrreryError(f"{run.path.name}: no report yet. Type `{command}`")
            print(read_regular(text).decode(errors="replace").strip())
            name = run.manifest.name
            is_newest = len(runs) > 1 or word == name
            print(summary_line(name if is_newest else run.path.name, run))
        return
    found = find(word)
    last = read_status(found.path)
    if last is None:
        raise OrreryError(
            f"{found.path.name}: has not started. Type `{resume_command(found, 'init')}`"
        )
    argv = [sys.executable, "-m", "orrery.observe.report", "--run-dir", str(found.path)]
    argv += ["--stage", "report", "--attempt", str(last.attempt)]
    code = subprocess.run(argv).returncode
    if code:
        raise typer.Exit(code)
    print(report_page(found.path))


STEP_HELP = "The step of a complete checkpoint. Without it: the newest."
TO_HELP = "The folder to write. Without it: weights/step_<n> of the run."
EXPORT_STAGE_HELP = "The stage of the checkpoint: rl or sft."


@app.command()
def export(
    word: RunWord,
    step: Annotated[int | None, typer.Option("--step", help=STEP_HELP)] = None,
    to: Annotated[Path | None, typer.Option("--to", help=TO_HELP)] = None,
    stage: Annotated[str, typer.Option("--stage", help=EXPORT_STAGE_HELP)] = "rl",
) -> None:
    """Write a checkpoint as a Hugging Face folder and print its path.

    With Slurm, a small job writes the folder.
    """
    from orrery.launcher.runs import find, resume_command
    from orrery.launcher.serve import write_export
    from orrery.launcher.site import load_site
    from orrery.manifest.identity import find_workspace
    from orrery.runtime.run_directory import MANIFEST

    workspace = find_workspace()
    found = find(word, workspace)
    if not (found.path / MANIFEST).exists():
        raise OrreryError(
            f"{found.path.name}: has not started. Type `{resume_command(found, 'init')}`"
        )
    raise typer.Exit(write_export(found, stage, step, to, workspace, load_site(workspace)))


SERVE_HELP = "A run's name or folder in runs/, or any Hugging Face folder."
PORT_HELP = "The port to listen on."


@app.command()
def serve(
    word: Annotated[str, typer.Argument(metavar="RUN|FOLDER", help=SERVE_HELP)],
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help=PORT_HELP)] = 8000,
) -> None:
    """Serve a run's weights with vLLM on this machine, until Ctrl-C.

    The weights are weights/rl, or the newest result of `orrery export` if RL is not done.

    The server's address, its token and a curl example are printed. The API is OpenAI's, with
    the weights folder's name as `model`.

    All requests but /health and /metrics need the header `Authorization: Bearer TOKEN`. The token
    is random, or read from the file named in ORRERY_TOKEN_FILE (mode 0600).

    The server listens on loopback, or on the network interface named in ORRERY_INTERFACE.
    CUDA_VISIBLE_DEVICES selects the GPU. On a cluster, run the command inside a job.
    """
    from orrery.launcher.serve import serve
    from orrery.manifest.identity import find_workspace

    raise typer.Exit(serve(word, port, find_workspace()))


ANY_OPTIONS = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}
FIGURE_METAVAR = "[AREA/FIGURE | trainer RUN … | rates …]"
FIGURE_HELP = "The figure to measure, the run whose trainer to measure, or this machine's rates."
TABLE_HELP = "Print every recorded figure and its goal."


@app.command(context_settings=ANY_OPTIONS)
def bench(
    context: typer.Context,
    figure: Annotated[str | None, typer.Argument(metavar=FIGURE_METAVAR, help=FIGURE_HELP)] = None,
    table: Annotated[bool, typer.Option("--table", help=TABLE_HELP)] = False,
) -> None:
    """Run a benchmark, or print all results. See also `orrery bench trainer --help`."""
    from orrery.launcher import bench as benchmarks
    from orrery.manifest.identity import find_workspace

    if figure == "trainer":
        raise typer.Exit(benchmarks.trainer(context.args))
    if figure == "rates":
        raise typer.Exit(benchmarks.rates(context.args))
    if "--help" in (figure, *context.args):
        print(context.get_help())
        return
    if context.args:
        raise OrreryError(f"bench: has no option {context.args[0]!r}. Type `orrery bench --help`")
    root = find_workspace().root / "benchmarks"
    if figure is not None:
        raise typer.Exit(benchmarks.run(root, figure))
    if not table:
        raise OrreryError(
            "bench: no figure is named. Type `orrery bench --table`, `orrery bench AREA/FIGURE`, "
            "or `orrery bench trainer RUN`"
        )
    benchmarks.print_table(root)


FETCH_HELP = """Fetch a model or a dataset from the Hugging Face hub, at one commit.

Every file's digest is checked. Finished files stay in the hub's cache, so after a failure the same
command resumes. HF_TOKEN (gated repositories), HF_ENDPOINT (a mirror), HF_HOME (the cache),
HF_HUB_OFFLINE=1 (use only the cache), HF_HUB_ETAG_TIMEOUT, HF_HUB_DOWNLOAD_TIMEOUT and the other
variables of huggingface_hub apply. HF_HUB_DISABLE_XET=0 downloads by Xet in place of HTTP.
"""
REPOSITORY = "OWNER/NAME[@REVISION]"
REPOSITORY_HELP = "A repository, and a branch, tag or commit of it. Without it: main."
Repository = Annotated[str, typer.Argument(metavar=REPOSITORY, help=REPOSITORY_HELP)]

fetch = typer.Typer(help=FETCH_HELP, no_args_is_help=True)
app.add_typer(fetch, name="fetch")


TEMPLATE_HELP = "A file in Jinja that takes the place of the model's chat template."


@fetch.command("model")
def fetch_model(
    repository: Repository,
    chat_template: Annotated[
        Path | None, typer.Option("--chat-template", help=TEMPLATE_HELP)
    ] = None,
) -> None:
    """Write weights/NAME and the config jsonnet/models/<name>_pretrained.libsonnet.

    Fetch safetensors, configs, tokenizer.json and the chat template, never code.
    Tensor names and shapes must match config.json.
    """
    from orrery.launcher import fetch as fetching
    from orrery.manifest.identity import find_workspace

    print(*fetching.fetch_model(repository, find_workspace(), chat_template), sep="\n")


SHARD_FILES_HELP = (
    "Fetch only the files of one site: shard K of N, K from 0. Without it: all files."
)
CONFIG_HELP = "A part of the dataset, such as main of openai/gsm8k. Without it: the only part."


@fetch.command("dataset")
def fetch_dataset(
    repository: Repository,
    config: Annotated[str | None, typer.Option("--config", help=CONFIG_HELP)] = None,
    shard: Annotated[
        str | None, typer.Option("--shard", metavar="K/N", help=SHARD_FILES_HELP)
    ] = None,
) -> None:
    """Write datasets/NAME or datasets/NAME-CONFIG and jsonnet/tasks/<name>_fetched.libsonnet.

    Fetch JSONL, JSON, CSV, Parquet and Arrow files, never code.

    With --shard K/N, fetch every N-th file of the train split from file K on, and all other splits.
    If no split is named train, the first split is sharded. The same command with another K adds
    that shard.
    """
    from orrery.launcher import fetch as fetching
    from orrery.manifest.identity import find_workspace

    print(*fetching.fetch_dataset(repository, config, find_workspace(), shard), sep="\n")


PROBE_HELP = "At a site with Slurm: examine its nodes, in one small job."


@app.command()
def doctor(
    probe: Annotated[bool, typer.Option("--probe/--no-probe", help=PROBE_HELP)] = True,
) -> None:
    """Check whether this machine and the site's cluster can start runs. Print remedies."""
    from orrery.launcher.doctor import examine, examine_site
    from orrery.launcher.site import load_site
    from orrery.manifest.identity import find_workspace

    workspace = find_workspace()
    site = load_site(workspace)
    if site.slurm is not None and probe:
        print("asking the nodes, which takes up to two minutes …", file=sys.stderr, flush=True)
    findings = [*examine(workspace, site), *examine_site(workspace, site, probe)]
    for one in findings:
        mark = "ok  " if not one.remedy else "FAIL" if one.is_required else "note"
        print(f"{mark} {one.what:<22} {one.found}" + (f": {one.remedy}" if one.remedy else ""))
    raise typer.Exit(1 if any(one.remedy and one.is_required for one in findings) else 0)


def main() -> None:
    try:
        app()
    except OrreryError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except BrokenPipeError:  # as in `orrery logs … | head`
        raise SystemExit(141) from None
    except OSError as error:
        print(f"error: {explain_os_error(error)}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
