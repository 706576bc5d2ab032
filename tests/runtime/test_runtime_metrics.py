"""Metric rows: written whole, read back merged."""

import errno
import json
import math
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orrery.runtime.metrics import MetricsFile, MetricsTail, merge_attempts, read, rows


def test_the_newest_attempt_wins_from_the_first_step_it_made(tmp_path):
    for attempt, steps in ((1, range(1, 9)), (2, range(6, 8))):
        metrics = MetricsFile(tmp_path, "rl", "trainer", 0, attempt)
        for step in steps:
            metrics.write(step, loss=attempt)
        metrics.write(note=attempt)
        metrics.close()
    merged = read(tmp_path / "metrics/trainer.0.jsonl")
    assert [(r["step"], r["loss"]) for r in merged if r["step"]] == [
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 1),
        (5, 1),
        (6, 2),
        (7, 2),
    ]
    assert [r["note"] for r in merged if "note" in r] == [1, 2]


def test_stages_and_events_do_not_hide_each_other(tmp_path):
    MetricsFile(tmp_path, "sft", "trainer", 0, 1).write(1, loss=1.0)
    rl = MetricsFile(tmp_path, "rl", "trainer", 0, 2)
    rl.write(1, loss=2.0)
    rl.write(0, event="update")
    assert [row.get("loss") for row in read(tmp_path / "metrics/trainer.0.jsonl")] == [
        1.0,
        2.0,
        None,
    ]


def test_a_line_torn_by_a_kill_is_skipped_and_the_next_row_stands_alone(tmp_path):
    metrics = MetricsFile(tmp_path, "rl", "trainer", 0, 1)
    metrics.write(1, loss=1.0)
    path = tmp_path / "metrics/trainer.0.jsonl"
    with open(path, "ab") as file:
        file.write(b'{"step":2,"lo')
    MetricsFile(tmp_path, "rl", "trainer", 0, 2).write(2, loss=2.0)
    assert [row["loss"] for row in rows(path)] == [1.0, 2.0]


def test_a_row_that_a_disk_takes_in_parts_is_whole(tmp_path, monkeypatch):
    metrics, write = MetricsFile(tmp_path, "rl", "trainer", 0, 1), os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
    for step in (1, 2):
        metrics.write(step, loss=0.5)
    assert [row["step"] for row in rows(tmp_path / "metrics/trainer.0.jsonl")] == [1, 2]


@pytest.mark.parametrize("taken", [0, 1, 7])
def test_a_row_that_a_full_disk_tears_takes_no_other_with_it(tmp_path, monkeypatch, taken):
    metrics, write, room = MetricsFile(tmp_path, "rl", "trainer", 0, 1), os.write, [10**6]

    def fill(file, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = write(file, data[: room[0]])
        room[0] -= done
        return done

    monkeypatch.setattr(os, "write", fill)
    metrics.write(1)
    for step in (2, 3):  # the second tears where the first has torn already
        room[0] = taken
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            metrics.write(step)
    room[0] = 10**6
    for step in (4, 5):
        metrics.write(step)
    path = tmp_path / "metrics/trainer.0.jsonl"
    assert [row["step"] for row in rows(path)] == [1, 4, 5]
    assert [row["step"] for _, row in MetricsTail(tmp_path).new_rows()] == [1, 4, 5]


def test_numbers_of_other_libraries_become_json_and_what_is_not_finite_becomes_null(tmp_path):
    metrics = MetricsFile(tmp_path, "rl", "trainer", 0, 1)
    metrics.write(
        np.int64(3), loss=np.float32(0.5), counts=np.arange(3), bad=math.nan, dropped={1: np.inf}
    )
    text = (tmp_path / "metrics/trainer.0.jsonl").read_text()
    row = json.loads(text, parse_constant=pytest.fail)
    assert (row["step"], row["loss"], row["counts"], row["bad"], row["dropped"]) == (
        3,
        0.5,
        [0, 1, 2],
        None,
        {"1": None},
    )


def test_a_span_is_recorded_when_its_body_raises(tmp_path):
    metrics = MetricsFile(tmp_path, "rl", "trainer", 0, 1)
    with pytest.raises(ZeroDivisionError), metrics.span("publish", step=2, version=3):
        raise ZeroDivisionError
    (span,) = read(tmp_path / "metrics/trainer.0.spans.jsonl")
    assert (span["name"], span["step"], span["version"]) == ("publish", 2, 3) and span[
        "end_s"
    ] >= span["start_s"]


attempts = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6)), min_size=1, max_size=5)


@given(attempts)
def test_merged_steps_are_those_of_the_run_that_survived(runs):
    """Attempt k resumes at `begin` for `count` steps. The model is a list, cut and extended."""
    written, lineage = [], {}
    for attempt, (begin, count) in enumerate(runs, start=1):
        lineage = {step: made for step, made in lineage.items() if step < begin}
        for step in range(begin, begin + count):
            written.append(
                {"stage": "rl", "attempt": attempt, "step": step, "time_s": float(len(written))}
            )
            lineage[step] = attempt
    assert {row["step"]: row["attempt"] for row in merge_attempts(written)} == lineage
    assert len(merge_attempts(written)) == len(lineage)
