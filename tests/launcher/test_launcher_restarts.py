"""Engines that end and are started again: the rule, and the launcher with real processes."""

import json
import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from launcher_stages import alive, end, launch, ready, text, wait_for

from orrery.launcher import runs
from orrery.launcher.failure import WINDOW_S, EngineRestarts, Restarts
from orrery.launcher.stage import RunningStage
from orrery.observe.hang_detector import HealthView
from orrery.runtime import process_control
from orrery.runtime.metrics import read

pytestmark = pytest.mark.timeout(120)
names, codes = st.sampled_from(["inference.0", "inference.1"]), st.sampled_from([-9, 1, 0])
endings = st.lists(st.tuples(names, st.booleans(), codes, st.floats(0, WINDOW_S)), max_size=12)


@given(st.integers(0, 5), endings)
def test_engines_are_started_again_no_oftener_a_day_than_allowed_and_never_after_two_vain_starts(
    most, endings
):
    restarts, vain, now_s, done_s = Restarts(most), {"inference.0": 0, "inference.1": 0}, 0.0, []
    for name, has_served, code, after_s in endings:
        now_s += after_s
        vain[name] = 0 if has_served else vain[name] + 1
        lately = sum(time_s > now_s - WINDOW_S for time_s in done_s)
        is_again = restarts.refusal(name, has_served, code, now_s) is None
        assert is_again == (lately < most and vain[name] < 2)
        done_s += [now_s] * is_again
        assert restarts.num_recent == lately + is_again <= most and restarts.by_name.total() == len(
            done_s
        )


def test_losses_of_weeks_end_no_run_that_loses_few_a_day():
    restarts = Restarts(16)
    for loss in range(500):
        assert restarts.refusal(f"inference.{loss % 16}", True, -9, loss * WINDOW_S / 16) is None
    assert restarts.by_name.total() == 500
    assert "no more within a day" in restarts.refusal(
        "inference.0", True, -9, 499.5 * WINDOW_S / 16
    )


def test_a_persons_mistake_is_not_repeated():
    assert "the error would be the same" in Restarts(3).refusal("inference.0", False, 2, 0.0)


def restarted(run_dir: Path, name: str, before: int) -> int:
    """The pid of the next incarnation, once it serves."""
    return int(
        wait_for(
            lambda: (pid := text(run_dir / f"ready.{name}")) and int(pid) != before and pid, 30
        )
    )


def zombies(pid: int) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += [child] * (child.status() == psutil.STATUS_ZOMBIE)
    return found


def test_a_killed_engine_is_started_again_and_the_others_never_notice(run_dir):
    launcher = launch(
        run_dir,
        ("inference", ["child", "endpoint", "ready", "serve"]),
        ("trainer", ["ready", "until asked"]),
        restarts=2,
    )
    pids = ready(run_dir, "inference.0", "trainer.1")
    children = text(run_dir / "children").split()
    os.kill(pids["inference.0"], signal.SIGKILL)
    second = restarted(run_dir, "inference.0", pids["inference.0"])
    assert not any(map(alive, map(int, children))), (
        "what was in the dead engine's group, and what had left it"
    )
    wait_for(lambda: not zombies(launcher.pid), 30)
    assert all(map(alive, map(int, text(run_dir / "children").split()[2:]))), (
        "the next incarnation's"
    )
    endpoint = json.loads((run_dir / "stages/rl/endpoints/inference.0.json").read_text())
    assert (endpoint["incarnation"], endpoint["pid"]) == (1, second)
    [role] = [role for role in runs.read_status(run_dir).roles if role.name == "inference.0"]
    assert (role.pid, role.state, role.restarts) == (second, "running", 1)
    (run_dir / "go").touch()
    code, stderr = end(launcher)
    assert code == 0, stderr
    assert (
        "rl: inference.0 was killed by SIGKILL while acting (step 3); started again (1 "
        "of 2 within a day): pid" in stderr
    )
    assert alive(pids["trainer.1"]) is False and text(run_dir / "ready.trainer.1") == str(
        pids["trainer.1"]
    )
    log = (run_dir / "logs/inference.0.log").read_text()
    headers = [line.split(", ")[:3] for line in log.splitlines() if line.startswith("===")]
    assert (
        headers[0][:2] == ["=== rl", "attempt 1"]
        and headers[1] == ["=== rl", "attempt 1", "restart 1"]
        and len(headers) == 2
    )
    [row] = [
        row
        for row in read(run_dir / "metrics/launcher.0.jsonl")
        if row.get("event") == "engine_restart"
    ]
    assert (row["process"], row["incarnation"], row["ending"], row["has_served"]) == (
        "inference.0",
        1,
        "SIGKILL",
        True,
    )
    receipt = json.loads((run_dir / "receipt.json").read_text())
    assert receipt["stages"]["rl"]["attempts"][0]["engine_restarts"] == {"inference.0": 1}


def test_an_engine_that_loses_a_further_node_starts_again_with_all_its_processes(run_dir):
    """`headless.1` is the second node of engine 0."""
    launcher = launch(
        run_dir,
        ("inference", ["endpoint", "ready", "serve"]),
        ("headless", ["ready", "serve"]),
        ("inference", ["endpoint", "ready", "serve"]),
        ("trainer", ["ready", "until asked"]),
        restarts=2,
    )
    pids = ready(run_dir, "inference.0", "headless.1", "inference.2", "trainer.3")
    os.kill(pids["headless.1"], signal.SIGKILL)
    again = {name: restarted(run_dir, name, pids[name]) for name in ("inference.0", "headless.1")}
    assert not alive(pids["inference.0"]) and alive(pids["inference.2"])
    roles = {role.name: role for role in runs.read_status(run_dir).roles}
    assert {name: (role.pid, role.restarts) for name, role in roles.items()} == {
        "inference.0": (again["inference.0"], 1),
        "headless.1": (again["headless.1"], 1),
        "inference.2": (pids["inference.2"], 0),
        "trainer.3": (pids["trainer.3"], 0),
    }
    (run_dir / "go").touch()
    code, stderr = end(launcher)
    assert code == 0, stderr
    assert "rl: headless.1 was killed by SIGKILL while acting (step 3); started again (1" in stderr
    assert not any(map(alive, again.values()))


def test_one_loss_more_than_allowed_ends_the_stage_and_says_so(run_dir):
    launcher = launch(
        run_dir,
        ("inference", ["endpoint", "ready", "serve"]),
        ("trainer", ["ready", "serve"]),
        restarts=1,
    )
    pids = ready(run_dir, "inference.0", "trainer.1")
    os.kill(pids["inference.0"], signal.SIGKILL)
    os.kill(restarted(run_dir, "inference.0", pids["inference.0"]), signal.SIGSEGV)
    code, stderr = end(launcher)
    assert code == 1
    assert (
        "rl: inference.0 was killed by SIGSEGV" in stderr
        and "inference.max_restarts allows no more within a day; its log is" in stderr
    )


def test_an_engine_that_ends_twice_before_it_serves_ends_the_stage_with_its_own_sentence(run_dir):
    code, stderr = end(launch(run_dir, ("inference", ["fail"]), ("trainer", ["serve"]), restarts=9))
    assert code == 1
    assert (
        "while acting (step 3): the moon is in the way; it ended twice before it "
        "served, so it is not started again" in stderr
    )


def test_who_fails_besides_an_engine_ends_the_stage_as_ever(run_dir):
    launcher = launch(
        run_dir,
        ("inference", ["endpoint", "ready", "serve"]),
        ("trainer", ["ready", "serve"]),
        restarts=9,
    )
    pids = ready(run_dir, "inference.0", "trainer.1")
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    code, stderr = end(launcher)
    assert code == 1 and "was killed by SIGKILL" in stderr and "started again" not in stderr


def test_a_fenced_engine_that_hangs_is_killed_and_started_again_and_the_next_one_is_left_alone(
    run_dir,
):
    roles = (
        ("inference", ["ignore SIGTERM once", "endpoint", "ready", "serve"]),
        ("trainer", ["ready", "until asked"]),
    )
    launcher = launch(run_dir, *roles, restarts=1)
    pids = ready(run_dir, "inference.0", "trainer.1")
    os.kill(pids["inference.0"], signal.SIGSTOP)
    process_control.fence(
        run_dir, "rl", 1, "inference.0", 0, "engine 0 did not finish /pause within 120 s"
    )
    second = restarted(run_dir, "inference.0", pids["inference.0"])
    process_control.fence(run_dir, "rl", 1, "inference.0", 0, "said late")
    wait_for(lambda: not process_control.fenced(run_dir, "rl", 1), 30)
    assert text(run_dir / "ready.inference.0") == str(second) and alive(second)
    (run_dir / "go").touch()
    code, stderr = end(launcher)
    assert code == 0, stderr
    assert (
        "inference.0 was killed by SIGKILL while acting (step 3): engine 0 did not "
        "finish /pause within 120 s; started again" in stderr
    )


def test_an_engine_whose_event_loop_is_blocked_says_where_and_is_started_again(run_dir):
    roles = (
        ("inference", ["turn once", "endpoint", "ready", "serve"]),
        ("trainer", ["ready", "until asked"]),
    )
    launcher = launch(run_dir, *roles, restarts=1)
    restarted(run_dir, "inference.0", ready(run_dir, "inference.0", "trainer.1")["inference.0"])
    (run_dir / "go").touch()
    code, stderr = end(launcher)
    assert code == 0, stderr
    assert re.search(
        r"inference.0 was killed by SIGKILL while acting \(step 3\): its event loop sent "
        r"no heartbeat for \d+ s; started again",
        stderr,
    )
    assert "be_a_role" in text(run_dir / "logs/inference.0.log").split("restart 1")[0], (
        "no stacks of where it was"
    )


def test_only_the_nodes_of_engines_that_ended_are_suspected_to_be_lost(run_dir):
    """One of 28 nodes, `b`, is suspected and lost, as its engine ended. No engine is restarted."""

    def engine(index, node, code):
        plan = SimpleNamespace(role="inference", ends="with_stage", whole=f"inference.{index}")
        return SimpleNamespace(name=f"inference.{index}", node=node, plan=plan, poll=lambda: code)

    suspected = []
    one = object.__new__(RunningStage)
    one.run_dir, one.name, one.attempt, one.is_preempted = run_dir, "rl", 1, False
    one.processes, one.health_view = (
        [engine(0, "b", -signal.SIGKILL), engine(1, "c", None)],
        HealthView(),
    )
    allocation = SimpleNamespace(silent_nodes=lambda names: suspected.append(names) or names)
    one.job = SimpleNamespace(
        max_restarts=1, allocation=allocation, plan=SimpleNamespace(num_nodes=28)
    )
    assert not EngineRestarts(one, "").restart_ended() and suspected == [["b"]]


def test_a_stage_that_is_stopped_starts_nothing_again(run_dir):
    launcher = launch(
        run_dir,
        ("inference", ["endpoint", "ready", "serve"]),
        ("trainer", ["ready", "serve"]),
        restarts=9,
    )
    ready(run_dir, "inference.0", "trainer.1")
    launcher.send_signal(signal.SIGTERM)
    code, stderr = end(launcher)
    assert code == 128 + signal.SIGTERM and "started again" not in stderr
