"""The report is drawn from a run directory alone, whole or unfinished."""

import json
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orrery.observe.duration import duration
from orrery.observe.report.data import RunData, Span, overlap_s, shares, union, wall_s
from orrery.observe.report.figures import warm_start
from orrery.observe.report.page import render, summary

MANIFEST = Path(__file__).parents[3] / "manifests" / "reverse_text.json"
intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=8)


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Three steps of RL, with every kind of row that the page reads."""
    shutil.copy(MANIFEST, tmp_path / "manifest.json")
    same_weights = "logprob_max_abs_diff_same_weights"
    stamp = {"attempt": 1, "stage": "rl"}
    steps = range(1, 4)
    trainer = [
        {**stamp, "time_s": 100.0 + n, "step": n, "loss": 0.1, "entropy": 1.0 / n, "mismatch_kl": 1e-7, same_weights: 3e-6,
         "forward_backward_s": 0.4, "optimizer_s": 0.1, "publish_s": 0.1, "wait_s": 0.4, "step_time_s": 1.0, "tokens_per_s": 900.0}
        for n in steps
    ]  # fmt: skip
    sft = [{**stamp, "stage": "sft", "time_s": 10.0 + n, "step": n, "loss": 3.0 / n} for n in steps]
    batches = [
        {**stamp, "event": "batch", "time_s": 100.0 + n, "step": n, "reward_mean": 0.2 * n, "staleness_counts": [80, 20],
         "staleness_max": 1, "num_versions": 2, "num_mixed_rollouts": 3, "generated_tokens_per_s": 1000.0,
         "dropped": {"zero_advantage": 8 * n}}
        for n in steps
    ]  # fmt: skip
    evaluations = [
        {**stamp, "event": "evaluation", "time_s": 99.0 + v, "step": None, "version": v, "task": "reverse_text", "reward_mean": 0.3 * v}
        for v in (0, 3)
    ]
    updates = [{**stamp, "event": "update", "time_s": 101.0, "step": None, "version": 1, "pause_s": 0.03}]
    write_rows(tmp_path / "metrics" / "trainer.0.jsonl", sft + trainer)
    admitted = [{**stamp, "event": "admission", "time_s": 100.0 + n, "step": None, "limit": 8 * n, "num_in_flight": 7 * n} for n in steps]
    loads = [{**stamp, "event": "engine", "time_s": 100.0 + n, "step": None, "engine": 0, "kv_usage": 0.2 * n} for n in steps]
    write_rows(tmp_path / "metrics" / "orchestrator.0.jsonl", batches + evaluations + updates + admitted + loads)
    usage = [
        {**stamp, "event": "usage", "time_s": 100.0 + n, "step": None, "processes": {"trainer.0": {"cpu_percent": 80.0, "rss_bytes": 1}}}
        for n in steps
    ]
    write_rows(tmp_path / "metrics" / "launcher.0.jsonl", usage)
    spans = [{**stamp, "name": "forward_backward", "start_s": 100.0 + n, "end_s": 100.5 + n, "step": n} for n in steps]
    write_rows(tmp_path / "metrics" / "trainer.0.spans.jsonl", spans)
    write_rows(
        tmp_path / "metrics" / "orchestrator.0.spans.jsonl",
        [{**stamp, "name": "generate", "engine": 0, "start_s": 100.0, "end_s": 102.25, "step": None}],
    )
    write_rows(
        tmp_path / "rollouts" / "evaluate.jsonl",
        [
            {
                "policy": policy,
                "task": "reverse_text",
                "problem": 7,
                "reward": reward,
                "messages": [{"role": "user", "content": "<abc>"}, {"role": "assistant", "content": text}],
            }
            for policy, reward, text in (("before", 0.33, "abc"), ("after", 1.0, "cba"))
        ],
    )
    for stage, seconds in (("init", 2.0), ("rl", 100.0), ("evaluate", 30.0)):
        marker = tmp_path / "stages" / stage / "DONE"
        marker.parent.mkdir(parents=True)
        marker.write_text(json.dumps({"attempt": 1, "started_s": seconds, "ended_s": 2 * seconds, "wall_s": seconds}))
    (tmp_path / "stages" / "evaluate" / "result.json").write_text(
        json.dumps({"before": {"reward_mean": 0.314}, "after": {"reward_mean": 0.872}})
    )
    return tmp_path


def test_the_page_holds_every_figure_and_needs_nothing_from_outside(run_dir):
    html = render(RunData.load(run_dir), 132.0)
    assert len(re.findall(r'id="figure-\d+"', html)) == 11
    assert not re.search(r'<(?:script|link|img)[^>]+(?:src|href)="', html)
    assert "0.31 → 0.87" in html and "&lt;abc&gt;" in html and "zero_advantage" in html


def test_the_validation_loss_is_drawn_beside_the_loss_and_counts_as_no_step(run_dir):
    assert [line.name for line in warm_start(RunData.load(run_dir)).data] == ["trained examples"]
    path = run_dir / "metrics" / "trainer.0.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    stamp = {"attempt": 1, "stage": "sft", "event": "validation"}
    write_rows(path, rows + [{**stamp, "time_s": 9.5 + n, "step": n, "validation_loss": 4.0 / (n + 1)} for n in (0, 3)])
    data = RunData.load(run_dir)
    assert [row["step"] for row in data.sft] == [1, 2, 3]
    trained, validated = warm_start(data).data
    assert (trained.x, trained.y) == ((1, 2, 3), (3.0, 1.5, 1.0))
    assert (validated.name, validated.x, validated.y) == ("validation", (0, 3), (4.0, 1.0))


def test_an_unfinished_run_gives_a_shorter_page(tmp_path):
    shutil.copy(MANIFEST, tmp_path / "manifest.json")
    html = render(RunData.load(tmp_path), 0.0)
    assert "reverse_text" in html and 'id="figure-1"' not in html


def test_lines_that_were_cut_off_by_kills_are_left_out_wherever_they_stand(run_dir):
    for name in ("rollouts/evaluate.jsonl", "metrics/trainer.0.spans.jsonl"):
        path = run_dir / name
        path.write_text('{"policy": "aft\n' + path.read_text() + '{"policy": "aft')
    data = RunData.load(run_dir)
    assert len(data.evaluated) == 2 and len(data.spans) == 4


def test_a_line_break_of_unicode_in_a_rollout_breaks_no_line(run_dir):
    path = run_dir / "rollouts" / "evaluate.jsonl"
    path.write_text(path.read_text().replace("cba", "c\u2028a"), encoding="utf-8")
    assert RunData.load(run_dir).evaluated[1]["messages"][1]["content"] == "c\u2028a"


def test_after_a_resume_shares_are_of_the_newest_attempt_and_the_time_is_of_all(run_dir):
    def again(row):
        return {**row, "attempt": 2, **{key: row[key] + 1000.0 for key in ("start_s", "end_s", "time_s") if key in row}}

    before = RunData.load(run_dir)
    for name in ("trainer.0.spans", "orchestrator.0.spans", "launcher.0"):
        path = run_dir / "metrics" / f"{name}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        write_rows(path, rows + [again(row) for row in rows])
    done = run_dir / "stages" / "rl" / "DONE"
    done.write_text(json.dumps({**json.loads(done.read_text()), "attempt": 2}))
    after = RunData.load(run_dir)
    assert shares(after.spans) == shares(before.spans) and len(after.spans) == len(before.spans)
    assert wall_s(before) == 132.0 and wall_s(before, "evaluate") == 102.0
    assert wall_s(after) == 132.0 + 2.0, "the first attempt worked from 101 s to 103 s"


def test_the_last_line_says_reward_time_and_place(run_dir):
    line = summary(RunData.load(run_dir), 252.3, Path("runs/x/report/index.html"))
    assert line == "reverse_text: held-out reward 0.87 (0.31 before RL), 4 min 12 s, report: runs/x/report/index.html"
    assert [duration(seconds) for seconds in (0.04, 59.94, 59.96)] == ["0.0 s", "59.9 s", "1 min 0 s"]


def test_shares_of_the_rl_time(run_dir):
    spent = shares(RunData.load(run_dir).spans)
    assert spent is not None
    assert spent.window_s == 3.5 and spent.trainer_busy == pytest.approx(1.5 / 3.5) and spent.engine_busy == pytest.approx(2.25 / 3.5)
    assert spent.overlapped == pytest.approx(0.75 / 1.5)
    assert shares([Span("inference.0", "generate", 0.0, 1.0, None)]) is None


@given(intervals, intervals)
def test_overlap_equals_counting_the_unit_cells(left, right):
    cells = [{t for start, end in side for t in range(start, end)} for side in (left, right)]
    assert overlap_s(left, right) == len(cells[0] & cells[1])
    assert sum(end - start for start, end in union(left)) == len(cells[0])
