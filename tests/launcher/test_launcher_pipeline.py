"""The Snakefile with real Snakemake and a stand-in for `orrery`: order, targets, errors."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from orrery.launcher.pipeline import Pipeline, checked_in, targets_of
from orrery.launcher.runs import read_status
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import Workspace

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(120)

SPECS = ("reverse_text", "reverse_text_seeds", "glm5_run")
ORRERY = """#!/bin/sh
echo "$2 $3" >> calls
[ "$3" = "$FAIL" ] && { echo "error: $3: trainer.0 was killed by SIGKILL" >&2; exit 1; }
echo '{}' > runs/$2/stages/$3/DONE
"""


@pytest.fixture
def checkout(tmp_path):
    """Specs, manifests, the real Snakefile and profile, and a stand-in `orrery` on PATH.

    Only the specs of `SPECS` are there, because Snakemake evaluates all at each start.
    """
    for name in ("jsonnet", "manifests", "locks", "local"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for path in (tmp_path / "jsonnet/runs").iterdir():
        if path.stem not in SPECS:
            path.unlink()
    shutil.copy(ROOT / "Snakefile", tmp_path)
    put_orrery(tmp_path, ORRERY)
    return tmp_path


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    return checked_in(Workspace(ROOT))


def put_orrery(checkout: Path, text: str) -> None:
    path = checkout / "bin" / "orrery"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def snakemake(checkout: Path, *args: str, start: bool = False, **env: str):
    env = {**os.environ, "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}", **env}
    argv = [sys.executable, "-m", "snakemake", *args]
    if start:
        return subprocess.Popen(
            argv, cwd=checkout, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
    return subprocess.run(argv, cwd=checkout, env=env, capture_output=True, text=True, timeout=60)


def calls(checkout: Path) -> list[str]:
    path = checkout / "calls"
    return [line.split()[1] for line in path.read_text().splitlines()] if path.exists() else []


def test_a_dry_run_shows_every_stage_of_every_run_of_a_group(checkout):
    result = snakemake(checkout, "-n", "reverse_text_seeds")
    table = {
        line.split()[0]: line.split()[1]
        for line in result.stdout.splitlines()
        if len(line.split()) == 2
    }
    stages = ("init", "sft", "rl", "evaluate", "report", "total")
    assert {stage: table.get(stage) for stage in stages} == {
        "init": "3", "sft": "3", "rl": "3", "evaluate": "3", "report": "3", "total": "16"
    }, result.stderr  # fmt: skip
    assert not (checkout / "runs").exists()


def test_a_dry_run_for_slurm_without_a_site_file_shows_nodes_and_processes_and_the_example_to_copy(
    checkout,
):
    shutil.copytree(ROOT / "slurm", checkout / "slurm")
    result = snakemake(checkout, "--profile", "slurm", "-n", "glm5_run")
    assert result.returncode == 0, result.stderr
    said = result.stdout + result.stderr
    assert "  prefill: 8 nodes × 8 H200: inference.0-3, orchestrator.0, headless.0-3" in said
    assert "  decode: 8 nodes × 8 H200: inference.4, headless.4-10" in said
    assert "  trainer: 12 nodes × 8 H200: trainer.0-95" in said
    assert "needs a cluster, described in site.toml as in docs/site.example.toml" in said
    assert "note: no submission is shown: site.toml: does not exist" in said
    assert (
        "Type `cp docs/site.example.toml site.toml`" in said
        and (ROOT / "docs/site.example.toml").is_file()
    )
    assert not (checkout / "runs").exists()


def test_a_run_that_does_not_fit_is_refused_before_its_first_stage(pipeline):
    (folder,) = pipeline.folders["smollm2_demo"]
    one = pipeline.manifests[folder]
    cache = one.inference.model_copy(update={"kv_cache_bytes": 400 << 30})
    large = one.model_copy(update={"inference": cache})
    changed = replace(pipeline, manifests={**pipeline.manifests, folder: large})
    with pytest.raises(OrreryError, match=r"^smollm2_demo: inference: .* 400\.0 GiB"):
        changed.check_targets(["smollm2_demo"])
    changed.check_targets(["reverse_text"])  # other runs may still start


def test_a_failed_stage_is_gone_on_with_and_finished_ones_are_left_alone(checkout):
    failed = snakemake(checkout, "--profile", "local", "reverse_text", FAIL="rl")
    assert failed.returncode == 1 and "error: rl: trainer.0 was killed by SIGKILL" in failed.stderr
    assert calls(checkout) == ["init", "sft", "rl"]
    assert snakemake(checkout, "--profile", "local", "reverse_text").returncode == 0
    assert calls(checkout) == ["init", "sft", "rl", "rl", "evaluate", "report"]
    for path in checkout.rglob("*.json*"):
        os.utime(path)  # as a git checkout does
    again = snakemake(checkout, "--profile", "local", "reverse_text")
    assert again.returncode == 0 and len(calls(checkout)) == 6, again.stderr


def test_what_earlier_stages_and_attempts_have_logged_stays(checkout):
    [folder] = checked_in(Workspace(checkout)).folders["reverse_text"]
    put_orrery(
        checkout, ORRERY + 'mkdir -p runs/$2/logs && echo "$3" >> runs/$2/logs/launcher.0.log\n'
    )
    assert snakemake(checkout, "--profile", "local", "reverse_text").returncode == 0
    said = (checkout / "runs" / folder / "logs" / "launcher.0.log").read_text()
    assert said.split() == ["init", "sft", "rl", "evaluate", "report"]


def test_an_edited_spec_is_refused_until_it_is_rendered_and_then_a_new_run(checkout):
    before = checked_in(Workspace(checkout)).folders["reverse_text"]
    spec = checkout / "jsonnet/runs/reverse_text.jsonnet"
    path = checkout / "manifests/reverse_text.json"
    manifest = json.loads(path.read_text())
    path.write_text(
        json.dumps({**manifest, "seed": manifest["seed"] + 1}, indent=2, sort_keys=True) + "\n"
    )
    result = snakemake(checkout, "-n", "reverse_text")
    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if "error:" in line]
    assert lines == [
        f"error: manifests/reverse_text.json: differs from its rendered spec "
        f"({spec.relative_to(checkout)}). "
        "Type `orrery render reverse_text` and review the change"
    ]
    assert "Traceback" not in result.stderr
    path.unlink()
    pipeline = checked_in(Workspace(checkout))
    with pytest.raises(OrreryError, match=r"manifests/reverse_text\.json: is missing"):
        pipeline.check_targets(["reverse_text"])
    pipeline.check_targets(set(pipeline.folders))  # other runs are not refused for it
    assert len(before) == 1 and len(pipeline.folders) > 1


def test_a_broken_spec_is_named_and_leaves_the_runs_of_other_files_alone(checkout):
    for number, text in enumerate(("[1, 2]", "{ odd: 1 }", "{ odd:")):
        (checkout / f"jsonnet/runs/odd_{number}.jsonnet").write_text(text)
    result = snakemake(checkout, "-n", "reverse_text")
    assert result.returncode == 0, result.stderr
    for number in range(3):
        (warning,) = [
            line
            for line in result.stderr.splitlines()
            if line.startswith(f"warning: jsonnet/runs/odd_{number}.jsonnet")
        ]
        assert warning.endswith("; the runs of this file are left out")
    assert "Traceback" not in result.stderr


def test_a_run_whose_data_file_is_missing_is_refused_with_that_file_and_its_import(checkout):
    spec = checkout / "jsonnet/runs/reverse_text.jsonnet"
    text = spec.read_text().replace("seed: 1,", "seed: std.length(lost),")
    spec.write_text(f"local lost = importstr 'data/mine.jsonl';\n{text}")
    (checkout / "jsonnet/runs/again.jsonnet").write_text("{ again: import 'data/no.libsonnet' }")
    (checkout / "manifests/again_1.json").write_text("{}")
    pipeline = checked_in(Workspace(checkout))
    lost = (
        "jsonnet/runs/reverse_text.jsonnet: import 'data/mine.jsonl': no such file in the "
        "checkout; put it there, or name another file (jsonnet/runs/reverse_text.jsonnet:1)"
    )
    assert pipeline.broken["reverse_text"] == lost
    for target, says in (
        ("reverse_text", f"run 'reverse_text': its spec cannot be evaluated: {lost}"),
        ("again_1", r"run 'again_1': its spec cannot be evaluated\. First correct .*again\.json"),
        ("zzzz", "is neither a run nor a group of runs"),
    ):
        says = re.escape(says) if target == "reverse_text" else says
        with pytest.raises(OrreryError, match=says):
            pipeline.check_targets([target])


def test_make_demo_with_a_misspelt_run_says_which_one_was_meant(checkout):
    shutil.copy(ROOT / "Makefile", checkout)
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    # As if `make setup` had been done.
    argv = [
        "make",
        "-o",
        ".venv/.ready",
        "demo",
        "RUN=reverse_tex",
    ]
    result = subprocess.run(argv, cwd=checkout, env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode != 0 and "MissingRule" not in result.stderr
    assert (
        "error: run 'reverse_tex': manifests/reverse_tex.json does not exist; did you mean "
        "'reverse_text'?" in result.stderr
    )


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (
            ["reverse_tex"],
            "run 'reverse_tex': is neither a run nor a group of runs; did you mean 'reverse_text'?",
        ),
        (
            ["-n", "reverse_text", "--", "reverse_text_seed"],
            "a group of runs; did you mean 'reverse_text_seed",
        ),
        (
            ["zzzz"],
            "run 'zzzz': is neither a run nor a group of runs; `ls manifests "
            "jsonnet/runs` shows all names",
        ),
        (["rl"], "run 'rl': is neither a run nor a group of runs; "),
        (
            ["runs/FOLDERa/stages/rl/DONE"],
            "no checked-in manifest has run folder 'FOLDERa'; did you mean 'FOLDER'?",
        ),
        (
            ["./runs/FOLDER/stages/rk/DONE"],
            "this run has no stage 'rk'. Choose from init, sft, rl, evaluate, report",
        ),
    ],
)
def test_a_misspelt_target_is_one_sentence_with_what_was_meant(pipeline, targets, says):
    [folder] = pipeline.folders["reverse_text"]
    words = [target.replace("FOLDER", folder) for target in targets]
    with pytest.raises(OrreryError) as raised:
        pipeline.check_targets(targets_of(["snakemake", "--profile", "local", *words]))
    [line] = str(raised.value).splitlines()
    assert says.replace("FOLDER", folder) in line


def test_snakemake_prints_that_sentence_alone_and_starts_nothing(checkout):
    result = snakemake(
        checkout, "--profile", "local", "-n", "reverse_text", "--", "reverse_text_seed"
    )
    assert result.returncode == 1 and not (checkout / "runs").exists()
    [line] = [line for line in result.stderr.splitlines() if "error" in line.lower()]
    assert line.startswith("error: ") and (
        "a group of runs; did you mean 'reverse_text_seed" in line
    )
    assert "Exception" not in result.stderr and "Traceback" not in result.stderr


def test_a_stage_is_a_target_by_its_marker(checkout):
    [folder] = checked_in(Workspace(checkout)).folders["reverse_text"]
    result = snakemake(checkout, "--profile", "local", f"runs/{folder}/stages/sft/DONE")
    assert result.returncode == 0 and calls(checkout) == ["init", "sft"], result.stderr


def test_a_run_without_sft_goes_from_init_to_rl(checkout):
    manifest = json.loads(
        subprocess.check_output(
            [sys.executable, "-m", "orrery.manifest.cli", "show", "reverse_text"], cwd=checkout
        )
    )
    manifest["stages"]["sft"] = None
    (checkout / "jsonnet/runs/no_sft.jsonnet").write_text(
        "{ no_sft: " + json.dumps({**manifest, "name": "no_sft"}) + " }\n"
    )
    subprocess.run(
        [sys.executable, "-m", "orrery.manifest.cli", "render", "no_sft"],
        cwd=checkout,
        check=True,
        capture_output=True,
    )
    assert snakemake(checkout, "--profile", "local", "no_sft").returncode == 0
    assert calls(checkout) == ["init", "rl", "evaluate", "report"]


def test_ctrl_c_during_a_stage_ends_the_launcher_and_all_roles_in_order(checkout):
    (folder,) = checked_in(Workspace(checkout)).folders["reverse_text"]
    run_dir = checkout / "runs" / folder
    run_dir.mkdir(parents=True)
    (run_dir / "plan.json").write_text(
        json.dumps(
            [
                {
                    "role": "trainer",
                    "index": 0,
                    "module": "launcher_fakes",
                    "num_devices": 0,
                    "ends": "itself",
                }
            ]
        )
    )
    (run_dir / "script.json").write_text(json.dumps({"0": ["trainer", ["ready", "wait"]]}))
    put_orrery(
        checkout, f"#!/bin/sh\nexec {sys.executable} {HERE}/launcher_fakes.py launch $PWD/runs/$2\n"
    )
    pipeline = snakemake(
        checkout,
        "--profile",
        "local",
        "reverse_text",
        start=True,
        PYTHONPATH=f"{HERE}:{os.environ.get('PYTHONPATH', '')}",
    )
    limit = time.monotonic() + 40
    while not (ready := run_dir / "ready.trainer.0").exists() or not ready.read_text():
        assert time.monotonic() < limit and pipeline.poll() is None, pipeline.communicate()[0]
        time.sleep(0.05)
    # As a terminal does: the whole foreground group gets it.
    os.killpg(pipeline.pid, signal.SIGINT)
    out, _ = pipeline.communicate(timeout=40)
    assert pipeline.returncode != 0
    status = read_status(run_dir)
    assert (status.state, status.roles[0].exit) == ("stopped", "exit code 143"), out
    assert not Path(f"/proc/{ready.read_text()}").exists()
