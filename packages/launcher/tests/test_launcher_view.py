"""The plain view: all processes of a small run, a short line of a large one."""

from types import SimpleNamespace

import pytest

from orrery.launcher import view
from orrery.observe.health import FAILED, Health, Wait
from orrery.observe.progress import Progress, line

NOW_S = 1060.0


@pytest.fixture
def drawn(monkeypatch, capsys):
    """Draws once at a time of the test's choice; what was said then."""
    progress = Progress("r", "rl", 1, ("rl",), (), None, 1000.0)
    clock = SimpleNamespace(monotonic=lambda: clock.now_s, time=lambda: NOW_S, now_s=0.0)
    monkeypatch.setattr(view, "time", clock)
    shown = view.View(progress)

    def draw(now_s, health, states):
        clock.now_s = now_s
        shown.draw(health, states)
        return capsys.readouterr().err

    return progress, draw


def ranks(number):
    health = {f"trainer.{index}": Health("trainer", index, 1055.0, 1, 1, "training", 1055.0, 3) for index in range(number)}
    return health, dict.fromkeys(health, "running")


def test_a_small_run_names_all_its_processes_every_few_seconds(drawn):
    progress, draw = drawn
    health, states = ranks(10)
    for now_s in (5.0, 10.0, 15.0):
        assert draw(now_s, health, states) == line(progress, health, NOW_S) + "\n"


def test_a_large_run_says_one_short_line_a_minute_and_at_once_what_is_new(drawn):
    progress, draw = drawn
    health, states = ranks(96)
    health |= {f"inference.{index}": Health("inference", index, 1001.0, 1, 1, "serving", 1001.0) for index in range(16)}
    states |= dict.fromkeys([*health, "inference.16"], "running")
    health["trainer.7"] = Health("trainer", 7, 1040.0, 1, 1, "training", 1040.0, 3, None, (Wait("batch 4", 1040.0, None),))
    first = draw(5.0, health, states)
    assert first == (
        "[01:00] rl … · trainer: 95 training, 1 waiting · inference: 16 serving, 1 starting · slowest: trainer.7 waiting 20 s for batch 4\n"
    )
    lines = [draw(5.0 * look, health, states) for look in range(2, 26)]
    assert [text for text in lines if text] == [first] * 2, "120 s in which nothing changed"
    progress.step = 4
    assert "rl 4 · trainer: 95" in draw(130.0, health, states)
    states |= {f"inference.{index}": "SIGKILL" for index in range(6)}
    health["trainer.9"] = Health("trainer", 9, 1055.0, 1, 1, FAILED, 1055.0, 3)
    assert "failed or ended: trainer.9, inference.0-3 and 2 more · slowest: trainer.7" in draw(135.0, health, states)
    assert draw(140.0, health, states) == ""


def test_however_many_things_processes_do_the_line_is_short():
    health, states = ranks(113)
    for index, (name, one) in enumerate(list(health.items())):
        health[name] = Health(**{**vars(one), "doing": f"publishing version {index}", "since_s": 1000.0 + index})
    parts = view.summary(health, states, NOW_S)
    assert parts[0].endswith(", 110 otherwise") and parts[1].startswith("slowest: trainer.0 ") and len(" · ".join(parts)) < 200
