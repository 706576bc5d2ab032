"""The launcher with real processes: how a stage ends, in every way that it can."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from launcher_stages import alive, end, launch, ready, text, wait_for

from orrery.launcher import runs, stage, supervisor
from orrery.launcher.failure import named_processes
from orrery.launcher.process import ended_within
from orrery.launcher.runs import newest_checkpoint
from orrery.observe.progress import Observer, Progress
from orrery.runtime import process_control, run_directory
from orrery.runtime.health import HANG_S, read_health
from orrery.runtime.metrics import MetricsFile, MetricsTail, read
from orrery.runtime.run_directory import done_path, request_path

pytestmark = pytest.mark.timeout(120)


def test_a_stage_whose_processes_end_well_stops_its_servers_and_is_done(run_dir):
    launcher = launch(
        run_dir,
        ("inference", ["child", "shm", "ready", "serve"]),
        ("trainer", ["child", "look", "until asked"]),
        ("orchestrator", []),
    )
    ready(run_dir, "inference.0")
    (run_dir / "go").touch()
    code, stderr = end(launcher)
    assert code == 0, stderr
    done = json.loads((run_dir / "stages/rl/DONE").read_text())
    # Two clocks.
    assert done["attempt"] == 1 and done["wall_s"] == pytest.approx(
        done["ended_s"] - done["started_s"], abs=0.05
    )
    now = runs.read_status(run_dir)
    assert (now.state, now.stage, now.attempt) == ("done", "rl", 1)
    assert {role.name: role.exit for role in now.roles} == {
        "inference.0": "exit code 143", "trainer.1": "exit code 0", "orchestrator.2": "exit code 0"
    }  # fmt: skip
    assert "=== rl, attempt 1" in (run_dir / "logs/trainer.1.log").read_text()
    looked = json.loads((run_dir / "look.trainer.1.json").read_text())
    assert looked["env"]["CUDA_VISIBLE_DEVICES"] == "" and (
        looked["token_length"],
        looked["told"],
    ) == (32, [])
    assert looked["port"] == next(role.port for role in now.roles if role.name == "trainer.1")
    if os.cpu_count() > 1:
        assert looked["cores"] == next(role.cores for role in now.roles if role.name == "trainer.1")
    assert list((run_dir / "metrics/tensorboard").rglob("events*"))


def test_a_failing_role_ends_the_stage_with_its_own_sentence(run_dir):
    code, stderr = end(launch(run_dir, ("inference", ["serve"]), ("trainer", ["wait and fail"])))
    assert code == 1
    assert (
        "rl: trainer.1 ended with exit code 1 while waiting for batch 4 from "
        "orchestrator (step 3): nothing came" in stderr
    )
    assert f"its log is {run_dir}/logs/trainer.1.log; type `make demo` to start rl again" in stderr
    assert runs.read_status(run_dir).state == "failed" and not (run_dir / "stages/rl/DONE").exists()


def test_a_role_that_runs_out_of_memory_asks_for_a_change_of_the_spec(run_dir):
    code, stderr = end(
        launch(run_dir, ("inference", ["serve"]), ("trainer", ["run out of memory"]))
    )
    run = run_dir.name.rpartition("-")[0]
    steps = f"in the spec, type `orrery render {run}`, then `make demo`"
    assert code == 1 and stderr.strip().endswith(steps) and "to start rl again" not in stderr


@pytest.mark.parametrize("fails", [True, False])
def test_an_error_that_names_another_process_leaves_the_last_word_to_that_one_if_it_fails_too(
    run_dir, fails
):
    """An engine notices the death of its core later than its callers."""
    launcher = launch(
        run_dir, ("inference", ["until asked", "fail"]), ("orchestrator", ["fail of engine 0"])
    )
    wait_for(
        lambda: "engine 0 is gone" in text(run_dir / "stages/rl/health/orchestrator.1.json"), 30
    )
    if fails:
        (run_dir / "go").touch()
    code, stderr = end(launcher)
    assert code == 1
    if fails:
        assert (
            "rl: inference.0 ended with exit code 1 while acting (step 3): the moon is "
            "in the way; its log is" in stderr
        )
    else:
        assert (
            "rl: orchestrator.1 ended with exit code 1 while acting (step 3): engine 0 is gone"
            in stderr
        )


def test_which_processes_an_error_names():
    names = ("inference.0", "inference.1", "router.0", "trainer.1", "orchestrator.0")
    assert named_processes("engine 1 is unhealthy (/health: HTTP 500); see its log", names) == {
        "inference.1"
    }
    assert named_processes("router is gone (/add_worker: TimeoutError)", names) == {"router.0"}
    assert named_processes("the address of trainer.1 did not come", names) == {"trainer.1"}
    assert (
        named_processes("engine 7 is gone; see engine.log of trainer.12", names)
        == named_processes(None, names)
        == set()
    )


def test_a_role_that_breaks_before_it_begins_is_quoted(run_dir):
    code, stderr = end(launch(run_dir, ("trainer", ["break at import"])))
    assert code == 1
    assert (
        "trainer.0 ended with exit code 1 before its first report: its last line is "
        "'ImportError: no module named nowhere'" in stderr
    )


def test_a_server_that_leaves_early_is_a_failure(run_dir):
    code, stderr = end(launch(run_dir, ("inference", []), ("trainer", ["wait"])))
    assert (
        code == 1
        and "inference.0 ended by itself (exit code 0) while the stage needed it" in stderr
    )


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_kill_9_of_any_role_ends_the_stage_soon_and_names_it(run_dir, victim):
    (run_dir / "checkpoints/step_5.attempt_1").mkdir(parents=True)
    (run_dir / "checkpoints/step_5.attempt_1/COMPLETE").touch()
    (run_dir / "checkpoints/step_9.attempt_1").mkdir()
    acts = ["child", "ready", "wait"]
    roles = ("inference", "trainer", "orchestrator")
    launcher = launch(run_dir, *((role, acts) for role in roles))
    name = f"{roles[victim]}.{victim}"
    pids = ready(run_dir, *(f"{role}.{index}" for index, role in enumerate(roles)))
    wait_for(lambda: "batch 4" in text(run_dir / f"stages/rl/health/{name}.json"), 30)
    killed_s = time.monotonic()
    os.kill(pids[name], signal.SIGKILL)
    code, stderr = end(launcher)
    assert time.monotonic() - killed_s < 15
    assert code == 1
    assert (
        f"rl: {name} was killed by SIGKILL while waiting for batch 4 from orchestrator (step 3)"
        in stderr
    )
    assert "to go on from step 5" in stderr
    assert not any(map(alive, pids.values()))


def test_where_one_of_several_is_killed_the_others_say_what_they_were_doing(run_dir):
    launcher = launch(run_dir, *[("trainer", ["ready", "serve"])] * 2)
    pids = ready(run_dir, "trainer.0", "trainer.1")
    os.kill(pids["trainer.0"], signal.SIGKILL)
    code, stderr = end(launcher)
    assert code == 1 and "rl: trainer.0 was killed by SIGKILL while acting (step 3)" in stderr
    assert (
        f"its log is {run_dir}/logs/trainer.0.log; stacks are in {run_dir}/logs/*.log; "
        f"type `make demo`" in stderr
    )
    assert "be_a_role" in (run_dir / "logs/trainer.1.log").read_text()


def test_where_one_of_several_is_killed_those_that_have_failed_by_then_are_not_asked_again(run_dir):
    launcher = launch(
        run_dir, ("trainer", ["ready", "serve"]), ("trainer", ["until asked", "fail and stay"])
    )
    victim = ready(run_dir, "trainer.0")["trainer.0"]
    (run_dir / "go").touch()
    wait_for(
        lambda: (
            "trainer.1" in (health := read_health(run_dir, "rl", 1))
            and health["trainer.1"].doing == "failed"
        ),
        within_s=30,
    )
    os.kill(victim, signal.SIGKILL)
    code, stderr = end(launcher)
    assert code == 1 and "rl: trainer.0 was killed by SIGKILL while acting (step 3)" in stderr
    assert (
        "stacks are in" not in stderr
        and "be_a_role" not in (run_dir / "logs/trainer.1.log").read_text()
    )


def test_a_role_that_ignores_sigterm_is_killed(run_dir):
    launcher = launch(
        run_dir,
        ("inference", ["ignore SIGTERM", "child", "ready", "wait"]),
        ("trainer", ["until asked", "fail"]),
    )
    ready(run_dir, "inference.0")
    (run_dir / "go").touch()
    code, _ = end(launcher)
    assert code == 1
    assert runs.read_status(run_dir).roles[0].exit == "SIGKILL"


def test_a_process_that_not_even_sigkill_ends_is_named_and_not_waited_for():
    class Held:
        name, pid, node = "inference.0", 7, "node1"

        def poll(self):
            return None

        def signal(self, number): ...

        def abandon(self): ...

        def wait(self, within_s):
            return False

    ending = SimpleNamespace(
        processes=[Held()], interrupts=SimpleNamespace(received=[]), deadline_scale=0.5
    )
    sentence = stage.end_all(ending, 0.0)
    assert sentence.startswith(
        "inference.0 (process 7 on node1) did not end within 5 s of SIGKILL, so a device or file"
    )


def test_waiting_for_a_process_says_whether_it_ended():
    process = subprocess.Popen(["sleep", "60"])
    assert not ended_within(process, 0.05)
    process.kill()
    assert ended_within(process, 20)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_all_and_leaves_the_run_resumable(run_dir, number):
    launcher = launch(
        run_dir, ("inference", ["child", "ready", "serve"]), ("trainer", ["ready", "wait"])
    )
    pids = ready(run_dir, "inference.0", "trainer.1")
    launcher.send_signal(number)
    code, stderr = end(launcher)
    assert code == 128 + number and f"rl: stopped by {number.name}" in stderr
    assert not any(map(alive, pids.values()))
    assert runs.read_status(run_dir).state == "stopped"


def test_what_is_ignored_when_the_launcher_starts_stays_so_in_it_and_its_roles(run_dir):
    """`nohup orrery run …`, and `orrery run … &` in a script."""
    numbers = signal.SIGINT, signal.SIGHUP
    launcher = launch(
        run_dir,
        ("inference", ["ready", "serve"]),
        ("trainer", ["ready", "until asked"]),
        ignored=numbers,
    )
    pids = ready(run_dir, "inference.0", "trainer.1")
    for number in numbers:
        for pid in (launcher.pid, *pids.values()):
            os.kill(pid, number)
    (run_dir / "go").touch()
    code, stderr = end(launcher)
    assert code == 0, stderr
    assert not any(map(alive, pids.values()))


@pytest.mark.parametrize("ending", ["done", "failed", "killed", "stopped"])
def test_caches_on_the_scratch_disk_go_with_their_stage_however_it_ends(run_dir, ending):
    deeds = {"done": [], "failed": ["fail"], "killed": ["wait"], "stopped": ["wait"]}[ending]
    launcher = launch(
        run_dir,
        ("inference", ["caches", "ready", "serve"]),
        ("trainer", ["ready", "until asked", *deeds]),
    )
    pids = ready(run_dir, "inference.0", "trainer.1")
    [caches] = Path(tempfile.gettempdir()).glob(f"orrery-kv-{run_dir.name}-*")
    assert [path.name for path in caches.rglob("*.bin")] == ["block.bin"]
    # A process of the same run in another checkout.
    others = caches.with_name(f"orrery-kv-{run_dir.name}-0123456789ab-rl")
    others.mkdir()
    (run_dir / "go").touch()
    if ending == "killed":
        os.kill(pids["inference.0"], signal.SIGKILL)
    elif ending == "stopped":
        launcher.send_signal(signal.SIGTERM)
    code, _ = end(launcher)
    assert code == {"done": 0, "failed": 1, "killed": 1, "stopped": 128 + signal.SIGTERM}[ending]
    assert not caches.exists() and others.exists()
    others.rmdir()


def test_a_stage_whose_receipt_cannot_be_written_is_done_all_the_same_and_says_so(run_dir):
    (run_dir / "stages" / "rl").mkdir(parents=True)
    (run_dir / "stages" / "rl" / "result.json").write_text("{")
    code, stderr = end(launch(run_dir, ("trainer", ["ready"])))
    assert code == 0, stderr
    assert (run_dir / "stages/rl/DONE").exists() and not (run_dir / "receipt.json").exists()
    assert "no receipt: JSONDecodeError" in (run_dir / "logs" / "launcher.0.log").read_text()


def test_what_software_a_host_has_is_asked_while_the_stage_runs_so_that_its_end_waits_for_nothing(
    run_dir, tmp_path, monkeypatch
):
    asks = tmp_path / "bin" / "nvidia-smi"
    asks.parent.mkdir()
    asks.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\necho 570.1\n")
    asks.chmod(0o755)
    monkeypatch.setenv("PATH", f"{asks.parent}{os.pathsep}{os.environ['PATH']}")
    launcher = launch(run_dir, ("trainer", ["until asked"]))
    wait_for((tmp_path / "asked").exists, within_s=30)
    (run_dir / "go").touch()
    assert end(launcher)[0] == 0
    [attempt] = json.loads((run_dir / "receipt.json").read_text())["stages"]["rl"]["attempts"]
    told = attempt["versions"]
    assert told["driver"] == "570.1" and "torch" in told["host"]
    assert attempt["network"] == {"interface": "lo", "gbit_per_s": 40.0}
    assert (tmp_path / "asked").read_text() == "asked\n"


def test_caches_and_sockets_are_looked_for_where_the_site_has_its_roles_put_them(tmp_path):
    for name in ("orrery-kv-run-a-rl", "orrery-0123abcd-inference.0-x"):
        (tmp_path / name).mkdir()
    prefixes = "orrery-kv-run-a-", "orrery-0123abcd-"
    stage.remove_scratch(prefixes, SimpleNamespace(environment={"TMPDIR": str(tmp_path)}))
    assert list(tmp_path.iterdir()) == []


def test_caches_that_a_killed_launcher_left_go_when_the_next_one_starts(run_dir):
    launcher = launch(
        run_dir, ("inference", ["caches", "ready", "serve"]), ("trainer", ["ready", "wait"])
    )
    pids = ready(run_dir, "inference.0", "trainer.1")
    launcher.kill()
    launcher.wait()
    launcher.stderr.close()
    wait_for(lambda: not any(map(alive, pids.values())), within_s=15)
    [caches] = Path(tempfile.gettempdir()).glob(f"orrery-kv-{run_dir.name}-*")
    launcher = launch(run_dir, ("trainer", ["ready", "until asked"]))
    ready(run_dir, "trainer.0")
    was_there = caches.exists()
    (run_dir / "go").touch()
    code, stderr = end(launcher)
    assert code == 0, stderr
    assert not was_there


def test_kill_9_of_the_launcher_leaves_no_orphan_and_the_next_start_clears_up(run_dir):
    launcher = launch(
        run_dir, ("inference", ["shm", "child", "ready", "serve"]), ("trainer", ["ready", "wait"])
    )
    pids = ready(run_dir, "inference.0", "trainer.1")
    launcher.kill()
    launcher.wait()
    launcher.stderr.close()
    assert runs.launcher_died(run_dir, runs.read_status(run_dir))
    wait_for(lambda: not any(map(alive, pids.values())), within_s=15)
    assert not list(Path("/dev/shm").glob(f"{run_directory.memory_prefix(run_dir)}*"))
    for pid in (run_dir / "children").read_text().split()[1::2]:
        # It left its group, and the launcher that knew it is gone.
        os.kill(int(pid), signal.SIGKILL)
    left, others = (
        subprocess.Popen(
            [sys.executable, "-c", "input()", folder], stdin=subprocess.PIPE, start_new_session=True
        )
        for folder in (
            str(run_dir),
            f"{run_dir}-other",
        )  # another run's process, with a reused pid
    )
    try:
        last = runs.read_status(run_dir)
        for role, process in zip(last.roles, (left, others), strict=True):
            role.pid = process.pid
        last.write(run_dir)
        weights = Path("/dev/shm") / f"{run_directory.memory_prefix(run_dir)}1"
        weights.mkdir()
        launcher = launch(run_dir, ("trainer", ["ready", "until asked"]))
        wait_for(lambda: left.poll() is not None or text(run_dir / "ready.trainer.0"), within_s=30)
        ready(run_dir, "trainer.0")
        was_there = left.poll() is None, weights.exists()
        (run_dir / "go").touch()
        code, stderr = end(launcher)
        assert code == 0, stderr
        assert was_there == (False, False) and others.poll() is None
    finally:
        for process in (left, others):
            process.kill()
            process.communicate()
    assert json.loads((run_dir / "stages/rl/DONE").read_text())["attempt"] == 2


def test_a_second_launcher_of_the_same_run_gets_one_sentence(run_dir):
    first = launch(run_dir, ("trainer", ["ready", "wait"]))
    ready(run_dir, "trainer.0")
    assert runs.lock_holder(run_dir).pid == first.pid
    code, stderr = end(launch(run_dir, ("trainer", ["ready", "wait"])))
    assert code == 2 and stderr.count("\n") == 1
    assert f"another launcher is running this run (pid {first.pid})" in stderr
    first.send_signal(signal.SIGTERM)
    end(first)
    assert runs.lock_holder(run_dir) is None


def test_every_start_is_a_new_attempt_and_appends_to_the_logs(run_dir):
    for _ in range(2):
        assert end(launch(run_dir, ("trainer", ["fail"])))[0] == 1
    assert end(launch(run_dir, ("trainer", ["look"])))[0] == 0
    assert runs.read_status(run_dir).attempt == 3
    assert json.loads((run_dir / "look.trainer.0.json").read_text())["attempt"] == 3
    log = (run_dir / "logs/trainer.0.log").read_text()
    headers = [line.split(", ")[:2] for line in log.splitlines() if line.startswith("===")]
    assert headers == [["=== rl", f"attempt {attempt}"] for attempt in (1, 2, 3)]


def test_an_attempt_that_goes_on_with_other_code_says_so(run_dir):
    assert end(launch(run_dir, ("trainer", ["fail"])))[0] == 1
    told = json.loads((run_dir / "receipt.json").read_text())
    told["stages"]["rl"]["attempts"][0]["code"] = {
        "commit": "0" * 40,
        "dirty": False,
        "diff_sha256": None,
        "diff": None,
        "note": "",
    }
    (run_dir / "receipt.json").write_text(json.dumps(told))
    git = ["git", "-c", "user.name=n", "-c", "user.email=n@example.com", "-C", str(run_dir)]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout[:12]
    said = f"continues with other code than attempt 1 (rl): commit 000000000000 → {commit}"
    code, stderr = end(launch(run_dir, ("trainer", [])))
    assert code == 0 and f"rl: {said}" in stderr
    assert f"rl, attempt 2: {said}" in (run_dir / "logs/launcher.0.log").read_text()


def test_a_stage_that_is_done_is_not_run_again(run_dir):
    assert end(launch(run_dir, ("trainer", [])))[0] == 0
    code, stderr = end(launch(run_dir, ("trainer", ["fail"])))
    assert code == 0 and "rl: done already" in stderr


def test_a_stall_ends_the_stage_with_who_waits_for_whom_and_leaves_stacks(run_dir):
    launcher = launch(
        run_dir, ("orchestrator", ["ready", "serve"]), ("trainer", ["until asked", "stall"])
    )
    ready(run_dir, "orchestrator.0")
    (run_dir / "go").touch()
    code, stderr = end(launcher)
    assert code == 1
    assert "rl: stall: trainer.1 is waiting" in stderr and "for batch 4 from orchestrator" in stderr
    assert "orchestrator.0 has been at acting (step 3)" in stderr
    for name in ("orchestrator.0", "trainer.1"):
        assert "be_a_role" in (run_dir / f"logs/{name}.log").read_text()


def test_an_orchestrator_whose_event_loop_is_blocked_ends_the_stage_by_its_name(
    run_dir, other_run_dir
):
    """One orchestrator blocks, one is stopped by a signal. Trainers' own deadlines are hours."""
    scale = 0.1
    launchers = {
        folder: launch(
            folder,
            ("orchestrator", ["orchestrate, then block"]),
            ("trainer", ["wait"]),
            deadline_scale=scale,
        )
        for folder in (run_dir, other_run_dir)
    }
    pids = {folder: ready(folder, "orchestrator.0")["orchestrator.0"] for folder in launchers}

    def turns() -> list[int]:
        files = [folder / "stages/rl/health/orchestrator.0.json" for folder in launchers]
        beats = [json.loads(text(file))["loop_beats"] for file in files]
        return [beat["count"] if beat else 0 for beat in beats]

    wait_for(lambda: all(turns()), 30)
    turned = turns()
    wait_for(lambda: all(now > then + 2 for now, then in zip(turns(), turned, strict=True)), 30)
    begun_s = {}
    for folder, pid in pids.items():
        begun_s[folder] = time.monotonic()
        if folder == run_dir:
            (folder / "go").touch()
        else:
            os.kill(pid, signal.SIGSTOP)
    for folder, launcher in launchers.items():
        code, stderr = end(launcher)
        waited_s = time.monotonic() - begun_s[folder]
        assert code == 1 and scale * HANG_S - 1 < waited_s < scale * HANG_S + 20, stderr
        assert (
            "rl: stall: the event loop of orchestrator.0 sent no heartbeat for" in stderr
            and "s, while judging (step 3); stacks are in" in stderr
        )
    said = text(run_dir / "logs/orchestrator.0.log")
    assert "time.sleep" in said or "in fleet" in said


@pytest.mark.parametrize(
    ("clock", "by_s"), [("launcher", 1200.0), ("launcher", -3600.0), ("trainer", -1200.0)]
)
def test_a_wall_clock_that_is_set_or_of_another_host_is_no_stall(run_dir, clock, by_s):
    """The launcher's clock is set while a rank waits, or the rank's host has a late clock."""
    later = run_dir / f"wall_clock.{clock}"
    if clock == "trainer":
        later.write_text(str(by_s))
    launcher = launch(run_dir, ("orchestrator", ["until asked"]), ("trainer", ["wait until asked"]))
    wait_for(lambda: "batch 4" in text(run_dir / "stages/rl/health/trainer.1.json"), 30)
    partial = run_dir / "wall_clock"
    partial.write_text(str(by_s))
    partial.replace(later)
    rows, seen = (
        run_dir / "metrics" / "launcher.0.jsonl",
        text(run_dir / "metrics" / "launcher.0.jsonl").count("\n"),
    )
    # It looked in between.
    wait_for(lambda: text(rows).count("\n") >= seen + 2 or launcher.poll() is not None, 30)
    (run_dir / "go").touch()
    code, stderr = end(launcher)
    assert code == 0, stderr
    took_s = float(stderr.rsplit("rl: done in ", 1)[1].split(" s")[0])
    assert 0 < took_s < 60
    assert 0 < json.loads(done_path(run_dir, "rl").read_text())["wall_s"] < 60


def test_a_role_that_waits_for_one_that_is_done_ends_the_stage_with_both_names(run_dir):
    code, stderr = end(
        launch(run_dir, ("orchestrator", []), ("trainer", ["wait"]), deadline_scale=0.01)
    )
    assert code == 1
    assert "rl: stall: trainer.1 is waiting" in stderr and "for batch 4 from orchestrator" in stderr
    assert "orchestrator.0 is done and sends nothing more" in stderr


def test_a_full_disk_ends_the_stage_with_a_sentence_and_leaves_no_process(run_dir):
    (run_dir / "metrics").mkdir()
    (run_dir / "metrics/launcher.0.jsonl").symlink_to("/dev/full")
    (run_dir / "logs").mkdir()
    launcher = launch(run_dir, ("inference", ["child", "ready", "serve"]), ("trainer", ["wait"]))
    code, stderr = end(launcher)
    assert code == 1 and "Traceback" not in stderr
    assert (
        "rl: No space left on device; free some" in stderr
        and "type `make demo` to start rl again" in stderr
    )
    (run_dir / "logs/launcher.0.log").unlink()
    # Now the last words cannot be written either.
    (run_dir / "logs/launcher.0.log").symlink_to("/dev/full")
    code, stderr = end(launch(run_dir, ("inference", ["serve"]), ("trainer", ["wait"])))
    assert code == 1 and "Traceback" not in stderr and "rl: No space left on device" in stderr
    assert not any(alive(role.pid) for role in runs.read_status(run_dir).roles)


def test_lines_that_a_full_disk_refuses_do_not_keep_a_stage_from_ending(run_dir, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    (run_dir / "logs").mkdir()
    (run_dir / "logs/launcher.0.log").symlink_to("/dev/full")
    one = object.__new__(stage.RunningStage)
    one.run_dir, one.name, one.attempt = run_dir, "rl", 1
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=refuse, flush=refuse))
    one.tell("waiting for copied checkpoints to be saved")


def test_a_saver_does_not_outlive_the_wait_for_it(run_dir, tmp_path, monkeypatch):
    program, pid = tmp_path / "python", tmp_path / "pid"
    program.write_text(f"#!/bin/bash\necho $$ >{pid}\nexec sleep 300\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))

    def is_cut_short():
        if text(pid):
            raise OSError(errno.ENOSPC, "No space left on device")
        return False

    folder = run_directory.SHARED_MEMORY / f"{run_directory.saves_prefix(run_dir)}0"
    folder.mkdir()
    try:
        with pytest.raises(OSError, match="No space left"):
            stage.finish_saves(run_dir, "", is_cut_short)
    finally:
        folder.rmdir()
    wait_for(lambda: not alive(int(text(pid))), 10)


def test_the_launcher_of_a_run_is_known_after_the_wall_clock_was_set(tmp_path, monkeypatch):
    boot_s = psutil.boot_time()
    with runs.hold_lock(tmp_path):
        # The kernel's answer after a step of 20 minutes.
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot_s + 1200.0)
        found = runs.lock_holder(tmp_path)
        assert found is not None and found.pid == os.getpid(), (
            "`orrery status` would say that it died"
        )
    assert runs.lock_holder(tmp_path) is None


def test_someone_who_looks_for_the_holder_keeps_no_launcher_from_starting(run_dir):
    with runs.hold_lock(run_dir):
        pass
    with open(run_dir / ".lock") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.2, fcntl.flock, (looking, fcntl.LOCK_UN)).start()
        with runs.hold_lock(run_dir):
            assert runs.lock_holder(run_dir).pid == os.getpid()


def test_a_sink_that_cannot_start_costs_one_line_and_not_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_PROJECT", "p")
    monkeypatch.setitem(sys.modules, "wandb", None)
    progress = Progress("r", "rl", 1, ("rl",), (), None, 0.0)
    observer = Observer(tmp_path, progress)
    MetricsFile(tmp_path, "rl", "trainer", 0, 1).write(3, loss=0.5)
    observer.close()
    err = capsys.readouterr().err
    assert (
        err.startswith(
            "warning: WandbSink is dropped: WANDB_PROJECT is set, but wandb is not installed"
        )
        and err.count("\n") == 1
    )
    assert progress.step == 3 and list((tmp_path / "metrics/tensorboard").rglob("events*"))


def test_looks_that_fail_cost_one_line_and_no_row(tmp_path, monkeypatch, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics, looks, errors = (
        MetricsFile(tmp_path, "rl", "trainer", 0, 1),
        [],
        [errno.EIO, errno.ESTALE],
    )
    paths = MetricsTail._paths

    def paths_or_fail(tail):
        looks.append(1)
        if len(looks) > 1 and errors:  # the first is the tail's own, from where files stand now
            raise OSError(errors[-1], os.strerror(errors.pop()))
        return paths(tail)

    monkeypatch.setattr(MetricsTail, "_paths", paths_or_fail)
    monkeypatch.setattr("orrery.observe.progress.READ_S", 0.01)
    progress = Progress("r", "rl", 1, ("rl",), (), None, 0.0)
    observer = Observer(tmp_path, progress)
    metrics.write(3, loss=0.5)
    wait_for(lambda: progress.step == 3, 10)
    metrics.write(4, loss=0.25)
    observer.close()
    err = capsys.readouterr().err
    assert err == (
        f"warning: metrics cannot be read ({os.strerror(errno.ESTALE)}); tried again every 0.01 s\n"
    )
    events = EventAccumulator(str(tmp_path / "metrics/tensorboard/rl/trainer.0")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("trainer/loss")] == [
        (3, 0.5),
        (4, 0.25),
    ]


def test_a_wind_down_ends_the_stage_when_all_that_end_by_themselves_have_left(run_dir):
    plans = (
        ("inference", ["serve"]),
        ("orchestrator", ["ready", "wind down"]),
        ("trainer", ["ready", "wind down"]),
    )
    launcher = launch(run_dir, *plans)
    ready(run_dir, "orchestrator.1", "trainer.2")
    launcher.send_signal(signal.SIGUSR1)
    code, stderr = end(launcher)
    assert (
        code == process_control.EXIT_PREEMPTED
        and "rl: wound down; type `make demo` to start rl again" in stderr
    )
    assert (
        runs.read_status(run_dir).state == "stopped" and not (run_dir / "stages/rl/DONE").exists()
    )


def test_a_role_that_fails_while_the_others_wind_down_is_a_failure(run_dir):
    launcher = launch(
        run_dir, ("orchestrator", ["ready", "wind down"]), ("trainer", ["ready", "serve"])
    )
    pids = ready(run_dir, "orchestrator.0", "trainer.1")
    launcher.send_signal(signal.SIGUSR1)
    wait_for(lambda: process_control.preemption_requested(run_dir, "rl"), 10)
    os.kill(pids["trainer.1"], signal.SIGSEGV)
    code, stderr = end(launcher)
    assert code == 1 and "trainer.1 was killed by SIGSEGV" in stderr


def test_savers_get_no_time_that_slurm_needs_to_queue_the_job_again(run_dir, monkeypatch):
    """The job ends in 100 s: 50 for the checkpoint, 25 for the savers, 25 to queue it again."""
    now_s = time.monotonic()
    monkeypatch.setattr(stage, "_job_ends_at_s", lambda job: now_s + 100.0)
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    allocation = SimpleNamespace(slurm=SimpleNamespace(warning_s=100))
    job = SimpleNamespace(
        allocation=allocation, site=SimpleNamespace(roles=SimpleNamespace(checkpoint_target=""))
    )
    one = object.__new__(supervisor.Supervisor)
    one.job, one.stage = job, object.__new__(stage.RunningStage)
    one.stage.job, one.stage.run_dir, one.stage.name, one.stage.attempt = job, run_dir, "rl", 1
    one.stage.interrupts = stage.Interrupts()
    one.preemption = stage.Preemption(one.stage)
    (run_dir / "logs").mkdir(exist_ok=True)
    request_path(run_dir, "rl").parent.mkdir(parents=True, exist_ok=True)
    one.preemption._begin()
    cuts = []
    monkeypatch.setattr(supervisor, "finish_saves", lambda *args: cuts.append(args[2]()))
    for after_s in (74.0, 76.0):
        monkeypatch.setattr(time, "monotonic", lambda s=after_s: now_s + s)
        for requeue in ("ask", None):
            one._finish_saves(stage.Outcome("stopped", "", 75, requeue))
    assert cuts == [False, False, True, False]


DIES_BEFORE_ITS_FIRST_STATUS = """
import os, signal, sys
from pathlib import Path
import launcher_fakes
from orrery.launcher.runs import Status
Status.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
launcher_fakes.launch(Path(sys.argv[1]))
"""


def test_an_attempts_number_is_not_given_again_though_its_launcher_died_before_its_first_status(
    run_dir,
):
    assert end(launch(run_dir, ("trainer", [])))[0] == 0
    (run_dir / "stages/rl/DONE").unlink()
    died = subprocess.run(
        [sys.executable, "-c", DIES_BEFORE_ITS_FIRST_STATUS, str(run_dir)],
        cwd=Path(__file__).parent,
    )
    assert died.returncode == -signal.SIGKILL and runs.read_status(run_dir).attempt == 1
    code, stderr = end(launch(run_dir, ("trainer", [])))
    assert code == 0, stderr
    receipts = json.loads((run_dir / "receipt.json").read_text())["stages"]["rl"]["attempts"]
    assert [(one["attempt"], one["state"]) for one in receipts] == [
        (1, "done"),
        (2, "unrecorded"),
        (3, "done"),
    ]


def test_the_newest_attempts_rows_count_though_its_status_was_removed(run_dir):
    for reward in (1, 2, 3):
        code, stderr = end(launch(run_dir, ("trainer", [str(reward)])))
        assert code == 0, stderr
        (run_dir / "status.json").unlink()
        (run_dir / "stages/rl/DONE").unlink()
    assert [
        (row["attempt"], row["reward"])
        for row in read(run_dir / "metrics/trainer.0.jsonl")
        if "reward" in row
    ] == [(3, 3)]


def test_the_newest_checkpoint_is_that_of_the_stage(tmp_path):
    for name in (
        "step_3.attempt_1",
        "sft/step_20.attempt_1",
        "sft/step_40.attempt_1",
        "sft/step_60.attempt_1",
    ):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    for name in ("step_3.attempt_1", "sft/step_20.attempt_1", "sft/step_40.attempt_1"):
        (tmp_path / "checkpoints" / name / "COMPLETE").touch()
    assert [newest_checkpoint(tmp_path, stage) for stage in ("init", "sft", "rl", "evaluate")] == [
        None,
        40,
        3,
        None,
    ]
