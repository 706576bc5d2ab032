"""Progress of a stage: the view's numbers, the tail, TensorBoard's scalars."""

import errno
import os
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from orrery.manifest.errors import OrreryError
from orrery.manifest.json_file import open_regular
from orrery.observe.progress import (
    Progress,
    TensorBoardSink,
    WandbSink,
    configured,
    line,
    named,
    panel,
    sparkline,
)
from orrery.runtime.health import Health, Wait
from orrery.runtime.metrics import MetricsFile, MetricsTail


@pytest.fixture
def progress():
    made = Progress(
        "reverse_text-0123456789ab", "rl", 2, ("init", "rl", "report"), ("init",), 40, 1000.0
    )
    stamp = {"stage": "rl", "attempt": 2}
    made.add(
        "orchestrator.0",
        {
            **stamp,
            "event": "batch",
            "step": 12,
            "reward_mean": 0.43,
            "staleness_max": 2,
            "generated_tokens_per_s": 812.4,
            "num_sampled": 768,
            "num_without_signal": 576,
        },
    )
    made.add("trainer.0", {**stamp, "step": 12, "loss": 0.1, "tokens_per_s": 900.0})
    made.add("trainer.0", {"stage": "sft", "attempt": 1, "step": 99, "loss": 7.0})
    made.add(
        "launcher.0",
        {
            **stamp,
            "event": "usage",
            "processes": {"trainer.0": {"cpu_percent": 88.0, "rss_bytes": 3 * 2**20}},
        },
    )
    return made


HEALTH = {
    "trainer.0": Health(
        "trainer",
        0,
        1055.0,
        1,
        2,
        "training",
        1055.0,
        12,
        None,
        (Wait("batch 13 from orchestrator", 1058.0, None),),
    )
}


def test_the_plain_line_says_step_reward_staleness_speed_and_who_waits(progress):
    text = line(progress, HEALTH, 1060.0)
    for part in (
        "[01:00] rl 12/40",
        "reward 0.43",
        "oldest 2",
        "without signal 0.75",
        "generated tokens/s 812",
        "trainer.0 waiting 2 s for batch 13 from orchestrator",
    ):
        assert part in text
    assert "99" not in text, "a row of another stage was taken in"


def test_the_clock_goes_on_after_a_day(progress):
    shown = [
        line(progress, {}, 1000.0 + seconds).split("]")[0]
        for seconds in (3599.9, 86_399, 86_400, 3_600_000)
    ]
    assert shown == ["[59:59", "[23:59:59", "[1 d 00:00:00", "[41 d 16:00:00"]


def test_the_live_view_shows_stages_processes_and_use(progress):
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(
        panel(progress, HEALTH, {"trainer.0": "running", "inference.0": "running"}, 1060.0)
    )
    text = console.export_text()
    for part in (
        "✓ init",
        "▶ rl",
        "· report",
        "12/40",
        "waiting 2 s for batch 13",
        "88 %",
        "3 MiB",
        "inference.0",
    ):
        assert part in text


def test_the_validation_loss_stands_beside_the_loss_and_is_no_step():
    sft = Progress("reverse_text-0123456789ab", "sft", 1, ("init", "sft"), ("init",), 40, 1000.0)
    sft.add("trainer.0", {"stage": "sft", "attempt": 1, "step": 3, "loss": 0.5})
    sft.add(
        "trainer.0",
        {"stage": "sft", "attempt": 1, "step": 4, "event": "validation", "validation_loss": 0.75},
    )
    assert "sft 3/40 · loss 0.5 · validation loss 0.75" in line(sft, {}, 1060.0)


def test_held_out_rewards_stand_side_by_side_where_there_are_several_tasks(progress):
    row = {"stage": "rl", "attempt": 2, "step": None, "event": "evaluation", "version": 8}
    progress.add("orchestrator.0", {**row, "task": "swe", "reward_mean": 0.12})
    assert " · held-out reward 0.12" in line(progress, {}, 1060.0)
    progress.add("orchestrator.0", {**row, "task": "maths", "reward_mean": 0.95})
    assert " · held-out reward swe 0.12, maths 0.95" in line(progress, {}, 1060.0)
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(panel(progress, {}, {}, 1060.0))
    assert "held-out reward swe 0.12, maths 0.95" in console.export_text()


def test_a_sparkline_spans_zero_to_one():
    assert sparkline([-0.5, 0.0, 0.5, 1.0, 2.0]) == "▁▁▅██"


def test_the_tail_yields_every_whole_row_once_and_waits_for_a_torn_one(tmp_path):
    metrics = MetricsFile(tmp_path, "rl", "trainer", 0, 1)
    metrics.write(1, loss=1.0)
    skipping, whole = MetricsTail(tmp_path, from_end=True), MetricsTail(tmp_path)
    assert [row["step"] for _, row in whole.new_rows()] == [1]
    metrics.write(2, loss=2.0)
    with metrics.span("wait", step=2):
        pass
    path = tmp_path / "metrics/trainer.0.jsonl"
    with open(path, "a") as file:
        file.write('{"time_s":3,"step":3,')
    for tail in (skipping, whole):
        assert [(name, row["step"]) for name, row in tail.new_rows()] == [("trainer.0", 2)]
    with open(path, "a") as file:
        file.write('"loss":3}\n')
    assert [row["step"] for _, row in whole.new_rows()] == [3]
    assert list(whole.new_rows()) == []


def test_a_file_that_cannot_be_read_at_one_look_keeps_its_rows_for_the_next_and_no_others_back(
    tmp_path, monkeypatch
):
    for role in ("engine", "orchestrator", "trainer"):
        MetricsFile(tmp_path, "rl", role, 0, 1).write(1)
    tail, seen, read, failing = MetricsTail(tmp_path), [], open_regular, ["orchestrator.0.jsonl"]

    def open_or_fail(path):
        if path.name in failing:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return read(path)

    def look():
        for process, _ in tail.new_rows():
            seen.append(process)

    monkeypatch.setattr("orrery.runtime.metrics.open_regular", open_or_fail)
    with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
        look()
    assert seen == ["engine.0", "trainer.0"]
    failing.clear()
    look()
    look()
    assert seen == ["engine.0", "trainer.0", "orchestrator.0"]


def test_scalars_are_named_by_event_and_stepped_by_step_or_version():
    row = {
        "time_s": 1.0,
        "stage": "rl",
        "attempt": 1,
        "step": None,
        "event": "update",
        "version": 4,
        "pause_s": 0.2,
        "dropped": {"stale": 3},
        "how": "x",
    }
    assert named("orchestrator.0", row) == (4, {"update/pause_s": 0.2, "update/dropped/stale": 3.0})


def test_what_a_row_is_about_is_in_its_scalars_names_so_that_no_two_series_are_one():
    stamp = {"time_s": 1.0, "stage": "rl", "attempt": 1, "step": None}
    evaluation = {
        **stamp,
        "event": "evaluation",
        "version": 4,
        "reward_mean": 0.5,
        "failures": {"timeout": 2},
    }
    assert named("orchestrator.0", {**evaluation, "task": "swe"})[1] == {
        "evaluation/swe/reward_mean": 0.5, "evaluation/swe/failures/timeout": 2.0,
    }  # fmt: skip
    assert (
        "evaluation/swe/after/reward_mean"
        in named("orchestrator.0", {**evaluation, "task": "swe", "policy": "after"})[1]
    )
    load = {**stamp, "event": "engine", "kv_usage": 0.25}
    assert [named("orchestrator.0", {**load, "engine": index})[1] for index in (0, 1)] == [
        {"engine/0/kv_usage": 0.25}, {"engine/1/kv_usage": 0.25},
    ]  # fmt: skip
    restart = {**stamp, "event": "engine_restart", "process": "inference.1", "incarnation": 2}
    assert named("launcher.0", restart) == (None, {"engine_restart/inference.1/incarnation": 2.0})


def test_tensorboard_reads_back_what_was_written(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    for step in (1, 2):
        sink.write(
            "trainer.0",
            {"time_s": 100.0 + step, "stage": "rl", "attempt": 1, "step": step, "loss": step / 4},
        )
    sink.close()
    events = EventAccumulator(str(tmp_path / "metrics/tensorboard/rl/trainer.0")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("trainer/loss")] == [
        (1, 0.25),
        (2, 0.5),
    ]


def test_wandb_is_used_only_when_configured_and_its_absence_is_a_sentence(tmp_path, monkeypatch):
    for name in ("WANDB_PROJECT", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert not configured()
    monkeypatch.setenv("WANDB_PROJECT", "p")
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert configured()
    with pytest.raises(OrreryError, match="wandb is not installed"):
        WandbSink(tmp_path / "reverse_text-0123456789ab")


def test_wandb_gets_one_run_a_folder_and_steps_as_values(tmp_path, monkeypatch):
    logged, started = [], {}
    run = SimpleNamespace(
        define_metric=lambda *_, **__: None,
        log=logged.append,
        finish=lambda quiet: started.update(finished=quiet),
    )
    monkeypatch.setenv("WANDB_PROJECT", "p")
    monkeypatch.setitem(
        sys.modules,
        "wandb",
        SimpleNamespace(init=lambda **settings: started.update(settings) or run),
    )
    sink = WandbSink(tmp_path / "reverse_text-0123456789ab")
    sink.write("trainer.0", {"time_s": 1.0, "stage": "rl", "attempt": 1, "step": 7, "loss": 0.5})
    for engine in (0, 1):
        sink.write(
            "orchestrator.0",
            {"time_s": 1.0, "stage": "rl", "event": "engine", "engine": engine, "kv_usage": 0.5},
        )
    sink.close()
    assert (started["name"], started["resume"], started["finished"]) == (
        "reverse_text-0123456789ab",
        "allow",
        True,
    )
    ids = [started["id"]]
    for checkout in (tmp_path, tmp_path / "other"):
        WandbSink(checkout / "reverse_text-0123456789ab")
        ids.append(started["id"])
    assert ids[0] == ids[1] != ids[2] and all(one.startswith("0123456789ab-") for one in ids), (
        "resumed, but not by another checkout"
    )
    assert logged == [
        {"rl/trainer/loss": 0.5, "rl/step": 7},
        {"rl/engine/0/kv_usage": 0.5},
        {"rl/engine/1/kv_usage": 0.5},
    ]
