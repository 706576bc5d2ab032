"""A whole run with real Snakemake, launcher, vLLM behind its router, and two trainer ranks."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest
from listeners import listening, undeclared

from orrery.manifest.identity import canonical_json, load, run_dir
from orrery.manifest.schema import Manifest
from orrery.runtime.metrics import read
from orrery.runtime.network import LOOPBACK, Purpose, authorization
from orrery.wire.checkpoints import steps, verify, whole_dir
from orrery.wire.columns import read_batch
from orrery.wire.weight_wire import weight_dir
from orrery.wire.weight_wire.coordinator import CURRENT, connect, find_wire
from workspace import linked

ROOT = Path(__file__).parents[1]
NAME = "reverse_text_smoke"
# The run that breaks: its steps, and the steps from one checkpoint to the next. Steps must last
# longer than the launcher takes from a kill to its last words, so batches are whole.
NUM_STEPS_WITH_LOSSES, INTERVAL = 16, 2
BIN = Path(sys.executable).parent
TOKEN = "7ab1e5" * 5
# `orrery` with a known token in its next attempt, as processes never reveal it.
KNOWN_TOKEN = f"""
import secrets
from orrery.launcher.cli import main
drawn = secrets.token_hex
secrets.token_hex = lambda num_bytes: {TOKEN!r} if num_bytes == 16 else drawn(num_bytes)
main()
"""
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]


def start(workspace: Path, *command: str, **options) -> subprocess.Popen:
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    return subprocess.Popen(
        command,
        cwd=workspace,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **options,
    )


def run(workspace: Path, *command: str) -> str:
    """Return the command's output. Fail with it if the command fails."""
    process = start(workspace, *command)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return output


def processes_of(folder: Path) -> list[str]:
    """Return command lines of living processes of a run in `folder`."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(
            str(folder) in word for word in words
        ):
            found.append(" ".join(words))
    return found


def rows(folder: Path, role: str, **wanted) -> list[dict]:
    return [
        row
        for row in read(folder / "metrics" / f"{role}.0.jsonl")
        if all(row.get(key) == value for key, value in wanted.items())
    ]


@pytest.fixture(scope="module")
def manifest():
    return load(ROOT / "manifests" / f"{NAME}.json")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, manifest) -> Path:
    """The directory of a run that `snakemake --profile local` took from spec to report."""
    workspace = linked(tmp_path_factory.mktemp("whole"))
    run(workspace, "snakemake", "--profile", "local", NAME)
    return run_dir(workspace / "runs", manifest)


def test_the_policy_learns(finished, manifest):
    result = json.loads((finished / "stages" / "evaluate" / "result.json").read_text())
    assert 0.2 <= result["before"]["reward_mean"] <= 0.45
    assert result["after"]["reward_mean"] >= result["before"]["reward_mean"] + 0.1


def test_every_step_is_trained_once_within_the_staleness_bound(finished, manifest):
    bound, batch_size = (
        manifest.orchestrator.max_off_policy_steps,
        manifest.orchestrator.rollouts_per_batch,
    )
    assert [row["step"] for row in rows(finished, "trainer", stage="rl", event=None)] == list(
        range(1, manifest.stages.rl.num_steps + 1)
    )
    staleness = []
    for step in range(1, manifest.stages.rl.num_steps + 1):
        batch, _ = read_batch(finished, step)
        versions = batch.token["version"][batch.token["trained"]]
        assert versions.min() >= step - 1 - bound and versions.max() <= step - 1
        assert batch.num_samples == batch_size, "a filtered group shrank the batch"
        staleness.append(step - 1 - versions.min())
    assert max(staleness) > 0, "the newest version sampled every batch: the run was synchronous"


def test_trainer_and_engine_agree_on_equal_weights(finished, manifest):
    differences = [
        row["logprob_max_abs_diff_same_weights"]
        for row in rows(finished, "trainer", stage="rl", event=None)
    ]
    assert differences[0] is not None, "batch 1 is sampled by version 0 alone"
    [compared] = rows(finished, "trainer", event="compare")
    assert (
        compared["version"] == manifest.stages.rl.num_steps and compared["num_trained_tokens"] > 0
    ), "the last version, after all updates"
    assert (
        max(
            one
            for one in [*differences, compared["logprob_max_abs_diff_same_weights"]]
            if one is not None
        )
        <= 1e-4
    )


def test_every_update_was_attested(finished, manifest):
    updates = rows(finished, "orchestrator", stage="rl", event="update")
    assert updates[0]["version"] == 0 and updates[-1]["version"] == manifest.stages.rl.num_steps
    assert all(sum(row["attested"].values()) > 0 for row in updates)


def test_both_engines_generated(finished, manifest):
    spans = read(finished / "metrics" / "orchestrator.0.spans.jsonl")
    assert {span["engine"] for span in spans if span["name"] == "generate"} == set(
        range(manifest.inference.num_replicas)
    )


def test_the_report_and_its_line_are_there(finished):
    line = (finished / "report" / "summary.txt").read_text()
    assert re.fullmatch(
        rf"{NAME}: held-out reward 0\.\d\d \(0\.\d\d before RL\), "
        r"\d+% of training rollouts without signal, "
        r"((\d+ min )?\d+|\d+\.\d) s, report: .*index\.html\n",
        line,
    )
    assert (finished / "report" / "index.html").stat().st_size > 1_000_000
    assert list((finished / "metrics" / "tensorboard").rglob("events.*"))


def test_every_role_of_every_stage_ends_with_code_0_or_as_it_was_asked(finished):
    """A crash in a library's destructor would end a finished role by a signal."""
    stages = json.loads((finished / "receipt.json").read_text())["stages"]
    rows = {stage: entry["attempts"] for stage, entry in stages.items() if stage != "report"}
    endings = {
        (stage, name): how for stage, [row] in rows.items() for name, how in row["endings"].items()
    }
    asked = {name for name in endings if name[1].split(".")[0] in ("inference", "router")}
    assert {
        name: how for name, how in endings.items() if name not in asked and how != "exit code 0"
    } == {}
    assert {
        name: how
        for name, how in endings.items()
        if name in asked and how not in ("exit code 0", "exit code 143", "SIGTERM")
    } == {}
    assert len(asked) >= 2 * 3  # two engines and a router, in two stages


def test_nothing_is_left_behind(finished):
    assert processes_of(finished) == []
    assert list(Path("/dev/shm").glob(f"*orrery-{finished.name[-12:]}-*")) == []


def test_a_finished_run_is_not_run_again(finished):
    before = (finished / "status.json").read_text()
    assert "Nothing to be done" in run(finished.parents[1], "snakemake", "--profile", "local", NAME)
    assert (finished / "status.json").read_text() == before


@dataclass(frozen=True)
class Broken:
    """A run whose RL stage lost and regained both engines, and ended with the third loss."""

    manifest: Manifest
    workspace: Path
    folder: Path
    version: int  # that all engines had when the first was lost
    kept: int  # the step of the checkpoint that the last words name
    sentence: str
    num_sockets: int  # that its processes listened on, once it trained; 0 where they cannot be read
    undeclared: list[str]  # sockets missing in `LISTENERS`


@pytest.fixture(scope="module")
def broken(request, finished, manifest, tmp_path_factory) -> Broken:
    """Kill one engine during an update, then the other, and await both; then kill one more.

    `request.param` names the weight wire. On a direct wire all engines take an update
    together, and a restarted engine gets its weights from the trainer ranks.
    """
    content = manifest.model_dump(mode="json")
    content["inference"]["max_restarts"], content["stages"]["rl"]["num_steps"] = (
        2,
        NUM_STEPS_WITH_LOSSES,
    )
    content["trainer"]["checkpoint"]["interval_steps"] = INTERVAL
    content["transport"]["weights"] = request.param
    lossy = Manifest.model_validate(content)
    workspace = linked(tmp_path_factory.mktemp("broken"))
    folder = run_dir(workspace / "runs", lossy)
    not_yet = shutil.ignore_patterns(
        "rl", "evaluate", "report", "checkpoints", "rollouts", "metrics", "logs"
    )
    shutil.copytree(finished, folder, ignore=not_yet)
    (folder / "manifest.json").write_bytes(canonical_json(lossy))

    launcher = start(workspace, sys.executable, "-c", KNOWN_TOKEN, "run", folder.name, "rl")
    await_row(launcher, folder, "trainer", stage="rl", step=1)
    assert not [
        process
        for process in psutil.Process(launcher.pid).children(recursive=True)
        if TOKEN in told_of(process)
    ]
    roles = {
        role["pid"]: role["name"].split(".")[0]
        for role in json.loads((folder / "status.json").read_text())["roles"]
    }
    # Roles hide their open files from their own user.
    sockets = listening(roles) if os.geteuid() == 0 else []
    version = (kill_in_a_take if request.param == "nccl" else kill_while_paused)(
        launcher, folder, "inference.1"
    )
    await_row(launcher, folder, "orchestrator", event="engine_fenced", engine=1)
    await_update(launcher, folder, after=version)
    assert not rows(folder, "orchestrator", event="engine_healthy"), (
        "it came back before the others had gone on without it"
    )
    os.kill(pid_of(folder, "inference.0"), signal.SIGKILL)
    for engine in (0, 1):
        await_row(launcher, folder, "orchestrator", event="engine_healthy", engine=engine)
    last = rows(folder, "trainer", stage="rl", event=None)[-1]["step"]
    await_row(launcher, folder, "trainer", stage="rl", event=None, step=last + 1)
    kept, sentence = kill("inference", INTERVAL, launcher, folder)
    return Broken(
        lossy,
        workspace,
        folder,
        version,
        kept,
        sentence,
        len(sockets),
        undeclared(sockets, LOOPBACK),
    )


@pytest.mark.skipif(
    os.geteuid() != 0, reason="NOT TESTED: what a run listens on, which root alone may read"
)
@pytest.mark.parametrize("broken", ["files", "nccl"], indirect=True)
def test_every_socket_of_the_run_is_declared(broken):
    assert broken.num_sockets > 8 and broken.undeclared == []


@pytest.mark.parametrize("broken", ["files", "nccl"], indirect=True)
def test_engines_that_are_killed_come_back_with_the_current_version_and_the_run_goes_on(broken):
    folder = broken.folder
    lost, back = (
        rows(folder, "orchestrator", event=event) for event in ("engine_fenced", "engine_healthy")
    )
    assert [row["engine"] for row in lost[:2]] == [1, 0]
    assert sorted((row["engine"], row["incarnation"]) for row in back) == [(0, 1), (1, 1)]
    assert all(row["version"] > broken.version for row in back), (
        "an engine serves what it was started with"
    )
    assert "engine 1" in lost[0]["why"] and "engine 0" in lost[1]["why"], (
        "by a call of the update, or by a request that ended first"
    )
    if broken.manifest.transport.weights == "nccl":
        takes = rows(folder, "trainer", event="weights_sent")
        sent = [row["version"] for row in takes if not row["error"]]
        failed = next(row for row in takes if row["error"])
        assert "engine 1" in failed["error"], failed
        assert failed["version"] == broken.version + 1 and failed["version"] in sent, (
            "engine 0 took it alone"
        )
        assert all(row["version"] in sent for row in back)
    attempt = back[0]["attempt"]
    trained = rows(folder, "trainer", stage="rl", event=None, attempt=attempt)
    assert [row["step"] for row in trained] == list(range(1, len(trained) + 1)) and len(
        trained
    ) >= broken.kept
    assert trained[-1]["time_s"] > max(row["time_s"] for row in back), "it did not go on"
    assert max(row["logprob_max_abs_diff_same_weights"] or 0 for row in trained) <= 1e-4
    last = rows(folder, "orchestrator", stage="rl", event="batch", attempt=attempt)[-1]
    assert last["dropped"]["engine_gone"] > 0
    receipts = json.loads((folder / "receipt.json").read_text())["stages"]["rl"]["attempts"]
    [restarts] = [
        receipt["engine_restarts"] for receipt in receipts if receipt["attempt"] == attempt
    ]
    assert restarts == {"inference.0": 1, "inference.1": 1}
    assert "restart 1" in (folder / "logs" / "inference.0.log").read_text()
    assert (
        "engines were started again 2 times, and inference.max_restarts allows no more"
        in broken.sentence
    )


def await_row(launcher: subprocess.Popen, folder: Path, role: str, **wanted) -> None:
    await_true(launcher, lambda: rows(folder, role, **wanted))


def await_update(launcher: subprocess.Popen, folder: Path, after: int) -> None:
    """Wait until engines took a version later than `after`. They may skip versions."""
    updates = partial(rows, folder, "orchestrator", event="update")
    await_true(launcher, lambda: any(row["version"] > after for row in updates()))


def await_true(launcher: subprocess.Popen, condition: Callable[[], object]) -> None:
    while not condition():
        assert launcher.poll() is None, launcher.communicate()[0]
        time.sleep(0.05)


def pid_of(folder: Path, name: str) -> int:
    return next(
        role["pid"]
        for role in json.loads((folder / "status.json").read_text())["roles"]
        if role["name"] == name
    )


def kill_in_a_take(launcher: subprocess.Popen, folder: Path, name: str) -> int:
    """Kill an engine during a transfer that cannot end, because the engine stands still.

    Transfers are short, so the trainer stands still from its grant until the engine has begun. If
    the transfer ended before that, try the next version.
    """
    trainer, engine = (psutil.Process(pid_of(folder, each)) for each in ("trainer.0", name))
    wire = weight_dir(
        folder, rows(folder, "trainer", stage="rl", event=None)[-1]["attempt"], num_nodes=1
    )
    store, is_on, last = connect(find_wire(wire)), False, 0

    def current() -> int:
        return store.get(CURRENT, int, "trainer 0, the transfer")

    while not is_on:
        before = set(wire.glob("version_*.json"))
        while not (found := set(wire.glob("version_*.json")) - before):
            assert launcher.poll() is None, launcher.communicate()[0]
            last = current()  # of the version before
            time.sleep(0.001)
        version = int(found.pop().stem.removeprefix("version_"))
        until = time.monotonic() + 5
        while current() in (0, last) and time.monotonic() < until:
            time.sleep(0.001)
        trainer.suspend()
        try:
            until = time.monotonic() + 5
            while not (has_begun := is_paused(folder, name)) and time.monotonic() < until:
                time.sleep(0.002)
            processes = [engine, *engine.children(recursive=True)] if has_begun else []
            for each in processes:
                each.suspend()
        finally:
            trainer.resume()
        time.sleep(2)
        is_on = has_begun and not rows(folder, "trainer", event="weights_sent", version=version)
        for each in reversed(processes):  # before the parent could end them
            each.kill() if is_on else each.resume()
    return version - 1


def kill_while_paused(launcher: subprocess.Popen, folder: Path, name: str) -> int:
    """Kill an engine between an update's pause and resume. Return the engines' version before."""
    engine = psutil.Process(pid_of(folder, name))
    while not is_paused(folder, name):
        assert launcher.poll() is None, launcher.communicate()[0]
        time.sleep(0.002)
    version = max(row["version"] for row in rows(folder, "orchestrator", event="update"))
    engine.kill()
    return version


def told_of(process: psutil.Process) -> str:
    """A process's environment and command line, as root may read them."""
    try:
        return f"{process.environ()} {process.cmdline()}"
    except psutil.Error:
        return ""


def is_paused(folder: Path, name: str) -> bool:
    """Return whether an engine is paused: it says so, or is silent while it takes weights."""
    url = json.loads((folder / "stages" / "rl" / "endpoints" / f"{name}.json").read_text())["url"]
    asked = urllib.request.Request(
        f"{url}/is_paused", headers=authorization(TOKEN, Purpose.ADMINISTER)
    )
    try:
        return json.loads(urllib.request.urlopen(asked, timeout=5).read())["is_paused"]
    except TimeoutError:
        return True


@pytest.mark.parametrize("broken", ["nccl"], indirect=True)
def test_whichever_role_is_killed_the_run_ends_by_its_name_and_the_next_start_goes_on(broken):
    folder, last = broken.folder, broken.manifest.stages.rl.num_steps
    kept = [broken.kept]  # an engine was killed
    for role in ("orchestrator", "trainer"):
        launcher = start(broken.workspace, "orrery", "run", folder.name, "rl")
        kept.append(kill(role, kept[-1] + INTERVAL, launcher, folder)[0])

    run(broken.workspace, "orrery", "run", folder.name, "rl")
    trained = rows(folder, "trainer", stage="rl", event=None)
    assert [row["step"] for row in trained] == list(range(1, last + 1))
    attempts = [row["attempt"] for row in trained]
    assert attempts == sorted(attempts)
    assert all(trained[step - 1]["attempt"] < trained[step]["attempt"] for step in kept), (
        "it did not go on from the checkpoint"
    )
    assert max(row["logprob_max_abs_diff_same_weights"] or 0 for row in trained) <= 1e-4
    assert steps(folder)[-1] == last
    verify(whole_dir(folder, last))
    assert (folder / "weights" / "rl" / "model.safetensors").exists()


def kill(role: str, after_step: int, launcher: subprocess.Popen, folder: Path) -> tuple[int, str]:
    """Kill a role of RL once a step after `after_step` is trained and checkpointed.

    Return the step of the checkpoint that the run's last message names, and the message.
    """
    step = 0
    while step <= after_step or max(steps(folder), default=0) < after_step:
        step = max(
            (row["step"] for row in rows(folder, "trainer", stage="rl", event=None)), default=0
        )
        assert launcher.poll() is None, launcher.communicate()[0]
        time.sleep(0.05)
    assert step < NUM_STEPS_WITH_LOSSES, "the run ended before it could be killed"
    os.kill(pid_of(folder, f"{role}.0"), signal.SIGKILL)
    killed_s = time.monotonic()
    output, _ = launcher.communicate()
    assert time.monotonic() - killed_s < 15
    assert launcher.returncode == 1
    sentence = output.strip().splitlines()[-1]
    kept = steps(folder)[-1]
    assert (
        f"{role}.0 was killed by SIGKILL" in sentence and f"to go on from step {kept}" in sentence
    )
    assert kept >= after_step
    assert (
        processes_of(folder) == []
        and list(Path("/dev/shm").glob(f"*orrery-{folder.name[-12:]}-*")) == []
    )
    return kept, sentence
