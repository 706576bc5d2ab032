"""The end of a role, seen from outside, with real processes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from orrery.observe import hang_detector
from orrery.runtime import run_directory
from orrery.runtime.health import HealthFile, Heartbeat, health_dir, read_health
from orrery.runtime.process_control import LAUNCHER_PID
from orrery.runtime.role_context import parse_role


def role(tmp_path: Path, body: str, prelude: str = "") -> subprocess.Popen:
    """Start a role whose `with` block is `body`; it prints `ready` if a test waits for it."""
    lines = "\n".join("    " + line for line in body.splitlines())
    code = "import time, sys, os\nfrom orrery.runtime.role_context import role_process\n"
    code += f"from orrery.manifest.errors import *\n{prelude}\n"
    code += f"with role_process('trainer') as ctx:\n{lines}\n"
    argv = [
        "--run-dir",
        str(tmp_path),
        "--stage",
        "rl",
        "--index",
        "1",
        "--attempt",
        "3",
        "--port",
        "7",
    ]
    return subprocess.Popen(
        [sys.executable, "-c", code, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_role_that_ends_well_leaves_health_done_and_its_rows(tmp_path):
    process = role(
        tmp_path,
        "ctx.metrics.write(4, loss=1.5)\nassert (ctx.port, ctx.stage, ctx.name) == (7, 'rl', "
        "'trainer.1')",
    )
    assert process.wait(20) == 0, process.stderr.read()
    assert read_health(tmp_path, "rl", attempt=3)["trainer.1"].doing == "done"
    row = json.loads((tmp_path / "metrics/trainer.1.jsonl").read_text())
    assert (row["step"], row["attempt"], row["stage"], row["loss"]) == (4, 3, "rl", 1.5)


def test_a_role_may_open_as_many_files_as_its_user(tmp_path):
    prelude = "from resource import *\nmost = getrlimit(RLIMIT_NOFILE)[1]\n"
    prelude += "setrlimit(RLIMIT_NOFILE, (64, most))"
    process = role(
        tmp_path, "assert getrlimit(RLIMIT_NOFILE) == (min(most, 1 << 20), most)", prelude
    )
    assert process.wait(20) == 0, process.stderr.read()


@pytest.mark.parametrize(("error", "code"), [("OrreryError", 2), ("RunFailed", 1)])
def test_an_orrery_error_is_one_line_without_a_traceback(tmp_path, error, code):
    process = role(tmp_path, f"raise {error}('trainer.mesh: does not fit')")
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == code
    assert stderr.strip() == "error: trainer.mesh: does not fit"
    assert read_health(tmp_path, "rl")["trainer.1"].error == "trainer.mesh: does not fit"


@pytest.mark.parametrize(
    ("level", "said"),
    [("debug", ["DEBUG", "INFO"]), ("Info", ["INFO"]), ("", ["INFO"]), ("warning", [])],
    ids=lambda value: str(value),
)
def test_a_role_logs_from_the_named_level_on(tmp_path, monkeypatch, level, said):
    monkeypatch.setenv("ORRERY_LOG_LEVEL", level)
    process = role(
        tmp_path,
        "ctx.log.info('by itself')\nwith ctx.health.waiting('batch 4 from orchestrator'):\n    "
        "pass",
    )
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 0, stderr
    assert sorted({line.split()[2] for line in stderr.splitlines()}) == said
    assert ("waiting for batch 4 from orchestrator" in stderr) is (level == "debug")


def test_a_level_that_there_is_not_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("ORRERY_LOG_LEVEL", "loud")
    process = role(tmp_path, "pass")
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 2
    assert (
        stderr.strip() == "error: ORRERY_LOG_LEVEL: 'loud' is not a level; "
        "choose from debug, info, warning, error"
    )


def test_another_exception_leaves_a_traceback_and_its_name_in_health(tmp_path):
    process = role(tmp_path, "raise KeyError('k')")
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 1 and "Traceback" in stderr
    assert read_health(tmp_path, "rl")["trainer.1"].error == "KeyError: 'k'"


@pytest.mark.parametrize("code", ["0", "", "143", "75", "'words'"])
def test_a_role_whose_body_calls_exit_has_failed_whatever_the_code(tmp_path, code):
    process = role(tmp_path, f"sys.exit({code})")
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 1 and "Traceback" in stderr
    health = read_health(tmp_path, "rl")["trainer.1"]
    assert (health.doing, health.error) == (
        "failed",
        f"exit({code or None}) was called before the role's work was done",
    )


def test_sigterm_runs_finally_blocks(tmp_path):
    process = role(
        tmp_path,
        "try:\n    print('ready', flush=True)\n    time.sleep(60)\nfinally:\n    print('tidy', "
        "flush=True)",
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "tidy\n"
    assert process.wait(20) == 143
    assert read_health(tmp_path, "rl")["trainer.1"].doing == "terminated"


def test_a_role_that_winds_down_has_an_exit_code_of_its_own_and_is_neither_failed_nor_done(
    tmp_path,
):
    process = role(
        tmp_path, "from orrery.runtime.process_control import Preempted\nraise Preempted(7)"
    )
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 75 and "Traceback" not in stderr
    assert re.search(
        r"(?m)^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO trainer\.1: .*wound down at step 7", stderr
    ), "its log says the day too"
    health = read_health(tmp_path, "rl")["trainer.1"]
    assert health.sentence() == "wound down at step 7" and health.error is None
    assert hang_detector.find_stall({"trainer.1": health}, health.time_s + 1e6) is None


def test_sigusr1_writes_stacks(tmp_path):
    process = role(
        tmp_path,
        "def stuck_here():\n    print('ready', flush=True)\n    time.sleep(60)\nstuck_here()",
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    assert any("stuck_here" in line for line in iter(process.stderr.readline, "")), (
        "no stack arrived"
    )
    process.kill()
    process.wait(20)


def test_a_role_whose_parent_is_killed_runs_its_callbacks_and_takes_its_children_along(tmp_path):
    body = (
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)'])\n"
        f"ctx.on_orphaned(lambda: open({str(tmp_path / 'called')!r}, 'w').close())\n"
        "print(os.getpid(), child.pid, flush=True)\n"
        "time.sleep(120)"
    )
    code = "import subprocess, sys\nsubprocess.Popen(sys.argv[1:], start_new_session=True).wait()"
    with role(tmp_path, body) as unused:  # only for its argv
        unused.kill()
        argv = unused.args
    parent = subprocess.Popen(
        [sys.executable, "-c", code, *argv], stdout=subprocess.PIPE, text=True
    )
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.wait(20)
    assert gone(pids, within_s=15), "an orphan lives"
    assert (tmp_path / "called").exists()


def gone(pids: list[int], within_s: float) -> bool:
    """All `pids` have ended (a zombie has ended) before the time is over."""
    limit = time.monotonic() + within_s

    def alive(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    while any(map(alive, pids)):
        if time.monotonic() > limit:
            return False
        os.sched_yield()
        time.sleep(0.02)
    return True


def test_health_names_the_wait_that_runs_out_first_and_forgets_closed_ones(tmp_path):
    health = HealthFile(tmp_path, "rl", "orchestrator", 0, 1)
    health.doing("dispatching", step=2)
    with (
        health.waiting("rollouts from inference", behind_s=40.0),
        health.waiting("version 3 from trainer", deadline_s=30),
    ):
        row = json.loads(health.path.read_text())
        assert row["waiting_for"] == "version 3 from trainer" and row[
            "deadline_s"
        ] == pytest.approx(row["since_s"] + 30)
        waits = {wait.what: wait for wait in read_health(tmp_path, "rl")["orchestrator.0"].waits}
        assert {what: wait.behind_s for what, wait in waits.items()} == {
            "rollouts from inference": 40.0,
            "version 3 from trainer": None,
        }
    after = read_health(tmp_path, "rl")["orchestrator.0"]
    assert after.wait is None and (after.doing, after.step) == ("dispatching", 2)


@pytest.mark.parametrize("launched", [True, False])
def test_only_a_role_that_the_launcher_started_removes_the_runs_shared_memory_when_orphaned(
    tmp_path, monkeypatch, launched
):
    run_dir = tmp_path / f"r-{os.urandom(6).hex()}"
    weights = run_directory.SHARED_MEMORY / f"{run_directory.memory_prefix(run_dir)}attempt1"
    monkeypatch.delenv(LAUNCHER_PID, raising=False)
    if launched:
        monkeypatch.setenv(LAUNCHER_PID, str(os.getppid()))
    ctx = parse_role("report", ["--run-dir", str(run_dir), "--stage", "report"])
    weights.mkdir()
    try:
        ctx.parent_watch._run_callbacks()
        assert weights.exists() is not launched
    finally:
        run_directory.remove_memory(run_directory.memory_prefix(run_dir))


def test_a_full_disk_is_named_in_health_with_the_file_and_what_to_do(tmp_path):
    process = role(
        tmp_path, "import errno\nraise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), '/runs/x')"
    )
    process.communicate(timeout=20)
    error = read_health(tmp_path, "rl")["trainer.1"].error
    assert process.returncode == 1 and error.startswith(
        "/runs/x: No space left on device; free some"
    )


def test_on_a_full_disk_health_is_written_in_place(tmp_path):
    health = HealthFile(tmp_path, "rl", "trainer", 0, 1)
    health.path.with_name(f".{health.path.name}.tmp").symlink_to("/dev/full")
    for what in ("training, in many words that leave nothing of themselves behind", "short"):
        health.doing(what, step=2)
        assert read_health(tmp_path, "rl")["trainer.0"].doing == what
    health.failed("No space left on device")
    assert read_health(tmp_path, "rl")["trainer.0"].error == "No space left on device"


def test_health_that_cannot_be_written_does_not_end_the_process(tmp_path):
    health = HealthFile(tmp_path, "rl", "trainer", 0, 1)
    health.path.with_name(f".{health.path.name}.tmp").symlink_to("/dev/full")
    health.path.unlink()
    health.failed("the first error, which must stay the one that is told")
    assert not health.path.exists()


def test_health_files_that_nobody_of_ours_wrote_are_passed_over(tmp_path):
    HealthFile(tmp_path, "rl", "trainer", 0, 1)
    for name, text in (("a", "{"), ("b", "{}"), ("c", "[]"), ("d", '{"waits": [[]]}')):
        (health_dir(tmp_path, "rl") / f"{name}.json").write_text(text)
    assert list(read_health(tmp_path, "rl")) == ["trainer.0"]


def test_a_heartbeat_changes_nothing_else_and_an_activity_ends_the_limit_of_the_one_before(
    tmp_path,
):
    health = HealthFile(tmp_path, "rl", "trainer", 0, 1)
    health.doing("training", step=2, still_s=40.0)
    before = read_health(tmp_path, "rl")["trainer.0"]
    for beats in (1, 2):
        health.beat(5, 4, 1)
        assert read_health(tmp_path, "rl")["trainer.0"] == replace(
            before, heartbeat=Heartbeat(beats, 5, 4, 1)
        )
    health.doing("publishing version 2")
    assert read_health(tmp_path, "rl")["trainer.0"].still_s is None


def test_a_process_that_is_stuck_in_a_library_still_answers_with_stacks_and_more(tmp_path):
    code = """
import ctypes
from orrery.runtime.role_context import call_on_signal
call_on_signal(lambda: (ctx.run_dir / 'answered').touch())
mutex = ctypes.create_string_buffer(64)
ctx.health.doing('stuck in a library')
for _ in range(2):  # the second never comes back, also not for a signal
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""
    process = role(tmp_path, code)
    try:
        limit_s = time.monotonic() + 20
        while (
            "trainer.1" not in (now := read_health(tmp_path, "rl"))
            or now["trainer.1"].doing != "stuck in a library"
        ):
            assert time.monotonic() < limit_s
            time.sleep(0.02)
        for _ in range(2):
            process.send_signal(signal.SIGUSR1)
            while not (tmp_path / "answered").exists():
                assert time.monotonic() < limit_s
                time.sleep(0.02)
            (tmp_path / "answered").unlink()
    finally:
        process.kill()
    _, stderr = process.communicate(timeout=20)
    assert stderr.count("most recent call first") >= 4, (
        "twice the stacks of the main thread and of others"
    )
