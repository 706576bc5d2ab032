"""The view: a live table in a terminal, or lines, short for a large run."""

import os
import pty
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from orrery.observe import progress as view
from orrery.observe.progress import Progress, line
from orrery.runtime.health import FAILED, Health, Wait

NOW_S = 1060.0


@pytest.fixture
def drawn(monkeypatch, capsys):
    """Return a function that draws once at a given time, and returns the output."""
    progress = Progress("r", "rl", 1, ("rl",), (), None, 1000.0)
    clock = SimpleNamespace(monotonic=lambda: clock.now_s, time=lambda: NOW_S, now_s=0.0)
    clock.strftime, clock.gmtime = time.strftime, time.gmtime
    monkeypatch.setattr(view, "time", clock)
    shown = view.View(progress)

    def draw(now_s, health, states):
        clock.now_s = now_s
        shown.draw(health, states)
        return capsys.readouterr().err

    return progress, draw


def ranks(number):
    health = {
        f"trainer.{index}": Health("trainer", index, 1055.0, 1, 1, "training", 1055.0, 3)
        for index in range(number)
    }
    return health, dict.fromkeys(health, "running")


def test_a_small_run_names_all_its_processes_every_few_seconds(drawn):
    progress, draw = drawn
    health, states = ranks(10)
    for now_s in (5.0, 10.0, 15.0):
        assert draw(now_s, health, states) == line(progress, health, NOW_S) + "\n"


def test_a_large_run_says_one_short_line_a_minute_and_at_once_what_is_new(drawn):
    progress, draw = drawn
    health, states = ranks(96)
    health |= {
        f"inference.{index}": Health("inference", index, 1001.0, 1, 1, "serving", 1001.0)
        for index in range(16)
    }
    states |= dict.fromkeys([*health, "inference.16"], "running")
    health["trainer.7"] = Health(
        "trainer", 7, 1040.0, 1, 1, "training", 1040.0, 3, None, (Wait("batch 4", 1040.0, None),)
    )
    first = draw(5.0, health, states)
    assert first == (
        "[01:00] rl … · trainer: 95 training, 1 waiting · inference: 16 serving, 1 "
        "starting · slowest: trainer.7 waiting 20 s for batch 4\n"
    )
    lines = [draw(5.0 * look, health, states) for look in range(2, 26)]
    assert [text for text in lines if text] == [first] * 2, "120 s in which nothing changed"
    progress.step = 4
    assert "rl 4 · trainer: 95" in draw(130.0, health, states)
    states |= {f"inference.{index}": "SIGKILL" for index in range(6)}
    health["trainer.9"] = Health("trainer", 9, 1055.0, 1, 1, FAILED, 1055.0, 3)
    assert "failed or ended: trainer.9, inference.0-3 and 2 more · slowest: trainer.7" in draw(
        135.0, health, states
    )
    assert draw(140.0, health, states) == ""


def test_however_many_things_processes_do_the_line_is_short():
    health, states = ranks(113)
    for index, (name, one) in enumerate(list(health.items())):
        health[name] = Health(
            **{**vars(one), "doing": f"publishing version {index}", "since_s": 1000.0 + index}
        )
    parts = view.summary(health, states, NOW_S)
    assert (
        parts[0].endswith(", 110 otherwise")
        and parts[1].startswith("slowest: trainer.0 ")
        and len(" · ".join(parts)) < 200
    )


DRAWS = """
import sys, time
from orrery.observe import progress as view
from orrery.runtime.health import Health, Wait
from orrery.observe.progress import Progress
number = int(sys.argv[1])
progress = Progress("r-1", "rl", 1, ("init", "rl"), ("init",), 40, time.time())
progress.step, progress.values = 7, {"version": 6.0, "reward": 0.25}
wait = (Wait("batch 8 from orchestrator", time.time(), None),)
health = {
    f"trainer.{i}": Health("trainer", i, 0.0, 1, 1, "training", time.time(), 7, waits=wait)
    for i in range(number)
}
view.LIVE_S = view.PLAIN_S = 0.0
shown = view.View(progress)
for _ in range(3):
    shown.draw(health, dict.fromkeys(health, "running"))
shown.close()
"""


def shown_in_a_terminal(number, terminal):
    """Draw so many ranks three times in a terminal of 100 columns; return the output."""
    leader, follower = pty.openpty()
    environment = os.environ | {
        "TERM": terminal,
        "COLUMNS": "100",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    with subprocess.Popen(
        [sys.executable, "-c", DRAWS, str(number)], stderr=follower, env=environment
    ) as process:
        os.close(follower)
        written = b""
        while True:
            try:
                written += os.read(leader, 65536)
            except OSError:  # the last writer has closed it
                break
    os.close(leader)
    assert process.returncode == 0
    return written.decode()


def test_a_terminal_shows_one_table_that_is_drawn_again_in_place():
    written = shown_in_a_terminal(2, "xterm")
    tables = written.split("r-1 · attempt 1")
    assert len(tables) > 2 and "\x1b[1A" in tables[1], (
        "each but the first begins where the one before began"
    )
    for part in (
        "step ",
        "7/40",
        "version ",
        "reward ",
        "trainer.1",
        "for batch 8 from orchestrator",
    ):
        assert part in tables[1]
    assert "[00:00]" not in written


def test_the_table_of_many_processes_has_a_line_a_role():
    written = shown_in_a_terminal(96, "xterm")
    assert (
        "trainer: 96 waiting" in written
        and "slowest: trainer.0 waiting" in written
        and "trainer.50" not in written
    )


def test_a_terminal_that_cannot_redraw_gets_plain_lines():
    written = shown_in_a_terminal(2, "dumb")
    assert written.startswith("[00:00] rl 7/40") and "\x1b" not in written
