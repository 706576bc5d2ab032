"""The report is drawn from a run directory alone, whole or unfinished, of minutes or of weeks."""

import json
import re
import shutil
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orrery.manifest.budget.run import plan_run
from orrery.manifest.budget.table import in_seconds
from orrery.manifest.errors import OrreryError
from orrery.observe.report.data import (
    POINTS,
    RunData,
    Span,
    Table,
    extremes,
    largest,
    means,
    overlap_s,
    shares,
    union,
    wall_s,
)
from orrery.observe.report.figures import (
    about,
    admission,
    agreement,
    processors,
    reward,
    step_parts,
    timeline,
    versions,
    warm_start,
)
from orrery.observe.report.page import SECTIONS, _tiles, comparison, render, summary
from orrery.runtime.metrics import read
from orrery.runtime.timing import duration

MANIFEST = Path(__file__).parents[2] / "manifests" / "reverse_text.json"
intervals = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 8)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    max_size=8,
)


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
        {**stamp, "time_s": 100.0 + n, "step": n, "loss": 0.1, "entropy": 1.0 / n,
         "mismatch_kl": 1e-7, same_weights: 3e-6,
         "forward_backward_s": 0.4, "optimizer_s": 0.1, "publish_s": 0.1, "wait_s": 0.4,
         "step_time_s": 1.0, "tokens_per_s": 900.0}
        for n in steps
    ]  # fmt: skip
    sft = [{**stamp, "stage": "sft", "time_s": 10.0 + n, "step": n, "loss": 3.0 / n} for n in steps]
    batches = [
        {**stamp, "event": "batch", "time_s": 100.0 + n, "step": n, "reward_mean": 0.2 * n,
         "staleness_counts": [80, 20],
         "staleness_max": 1, "num_versions": 2, "num_mixed_rollouts": 3,
         "generated_tokens_per_s": 1000.0,
         "dropped": {"zero_advantage": 8 * n}, "num_sampled": 512,
         "num_without_signal": 256 * (n - 1) + 32,
         "num_zero_advantage": 256 if n == 3 else 8}
        for n in steps
    ]  # fmt: skip
    evaluations = [
        {
            **stamp,
            "event": "evaluation",
            "time_s": 99.0 + v,
            "step": None,
            "version": v,
            "task": "reverse_text",
            "reward_mean": 0.3 * v,
        }
        for v in (0, 3)
    ]
    updates = [
        {**stamp, "event": "update", "time_s": 101.0, "step": None, "version": 1, "pause_s": 0.03}
    ]
    write_rows(tmp_path / "metrics" / "trainer.0.jsonl", sft + trainer)
    admitted = [
        {
            **stamp,
            "event": "admission",
            "time_s": 100.0 + n,
            "step": None,
            "limit": 8 * n,
            "num_in_flight": 7 * n,
        }
        for n in steps
    ]
    loads = [
        {
            **stamp,
            "event": "engine",
            "time_s": 100.0 + n,
            "step": None,
            "engine": 0,
            "kv_usage": 0.2 * n,
        }
        for n in steps
    ]
    write_rows(
        tmp_path / "metrics" / "orchestrator.0.jsonl",
        batches + evaluations + updates + admitted + loads,
    )
    usage = [
        {
            **stamp,
            "event": "usage",
            "time_s": 100.0 + n,
            "step": None,
            "processes": {"trainer.0": {"cpu_percent": 80.0, "rss_bytes": 1}},
        }
        for n in steps
    ]
    write_rows(tmp_path / "metrics" / "launcher.0.jsonl", usage)
    spans = [
        {**stamp, "name": "forward_backward", "start_s": 100.0 + n, "end_s": 100.5 + n, "step": n}
        for n in steps
    ]
    write_rows(tmp_path / "metrics" / "trainer.0.spans.jsonl", spans)
    write_rows(
        tmp_path / "metrics" / "orchestrator.0.spans.jsonl",
        [
            {
                **stamp,
                "name": "generate",
                "engine": 0,
                "start_s": 100.0,
                "end_s": 102.25,
                "step": None,
            }
        ],
    )
    write_rows(
        tmp_path / "rollouts" / "evaluate.jsonl",
        [
            {
                "policy": policy,
                "task": "reverse_text",
                "problem": 7,
                "reward": reward,
                "messages": [
                    {"role": "user", "content": "<abc>"},
                    {"role": "assistant", "content": text},
                ],
            }
            for policy, reward, text in (("before", 0.33, "abc"), ("after", 1.0, "cba"))
        ],
    )
    for stage, seconds in (("init", 2.0), ("rl", 100.0), ("evaluate", 30.0)):
        marker = tmp_path / "stages" / stage / "DONE"
        marker.parent.mkdir(parents=True)
        marker.write_text(
            json.dumps(
                {"attempt": 1, "started_s": seconds, "ended_s": 2 * seconds, "wall_s": seconds}
            )
        )
    (tmp_path / "stages" / "evaluate" / "result.json").write_text(
        json.dumps({"before": {"reward_mean": 0.314}, "after": {"reward_mean": 0.872}})
    )
    return tmp_path


def test_the_page_sets_the_plan_beside_the_measurement(run_dir):
    run = RunData.load(run_dir)
    assert comparison(run) == []  # empty, because the rows lack `num_tokens`
    path = run_dir / "metrics" / "trainer.0.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    more = {"num_tokens": 256 * 40, "peak_bytes": 3 << 29}
    write_rows(path, [row | more if row["stage"] == "rl" else row for row in rows])
    span = {"stage": "rl", "attempt": 1, "step": 4, "start_s": 10.0}
    spans = [
        span | {"name": name, "end_s": 10.0 + seconds}
        for name, seconds in (("checkpoint", 2.0), ("checkpoint_write", 30.0))
    ]
    write_rows(run_dir / "metrics" / "trainer.0.spans.jsonl", spans)
    run = RunData.load(run_dir)
    found = {what: (planned, measured) for what, planned, measured in comparison(run)}
    budget = plan_run(run.manifest, 40)
    assert found["wait for a checkpoint"] == (in_seconds(budget.checkpoint["waits_s"]), "2 s")
    assert found["checkpoint's way to disk"][1] == "30 s"
    assert found["step"] == (f"{budget.step_s:.2g} s", "1 s")
    assert found["step of the trainer alone"][1] == "0.5 s"
    sampled = 256 * budget.tokens["sampled"] / budget.step_s
    assert found["sampled tokens a second"] == (f"{sampled:,.0f}", "1,000")
    assert found["trainer's peak of allocated memory"][1] == "1.5 GiB"
    assert "Plan and measurement" in render(run, 132.0)


def test_the_plan_beside_the_measurement_has_the_network_of_the_runs_receipt(run_dir):
    shutil.copy(MANIFEST.with_name("glm5_run.json"), run_dir / "manifest.json")
    path = run_dir / "metrics" / "trainer.0.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    manifest = RunData.load(run_dir).manifest
    tokens = 1000 * manifest.orchestrator.rollouts_per_batch
    write_rows(path, [row | {"num_tokens": tokens} for row in rows])
    step_s = {rate: plan_run(manifest, 1000, rate).step_s for rate in (None, 5e9)}
    attempts = [{"network": {"gbit_per_s": 400.0}}, {"network": {"gbit_per_s": 40.0}}]
    whole = {"schema": 1, "run": {"id": "x"}, "stages": {"rl": {"attempts": attempts}}}
    receipts = {"": None, "{}": None, json.dumps(whole): 5e9}
    for text, rate in receipts.items():
        if text:
            (run_dir / "receipt.json").write_text(text)
        found = {what: planned for what, planned, _ in comparison(RunData.load(run_dir))}
        assert found["step"] == in_seconds(step_s[rate])
    assert step_s[5e9] > 1.5 * step_s[None]


def test_a_planning_error_is_blamed_on_no_row(run_dir, monkeypatch):
    path = run_dir / "metrics" / "trainer.0.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    write_rows(path, [row | {"num_tokens": 256 * 40} for row in rows])

    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("orrery.observe.report.page.plan_run", broken)
    with pytest.raises(ZeroDivisionError):
        render(RunData.load(run_dir), 1.0)


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
    write_rows(
        path,
        rows
        + [
            {**stamp, "time_s": 9.5 + n, "step": n, "validation_loss": 4.0 / (n + 1)}
            for n in (0, 3)
        ],
    )
    data = RunData.load(run_dir)
    assert [row["step"] for row in data.sft] == [1, 2, 3]
    trained, validated = warm_start(data).data
    assert (trained.x, trained.y) == ((1, 2, 3), (3.0, 1.5, 1.0))
    assert (validated.name, validated.x, validated.y) == ("validation", (0, 3), (4.0, 1.0))


def test_rounds_with_other_sites_are_rows_with_members_tokens_bytes_and_loss(run_dir):
    assert "Rounds with other sites" not in render(RunData.load(run_dir), 1.0)
    path = run_dir / "metrics" / "trainer.0.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    row = {"attempt": 1, "stage": "sft", "event": "round", "time_s": 9.5, "step": 2, "round": 7}
    row |= {"members": ["5fbb423a", "92ede154"], "weights": [1200, 0], "num_bytes": 34567}
    row |= {"names": ["oslo", "lima"], "sync_s": 0.25}
    write_rows(path, [*rows, row])
    text = re.sub(r"<[^>]+>", " ", render(RunData.load(run_dir), 1.0).split("Rounds with other")[1])
    found = ["7", "oslo", "lima", "1,200", "·", "0", "34,567", "1.500", "0.25"]
    assert text.split()[8:17] == found


@pytest.mark.parametrize(
    "name", ["metrics/trainer.0.jsonl", "metrics/trainer.0.spans.jsonl", "rollouts/evaluate.jsonl"]
)
def test_a_folder_in_the_place_of_rows_is_one_sentence(run_dir, name):
    (run_dir / name).unlink()
    (run_dir / name).mkdir()
    with pytest.raises(OrreryError, match=f"{name}: it is a folder; restore this file"):
        RunData.load(run_dir)


@pytest.mark.parametrize("text", ["", "touched by hand", "[]", '{"attempt": 1}'])
def test_a_hand_made_marker_is_one_sentence(run_dir, text):
    (run_dir / "stages/rl/DONE").write_text(text)
    with pytest.raises(OrreryError, match=r"stages/rl/DONE: .*; remove it and run the stage again"):
        RunData.load(run_dir)


def test_an_odd_row_is_one_sentence_that_names_its_file_or_figure(run_dir):
    path = run_dir / "metrics" / "trainer.0.jsonl"
    path.write_text(
        path.read_text()
        + json.dumps({"attempt": 1, "stage": "rl", "time_s": 104.0, "step": 4, "step_time_s": "x"})
        + "\n"
    )
    with pytest.raises(
        OrreryError,
        match="metrics/, for the figure 'Parts of a step': a row is malformed",
    ):
        render(RunData.load(run_dir), 1.0)


def test_an_evaluated_row_without_a_reward_is_one_sentence(run_dir):
    path = run_dir / "rollouts" / "evaluate.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row | {"reward": None}) + "\n" for row in rows))
    with pytest.raises(OrreryError, match=r"evaluate.jsonl: a row is malformed"):
        render(RunData.load(run_dir), 1.0)


def test_an_unfinished_run_gives_a_shorter_page(tmp_path):
    shutil.copy(MANIFEST, tmp_path / "manifest.json")
    html = render(RunData.load(tmp_path), 0.0)
    assert "reverse_text" in html and 'id="figure-1"' not in html


def test_a_page_of_a_run_without_a_batch_shows_its_evaluation_and_says_what_is_missing(run_dir):
    path = run_dir / "metrics" / "orchestrator.0.jsonl"
    write_rows(
        path,
        [row for row in read(path) if row.get("event") == "evaluation" and row["version"] == 0],
    )
    shutil.rmtree(run_dir / "stages" / "rl")
    run = RunData.load(run_dir)
    html = render(run, 32.0)
    assert [(line.name, line.x, line.y) for line in reward(run).data] == [
        ("held-out reverse_text", (0,), (0.0,))
    ]
    assert "No batch has counted them yet." in html and "None was dropped." not in html
    assert _tiles(run, 32.0)[-1] == ("32.0 s", "finished stages, all attempts; not yet sft, rl")


def test_one_step_is_seen_as_a_point(run_dir):
    for name in ("trainer.0", "orchestrator.0"):
        path = run_dir / "metrics" / f"{name}.jsonl"
        write_rows(path, [row for row in read(path) if row["step"] in (None, 1)])
    run = RunData.load(run_dir)
    assert [line.mode for line in [*reward(run).data[:1], *versions(run).data]] == [
        "lines+markers"
    ] * 3


def test_rewards_that_are_no_numbers_break_nothing_and_those_beyond_zero_and_one_are_in_sight(
    run_dir,
):
    path, trainer = (
        run_dir / "metrics" / "orchestrator.0.jsonl",
        run_dir / "metrics" / "trainer.0.jsonl",
    )
    values = {1: -0.5, 2: None, 3: 4.0}
    write_rows(
        path,
        [
            {**row, "reward_mean": values[row["step"]]} if row.get("event") == "batch" else row
            for row in read(path)
        ],
    )
    compared = {
        "attempt": 1,
        "stage": "rl",
        "event": "compare",
        "time_s": 105.0,
        "step": None,
        "version": 3,
    }
    write_rows(trainer, [*read(trainer), {**compared, "logprob_max_abs_diff_same_weights": None}])
    run = RunData.load(run_dir)
    figure = reward(run)
    assert figure.data[0].x == (1, 3) and figure.layout.yaxis.range == (-0.5, 4.0)
    assert ("3.0e-06", "max |Δ log-prob| trainer − engine, same weights, at 3 versions") in _tiles(
        run, 1.0
    )
    assert render(run, 1.0)


def test_held_out_tasks_have_colours_of_their_own(run_dir):
    path = run_dir / "metrics" / "orchestrator.0.jsonl"
    found = read(path)
    write_rows(
        path,
        found + [{**row, "task": "maths"} for row in found if row.get("event") == "evaluation"],
    )
    first, second = reward(RunData.load(run_dir)).data[1:]
    assert {first.name, second.name} == {
        "held-out reverse_text",
        "held-out maths",
    } and first.line.color != second.line.color


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
        return {
            **row,
            "attempt": 2,
            **{key: row[key] + 1000.0 for key in ("start_s", "end_s", "time_s") if key in row},
        }

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
    silent = "56% of training rollouts without signal"
    assert (
        line == f"reverse_text: held-out reward 0.87 (0.31 before RL), {silent}, 4 min 12 s, "
        "report: runs/x/report/index.html"
    )
    assert [duration(seconds) for seconds in (0.04, 59.94, 59.96)] == [
        "0.0 s",
        "59.9 s",
        "1 min 0 s",
    ]


def test_a_poor_run_without_signal_says_where_the_advice_is(run_dir):
    result = run_dir / "stages" / "evaluate" / "result.json"
    found = {"reward_mean": 0.02, "num_rollouts": 256, "num_failed": 0}
    result.write_text(json.dumps({"before": found, "after": found}))
    line = summary(RunData.load(run_dir), 1.0, Path("x"))
    assert "without signal (logs/orchestrator.0.log says what to change), 1.0 s" in line


def test_failed_held_out_rollouts_are_told_beside_the_reward_that_leaves_them_out(run_dir):
    result = run_dir / "stages" / "evaluate" / "result.json"
    policies = {"before": (0.314, 256, 0), "after": (0.872, 20, 236)}
    names = ("reward_mean", "num_rollouts", "num_failed")
    result.write_text(
        json.dumps({when: dict(zip(names, found, strict=True)) for when, found in policies.items()})
    )
    run = RunData.load(run_dir)
    told = "without failed rollouts: 0 of 256 before RL and 236 of 256 after RL"
    silent = "56% of training rollouts without signal"
    assert (
        summary(run, 252.3, Path("x"))
        == f"reverse_text: held-out reward 0.87 (0.31 before RL), {told}, {silent}, 4 min 12 s, "
        "report: x"
    )
    assert _tiles(run, 252.3)[0] == ("0.31 → 0.87", f"held-out reward, before → after RL, {told}")


def test_timeouts_are_told_in_training_and_held_out(run_dir):
    assert (
        "0",
        "training rollouts timed out (each a reward of 0); held-out rollouts timed out: none",
    ) in _tiles(RunData.load(run_dir), 1.0)
    path = run_dir / "metrics" / "orchestrator.0.jsonl"
    write_rows(
        path,
        [
            json.loads(line) | ({"dropped": {"timeout": 7}} if '"batch"' in line else {})
            for line in path.read_text().splitlines()
        ],
    )
    result = run_dir / "stages" / "evaluate" / "result.json"
    result.write_text(
        json.dumps(
            {
                when: {"reward_mean": 0.5, "num_timeouts": num}
                for when, num in (("before", 0), ("after", 9))
            }
        )
    )
    run = RunData.load(run_dir)
    told = "timed out: 0 before RL and 9 after RL"
    assert (
        "7",
        f"training rollouts timed out (each a reward of 0); held-out rollouts {told}",
    ) in _tiles(run, 1.0)
    assert told in summary(run, 1.0, Path("x"))


def test_an_early_end_is_told_with_its_reason(run_dir):
    assert "early" not in summary(RunData.load(run_dir), 1.0, Path("x"))
    row = {
        "stage": "rl",
        "attempt": 1,
        "event": "stopped_early",
        "time_s": 104.0,
        "step": 3,
        "version": 3,
        "num_steps": 100,
    }
    with (run_dir / "metrics" / "orchestrator.0.jsonl").open("a") as file:
        for attempt, mean in ((1, 0.84), (2, 0.91)):
            file.write(
                json.dumps({**row, "attempt": attempt, "reward_mean": mean, "stop_at": 0.9}) + "\n"
            )
    run, told = (
        RunData.load(run_dir),
        "RL ended early after step 3 of 100 (a held-out reward reached stop_at 0.9, 0.91 at the "
        "end)",
    )
    assert told in summary(run, 1.0, Path("x")) and ("3 of 100", told) in _tiles(run, 1.0)


def test_the_share_of_rollouts_without_signal_is_a_tile_and_rows_of_old_releases_have_none(
    run_dir,
):
    told = "of training rollouts carried no signal (equal rewards in their group); "
    told += "1 of 3 batches had no signal"
    assert ("56%", told) in _tiles(RunData.load(run_dir), 1.0)
    path = run_dir / "metrics" / "orchestrator.0.jsonl"
    write_rows(
        path,
        [
            {k: v for k, v in json.loads(line).items() if k != "num_sampled"}
            for line in path.read_text().splitlines()
        ],
    )
    run = RunData.load(run_dir)
    assert not any("signal" in what for _, what in _tiles(run, 1.0)) and "signal" not in summary(
        run, 1.0, Path("x")
    )


def test_shares_of_the_rl_time(run_dir):
    spans = RunData.load(run_dir).spans
    spent = shares(spans)
    assert spent is not None and shares([*reversed(spans)]) == spent, (
        "in whatever order they were recorded"
    )
    assert (
        spent.window_s == 3.5
        and spent.trainer_busy == pytest.approx(1.5 / 3.5)
        and spent.engine_busy == pytest.approx(2.25 / 3.5)
    )
    assert spent.overlapped == pytest.approx(0.75 / 1.5)
    assert shares([Span("inference.0", "generate", 0.0, 1.0, None)]) is None
    assert shares([Span("trainer.0", "optimizer", 1.0, 1.0, 1)]) is None, (
        "no time to have a share of"
    )


LONG = 3001  # steps: no multiple of anything
WORST = 1234  # a single step inside a piece


@pytest.fixture
def long_run(run_dir: Path) -> Path:
    """The same run after many steps of 36 s. One is the worst in all; the last were made again."""
    metrics, stamp = run_dir / "metrics", {"attempt": 1, "stage": "rl"}
    step = next(row for row in read(metrics / "trainer.0.jsonl") if row["stage"] == "rl")
    batch = next(row for row in read(metrics / "orchestrator.0.jsonl") if row["event"] == "batch")
    at = [(n, 36.0 * n, n == WORST) for n in range(1, LONG + 1)]
    peak = "logprob_max_abs_diff_same_weights"
    rows = [
        {**step, "step": n, "time_s": s, peak: 9e-5 if worst else 1e-6, "entropy": float(n)}
        for n, s, worst in at
    ]
    again = [
        {**row, "attempt": 2, "time_s": row["time_s"] + 36.0 * LONG, "entropy": -1.0}
        for row in rows[-1:]
    ]
    write_rows(metrics / "trainer.0.jsonl", rows + again)
    event = {**stamp, "step": None}
    write_rows(
        metrics / "orchestrator.0.jsonl",
        [
            {
                **batch,
                "step": n,
                "time_s": s,
                "staleness_max": 7 if worst else 1,
                "num_versions": 9 if worst else 1,
            }
            for n, s, worst in at
        ]
        + [
            {
                **event,
                "event": "admission",
                "time_s": s,
                "limit": 8,
                "num_in_flight": 0 if worst else 8,
            }
            for n, s, worst in at
        ]
        + [
            {
                **event,
                "event": "engine",
                "time_s": s,
                "engine": 0,
                "kv_usage": 1.0 if worst else 0.5,
            }
            for n, s, worst in at
        ],
    )
    used = [{"trainer.0": {"cpu_percent": 800.0 * (n % 2), "rss_bytes": 1}} for n, _, _ in at]
    write_rows(
        metrics / "launcher.0.jsonl",
        [
            {**event, "event": "usage", "time_s": s, "processes": one}
            for (_, s, _), one in zip(at, used, strict=True)
        ],
    )
    parts = (
        ("wait", -36, -30),
        ("forward_backward", -30, -10),
        ("optimizer", -10, -9),
        ("publish", -9, 0),
    )
    write_rows(
        metrics / "trainer.0.spans.jsonl",
        [
            {**stamp, "name": name, "start_s": s + a, "end_s": s + z, "step": n}
            for n, s, _ in at
            for name, a, z in parts
        ],
    )
    write_rows(
        metrics / "orchestrator.0.spans.jsonl",
        [
            {**event, "name": "generate", "engine": 0, "start_s": s - 36, "end_s": s - 18}
            for _, s, _ in at
        ],
    )
    return run_dir


def test_no_line_of_a_long_run_has_more_points_than_a_page_holds(long_run):
    run = RunData.load(long_run)
    drawn = [
        figure
        for _, entries in SECTIONS
        for _, draw in entries
        if (figure := draw(run)) is not None
    ]
    lines = [
        line for figure in drawn if figure.layout.hovermode != "closest" for line in figure.data
    ]
    assert len(drawn) == 10 and len(lines) > 12
    assert all(len(line.x) == len(line.y) <= POINTS for line in lines)
    assert max(len(line.x) for line in lines) > POINTS / 2


def test_what_a_long_run_says_in_numbers_is_of_all_its_rows(long_run):
    run = RunData.load(long_run)
    assert (len(run.rl), len(run.batches), len(run.spans)) == (LONG, LONG, 5 * LONG)
    assert [run.rl[at]["entropy"] for at in (0, -1)] == [1.0, -1.0], (
        "the newest attempt wins a step"
    )
    said = {what: value for value, what in _tiles(run, wall_s(run))}
    assert said["oldest trained token, versions behind (bound 2)"] == "7"
    assert said["batches with tokens of several versions"] == f"1 of {LONG}"
    assert said[f"max |Δ log-prob| trainer − engine, same weights, at {LONG} versions"] == "9.0e-05"
    spent = shares(run.spans)
    assert spent.window_s == 36 * LONG - 9
    assert spent.trainer_busy == pytest.approx(21 * LONG / spent.window_s)
    assert spent.engine_busy == pytest.approx(18 * LONG / spent.window_s)
    assert spent.overlapped == pytest.approx(12 / 21)


def test_thinned_lines_keep_the_worst_value_or_the_mean_and_the_caption_says_which(long_run):
    run = RunData.load(long_run)
    assert max(versions(run).data[0].y) == 9 and max(agreement(run).data[1].y) == 9e-5
    _, in_flight, cache = admission(run).data
    assert min(in_flight.y) == 0 and max(cache.y) == 1.0
    assert all(300 < percent < 600 for percent in processors(run).data[0].y[:-1])
    parts = step_parts(run)
    assert parts.data[0].y == pytest.approx([0.4] * 751)
    assert (
        parts.layout.bargap == 0
        and len(
            {
                right - left
                for left, right in zip(parts.data[0].x, parts.data[0].x[1:], strict=False)
            }
        )
        == 1
    ), "bars of one width"
    assert about("Parts.\nMore.", parts) == "Parts. Each point is the mean of up to 4 rows."
    assert (
        about("Versions.", versions(run))
        == "Versions. The lowest and the highest of each 7 rows are drawn."
    )


def test_the_timeline_of_a_long_run_is_its_newest_part_and_says_so(long_run):
    figure = timeline(RunData.load(long_run))
    bars = [
        (role, base + length)
        for line in figure.data
        for role, base, length in zip(line.y, line.base, line.x, strict=True)
    ]
    assert sum(role == "trainer.0" for role, _ in bars) == POINTS, "four spans a step"
    assert {role for role, _ in bars} == {"trainer.0", "inference.0"}
    assert max(end for _, end in bars) == figure.layout.xaxis.range[1] == 36.0 * POINTS / 4
    says = f"Only the newest part, steps {LONG - 249} to {LONG}: "
    says += "from 1 day 4 h after the stage's first span on."
    assert about("Spans.", figure) == f"Spans. {says}"


def test_a_short_run_is_drawn_row_by_row_and_its_captions_say_nothing_more(run_dir):
    run = RunData.load(run_dir)
    assert [line.x for line in reward(run).data] == [(1, 2, 3), (0, 3)]
    assert reward(run).data[0].y == (0.2, 0.4, pytest.approx(0.6)) and step_parts(run).data[
        0
    ].y == (0.4, 0.4, 0.4)
    assert [(line.x, line.y) for line in admission(run).data] == [
        ((0.0, 1.0, 2.0), (8, 16, 24)),
        ((0.0, 1.0, 2.0), (7, 14, 21)),
        ((0.0, 1.0, 2.0), (0.2, 0.4, pytest.approx(0.6))),
    ]  # fmt: skip
    assert [(line.x, line.y) for line in processors(run).data] == [
        ((0.0, 1.0, 2.0), (80.0, 80.0, 80.0))
    ]
    assert sorted(base for line in timeline(run).data for base in line.base) == [0.0, 1.0, 2.0, 3.0]
    assert all(
        figure.layout.meta is None
        for _, entries in SECTIONS
        for _, draw in entries
        if (figure := draw(run)) is not None
    )


def test_rows_are_held_as_columns(run_dir):
    """As dicts, 20,000 rows of 17 keys are over 20 MB."""
    row = {"attempt": 1, "stage": "rl", "time_s": 0.5} | {f"value_{n}": 0.5 for n in range(13)}
    with open(run_dir / "metrics" / "trainer.0.jsonl", "w") as file:
        for step in range(20_000):
            file.write(json.dumps({**row, "step": step}) + "\n")
    tracemalloc.start()
    try:
        run = RunData.load(run_dir)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(run.rl) == 20_000 and held < 5e6 and peak < 12e6


numbers = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(
    [0, 7, -(2**63), 2**63 - 1, 2**63]
)
values = st.none() | st.booleans() | st.just("text") | st.just([1]) | numbers


@given(st.lists(st.dictionaries(st.sampled_from("abc"), numbers | values), max_size=8))
def test_a_table_gives_its_rows_back(rows):
    table = Table()
    for row in rows:
        table.append(row)
    keys = set().union(*rows)
    expected = [{key: row.get(key) for key in keys} for row in rows]
    assert len(table) == len(rows) and list(table) == table[:] == expected
    for key in keys:
        assert [(type(value), value) for value in table.column(key)] == [
            (type(row[key]), row[key]) for row in expected
        ]


@settings(deadline=None)
@given(st.integers(1, 5 * POINTS), st.randoms())
def test_thinned_points_are_few_and_true(num, draw):
    xs, ys = list(range(num)), [draw.random() for _ in range(num)]
    for thin in (means, extremes, largest):
        thin_xs, thin_ys = thin(xs, ys)
        assert len(thin_xs) == len(thin_ys) <= POINTS and thin_xs == sorted(set(thin_xs))
        assert min(ys) <= min(thin_ys) and max(thin_ys) <= max(ys)
        if thin is not means:
            assert max(thin_ys) == max(ys) and all(
                ys[x] == y for x, y in zip(thin_xs, thin_ys, strict=True)
            )
    assert min(extremes(xs, ys)[1]) == min(ys)


def test_durations_of_weeks_are_days_and_hours():
    long_s = (3599.4, 3599.6, 11_100, 86_371, 100_000, 3_600_000)
    assert [duration(seconds) for seconds in long_s] == [
        "59 min 59 s", "1 h 0 min", "3 h 5 min", "1 day 0 h", "1 day 4 h", "41 days 16 h"
    ]  # fmt: skip


@given(intervals, intervals)
def test_overlap_equals_counting_the_unit_cells(left, right):
    cells = [{t for start, end in side for t in range(start, end)} for side in (left, right)]
    assert overlap_s(left, right) == len(cells[0] & cells[1])
    assert sum(end - start for start, end in union(left)) == len(cells[0])
