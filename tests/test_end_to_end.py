"""A whole run as a person starts it: real Snakemake, real launcher, real vLLM behind its router, two trainer ranks."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from orrery.manifest.identity import load, run_dir
from orrery.observe.metrics import read
from orrery.transport.checkpoints import latest, verify
from orrery.transport.rollout_store import read_batch

ROOT = Path(__file__).parents[1]
NAME = "reverse_text_smoke"
BIN = Path(sys.executable).parent
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]


def start(workspace: Path, *command: str, **options) -> subprocess.Popen:
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    return subprocess.Popen(command, cwd=workspace, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)


def run(workspace: Path, *command: str) -> str:
    """What the command printed; fails the test with it where the command failed."""
    process = start(workspace, *command)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return output


def new_workspace(folder: Path) -> Path:
    """A checkout as far as the pipeline is concerned, with a `runs/` of its own."""
    folder.mkdir(exist_ok=True)
    for name in ("jsonnet", "manifests", "locks", "local", "Snakefile"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def processes_of(folder: Path) -> list[str]:
    """Command lines of living processes that were started for a run in `folder`."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(str(folder) in word for word in words):
            found.append(" ".join(words))
    return found


def rows(folder: Path, role: str, **wanted) -> list[dict]:
    return [row for row in read(folder / "metrics" / f"{role}.0.jsonl") if all(row.get(key) == value for key, value in wanted.items())]


@pytest.fixture(scope="module")
def manifest():
    return load(ROOT / "manifests" / f"{NAME}.json")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, manifest) -> Path:
    """The directory of a run that `snakemake --profile local` took from spec to report."""
    workspace = new_workspace(tmp_path_factory.mktemp("whole"))
    run(workspace, "snakemake", "--profile", "local", NAME)
    return run_dir(workspace / "runs", manifest)


def test_the_policy_learns(finished, manifest):
    result = json.loads((finished / "stages" / "evaluate" / "result.json").read_text())
    assert 0.2 <= result["before"]["reward_mean"] <= 0.45
    assert result["after"]["reward_mean"] >= result["before"]["reward_mean"] + 0.1


def test_every_step_is_trained_once_within_the_staleness_bound(finished, manifest):
    bound, batch_size = manifest.orchestrator.max_off_policy_steps, manifest.orchestrator.rollouts_per_batch
    assert [row["step"] for row in rows(finished, "trainer", stage="rl", event=None)] == list(range(1, manifest.stages.rl.num_steps + 1))
    num_versions = []
    for step in range(1, manifest.stages.rl.num_steps + 1):
        batch, _ = read_batch(finished, step)
        versions = batch.token["version"][batch.token["trained"]]
        assert versions.min() >= step - 1 - bound and versions.max() <= step - 1
        assert batch.num_samples == batch_size, "a filtered group shrank the batch"
        num_versions.append(len(np.unique(versions)))
    assert max(num_versions) > 1, "no batch mixed policy versions: the run was not asynchronous"


def test_trainer_and_engine_agree_on_equal_weights(finished, manifest):
    differences = [row["logprob_max_abs_diff_same_weights"] for row in rows(finished, "trainer", stage="rl", event=None)]
    assert differences[0] is not None, "batch 1 is sampled by version 0 alone"
    [compared] = rows(finished, "trainer", event="compare")
    assert compared["version"] == manifest.stages.rl.num_steps and compared["num_trained_tokens"] > 0, "the last version, after all updates"
    assert max(one for one in [*differences, compared["logprob_max_abs_diff_same_weights"]] if one is not None) <= 1e-4


def test_every_update_was_attested(finished, manifest):
    updates = rows(finished, "orchestrator", stage="rl", event="update")
    assert updates[0]["version"] == 0 and updates[-1]["version"] == manifest.stages.rl.num_steps
    assert all(sum(row["attested"].values()) > 0 for row in updates)


def test_both_engines_generated(finished, manifest):
    spans = read(finished / "metrics" / "orchestrator.0.spans.jsonl")
    assert {span["engine"] for span in spans if span["name"] == "generate"} == set(range(manifest.inference.num_replicas))


def test_the_report_and_its_line_are_there(finished):
    line = (finished / "report" / "summary.txt").read_text()
    assert re.fullmatch(
        rf"{NAME}: held-out reward 0\.\d\d \(0\.\d\d before RL\), ((\d+ min )?\d+|\d+\.\d) s, report: .*index\.html\n", line
    )
    assert (finished / "report" / "index.html").stat().st_size > 1_000_000
    assert list((finished / "metrics" / "tensorboard").rglob("events.*"))


def test_nothing_is_left_behind(finished):
    assert processes_of(finished) == []
    assert list(Path("/dev/shm").glob(f"orrery-{finished.name[-12:]}-*")) == []


def test_a_finished_run_is_not_run_again(finished):
    before = (finished / "status.json").read_text()
    assert "Nothing to be done" in run(finished.parents[1], "snakemake", "--profile", "local", NAME)
    assert (finished / "status.json").read_text() == before


def test_whichever_role_is_killed_the_run_ends_by_its_name_and_the_next_start_goes_on(finished, manifest, tmp_path):
    workspace = new_workspace(tmp_path / "killed")
    folder = run_dir(workspace / "runs", manifest)
    shutil.copytree(
        finished, folder, ignore=shutil.ignore_patterns("rl", "evaluate", "report", "checkpoints", "rollouts", "metrics", "logs")
    )
    (folder / "metrics").mkdir()
    interval, last = manifest.trainer.checkpoint.interval_steps, manifest.stages.rl.num_steps
    kept = [
        kill(role, number * interval, workspace, folder, last) for number, role in enumerate(("inference", "orchestrator", "trainer"), 1)
    ]

    run(workspace, "orrery", "run", NAME, "rl")
    trained = rows(folder, "trainer", stage="rl", event=None)
    assert [row["step"] for row in trained] == list(range(1, last + 1))
    attempts = [row["attempt"] for row in trained]
    assert attempts == sorted(attempts)
    assert all(trained[step - 1]["attempt"] < trained[step]["attempt"] for step in kept), "it did not go on from the checkpoint"
    assert latest(folder) == last
    verify(folder / "checkpoints" / f"step_{last}")
    assert (folder / "weights" / "rl" / "model.safetensors").exists()


def kill(role: str, after_step: int, workspace: Path, folder: Path, last: int) -> int:
    """Start the RL stage, kill the role once a step after `after_step` is trained and that one's checkpoint is whole.

    The step of the checkpoint that the run's last words name.
    """
    launcher = start(workspace, "orrery", "run", NAME, "rl")
    step = 0
    while step <= after_step or (latest(folder) or 0) < after_step:
        step = max((row["step"] for row in rows(folder, "trainer", stage="rl", event=None)), default=0)
        assert launcher.poll() is None, launcher.communicate()[0]
        time.sleep(0.05)
    assert step < last, "the run ended before it could be killed"
    roles = json.loads((folder / "status.json").read_text())["roles"]
    os.kill(next(one["pid"] for one in roles if one["name"] == f"{role}.0"), signal.SIGKILL)
    killed_s = time.monotonic()
    output, _ = launcher.communicate()
    assert time.monotonic() - killed_s < 15
    assert launcher.returncode == 1
    sentence = output.strip().splitlines()[-1]
    kept = latest(folder)
    assert f"{role}.0 was killed by SIGKILL" in sentence and f"to go on from step {kept}" in sentence
    assert kept is not None and kept >= after_step
    assert processes_of(folder) == [] and list(Path("/dev/shm").glob(f"orrery-{folder.name[-12:]}-*")) == []
    return kept
