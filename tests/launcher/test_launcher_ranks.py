"""Real trainer ranks under the real launcher: one dies, or stops while the other waits for it.

On CPUs with gloo, and with nccl where this machine has two GPUs.
"""

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from orrery.launcher import runs
from orrery.manifest.identity import canonical_json
from orrery.manifest.schema import Manifest
from orrery.observe.hang_detector import STILL_S
from orrery.runtime.health import Health, read_health
from orrery.runtime.role_context import parse_role

torch = pytest.importorskip("torch")
initialize = pytest.importorskip("orrery.trainer.__main__").initialize
HERE = Path(__file__).parent
SCALE = 0.2  # of every deadline of the code; on a busy machine a step may take some seconds
END_S = 60 - STILL_S  # unscaled time for stacks, recorders and the end, within a minute in all
pytestmark = pytest.mark.timeout(120)


def launch(run_dir: Path, stuck: str = "") -> subprocess.Popen:
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "STUCK": stuck}
    argv = [sys.executable, str(HERE / "launcher_ranks.py"), str(run_dir), "sft", "2", str(SCALE)]
    return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=env, cwd=run_dir.parent)


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs")


@pytest.fixture(scope="module", params=["cpu", pytest.param("h200", marks=two_gpus)])
def accelerator(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def initialized(accelerator, tmp_path_factory) -> Path:
    """A run of two ranks after `init`, with an SFT stage that does not end by itself."""
    run_dir = tmp_path_factory.mktemp("ranks") / "stuck-0123456789ab"
    run_dir.mkdir()
    row = json.loads((HERE.parents[1] / "manifests" / "reverse_text_smoke.json").read_text())
    assert row["trainer"]["mesh"]["dp_shard"] == 2
    row["hardware"] |= {"accelerator": accelerator, "devices_per_node": 8}
    row["trainer"]["checkpoint"]["interval_steps"] = 1_000_000
    row["stages"]["sft"] |= {"num_steps": 1_000_000, "examples_per_batch": 4}
    row["stages"]["sft"]["data"]["num_problems"] = 16
    (run_dir / "manifest.json").write_bytes(canonical_json(Manifest.model_validate(row)))
    initialize(parse_role("trainer", ["--run-dir", str(run_dir), "--stage", "init"]))
    return run_dir


@pytest.fixture
def run_dir(initialized, tmp_path):
    path = tmp_path / initialized.name
    shutil.copytree(initialized, path)
    yield path
    assert not any(psutil.pid_exists(role.pid) for role in runs.read_status(path).roles)


def at_step(launcher: subprocess.Popen, run_dir: Path, step: int) -> dict[str, Health]:
    """Wait until both ranks have reached `step` and sent a heartbeat. Return their health."""
    limit_s = time.monotonic() + 90
    while launcher.poll() is None:
        ranks = read_health(run_dir, "sft", 1)
        if len(ranks) == 2 and all(
            (rank.step or 0) >= step and rank.heartbeat for rank in ranks.values()
        ):
            return ranks
        assert time.monotonic() < limit_s, ranks
        time.sleep(0.02)
    pytest.fail(kept(run_dir, launcher.stderr.read()))


def end(launcher: subprocess.Popen) -> str:
    _, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode == 1, stderr
    return stderr


def test_a_rank_that_is_killed_ends_all_and_the_others_say_where_they_were(run_dir, accelerator):
    launcher = launch(run_dir)
    victim, begin_s = at_step(launcher, run_dir, 3)["trainer.1"], time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    stderr = end(launcher)
    assert time.monotonic() - begin_s < END_S
    doing = r"(sft|waiting for batch \d+ to be tokenised) \(step "  # at the moment of its end
    assert re.search(rf"sft: trainer\.1 was killed by SIGKILL while {doing}", stderr)
    assert f"its log is {run_dir}/logs/trainer.1.log" in stderr
    if accelerator != "cpu":  # gloo's ranks fail by themselves when one is gone
        assert (run_dir / "logs/flight_recorder/rank_0").exists(), kept(run_dir, stderr)
        assert (
            recorded(run_dir, 0)["entries"]
            and "most recent call first" in (run_dir / "logs/trainer.0.log").read_text()
        )


def test_a_rank_that_stands_still_ends_all_by_its_name_and_what_each_was_doing_is_kept(
    run_dir, tmp_path
):
    """Two runs side by side: one rank is stopped from outside, the other never leaves a step."""
    stopped, asleep = run_dir, tmp_path / "asleep-0123456789ab"
    shutil.copytree(stopped, asleep)
    launchers = {stopped: launch(stopped), asleep: launch(asleep, stuck="1 6")}
    os.kill(at_step(launchers[stopped], stopped, 3)["trainer.1"].pid, signal.SIGSTOP)
    at_step(launchers[asleep], asleep, 6)
    begin_s = time.monotonic()
    said = {path: end(launcher) for path, launcher in launchers.items()}
    assert SCALE * STILL_S / 2 < time.monotonic() - begin_s < SCALE * STILL_S + END_S
    assert "sft: stall: trainer.1 sent no heartbeat for" in said[stopped], kept(
        stopped, said[stopped]
    )
    assert "sft: stall: trainer.1 made no progress for" in said[asleep], kept(asleep, said[asleep])
    assert "s while sft (step 6); trainer.0 waits" in said[asleep], kept(asleep, said[asleep])
    for path, sentence in said.items():
        logs = path / "logs"
        assert (
            f"; trainer.0 waits in a collective; stacks are in {logs}/*.log, flight "
            f"recorders in {logs}/flight_recorder;" in sentence
        ), kept(path, sentence)
        for rank in (0, 1):
            assert "most recent call first" in (logs / f"trainer.{rank}.log").read_text()
    # A stopped rank is woken to write its stacks, and runs for a moment. The other does not move.
    assert "learn_or_stop" in (asleep / "logs/trainer.1.log").read_text()
    begun = [
        max(entry["collective_seq_id"] for entry in recorded(asleep, rank)["entries"])
        for rank in (0, 1)
    ]
    assert begun[0] > begun[1]
    assert all(recorded(stopped, rank)["entries"] for rank in (0, 1))


def test_a_rank_that_stands_still_between_steps_ends_all_by_its_name_too(run_dir):
    path = run_dir / "manifest.json"
    row = json.loads(path.read_text())
    row["trainer"]["checkpoint"]["interval_steps"] = 4
    path.write_bytes(canonical_json(Manifest.model_validate(row)))
    launcher = launch(run_dir, stuck="1 4 copy")
    at_step(launcher, run_dir, 4)
    begin_s = time.monotonic()
    said = end(launcher)
    assert time.monotonic() - begin_s < SCALE * STILL_S + END_S
    assert "sft: stall: trainer.1 made no progress for" in said, kept(run_dir, said)
    assert "s while copying a checkpoint (step 4); trainer.0 waits in a collective" in said, kept(
        run_dir, said
    )


def kept(run_dir: Path, said: str) -> str:
    """Return a failed run's output, logs and health, because its folder is removed."""
    logs = run_dir / "logs"
    texts = [
        f"— {path.name}\n{path.read_text()[-4000:]}"
        for path in (*sorted(logs.glob("*.log")), *sorted(run_dir.glob("stages/*/health/*.json")))
    ]
    return "\n".join(
        [
            said,
            f"flight recorders: {sorted(path.name for path in logs.glob('flight_recorder/*'))}",
            *texts,
        ]
    )


def recorded(run_dir: Path, rank: int) -> dict:
    return pickle.loads((run_dir / "logs/flight_recorder" / f"rank_{rank}").read_bytes())
