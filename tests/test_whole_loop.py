"""The whole loop's figures: the measured steps, and the gate against the record."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import shapes
import whole_loop

from orrery.manifest.identity import load
from orrery.observe.report.data import RunData, Span

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "async"


@pytest.fixture(autouse=True)
def warms_briefly(monkeypatch):
    monkeypatch.setattr(shapes, "WARM_STEPS", 3)  # the made-up run below is short


def made_up(tmp_path, num_steps=8, tokens=1000, **orchestrator):
    """Return a run whose steps end every 10 s. Steps 4, 5 and 6 are measured.

    The manifest is the checked-in one, with other values of `orchestrator` where some are given.
    """
    folder = tmp_path / "asynchrony_cpu-000000000000"
    folder.mkdir(parents=True)
    (folder / "receipt.json").write_text(
        json.dumps({"stages": {"init": {"attempts": [{"versions": {"driver": "1"}}]}}})
    )
    manifest = json.loads((ROOT / "manifests" / "asynchrony_cpu.json").read_text())
    manifest["orchestrator"] |= orchestrator
    (folder / "manifest.json").write_text(json.dumps(manifest))
    rl = [
        {
            "step": step,
            "time_s": 10.0 * step,
            "num_trained_tokens": tokens,
            "mismatch_kl": step / 100,
        }
        for step in range(1, num_steps + 1)
    ]
    batches = [
        {
            "step": step,
            "time_s": min(10.0 * step - 9, 65.0),
            "staleness_mean": step,
            "staleness_max": step,
            "completion_tokens_mean": step,
            "dropped": {"stale": step},
        }
        for step in range(1, num_steps + 1)
    ]
    updates = [
        {"version": step, "pause_s": 0.1 * step, "drain_s": 1.0} for step in range(num_steps + 1)
    ]
    lines = {
        "trainer.0": [("wait", 5, 33), ("wait", 58, 75), ("forward_backward", 33, 58)],
        "inference.0": [("generate", 0, 80)],
    }
    spans = [
        Span(role, name, float(begin), float(end), 1)
        for role, each in lines.items()
        for name, begin, end in each
    ]
    empty = {field.name: [] for field in dataclasses.fields(RunData)}
    return RunData(
        **empty
        | {
            "run_dir": folder,
            "manifest": load(folder / "manifest.json"),
            "rl": rl,
            "batches": batches,
            "updates": updates,
            "spans": spans,
        }
    )


def test_what_is_measured_begins_warm_and_ends_with_the_last_batch_that_was_cut(tmp_path):
    found = shapes.numbers(made_up(tmp_path))
    assert found.num_measured == 3 and found.num_steps == 8
    assert found.tokens_per_s == 3 * 1000 / (60 - 30) and found.step_s == 10
    assert found.trainer_waits == pytest.approx((3 + 2) / 30)  # seconds 30 to 33 and 58 to 60
    assert (found.staleness_mean, found.staleness_max, found.median_tokens) == (5, 6, 5)
    assert found.update_pause_s == pytest.approx(0.5) and found.update_s == pytest.approx(1.5)
    assert found.dropped == {"stale": 8} and found.mismatch_kl == pytest.approx(0.05)
    with pytest.raises(
        SystemExit,
        match=r"of 4 steps 3 warm up, and 0 more ended before the last batch was cut; 2 are needed",
    ):
        shapes.numbers(made_up(tmp_path / "short", num_steps=4))


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Return a function that records a made-up run, and set a command line for the gate."""

    def write(**orchestrator):
        monkeypatch.setattr(whole_loop, "HERE", tmp_path)
        monkeypatch.setattr(
            whole_loop, "run", lambda *_: made_up(tmp_path / "recorded", **orchestrator)
        )
        monkeypatch.setattr(
            sys, "argv", ["whole_loop.py", "--shape", "cpu", "--out", str(tmp_path)]
        )
        monkeypatch.setenv("ORRERY_COMMIT", "0" * 40)
        whole_loop.main()
        monkeypatch.setattr(sys, "argv", ["whole_loop.py", "--shape", "cpu", "--gate"])
        return tmp_path / "whole_loop_cpu.json"

    return write


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (1000, None),
        (510, None),
        (490, r"tokens/s: 49, and recorded allows 50 at least; find what became slower"),
    ],
    ids=["as recorded", "within the tolerance", "slower"],
)
def test_the_gate_lets_nothing_slower_pass(recorded, tmp_path, monkeypatch, tokens, says):
    file = recorded()
    written = file.read_bytes()
    assert json.loads(written)["value"] == 100 and json.loads(written)["details"]["versions"] == {
        "driver": "1"
    }
    monkeypatch.setattr(whole_loop, "run", lambda *_: made_up(tmp_path / "now", tokens=tokens))
    if says is None:
        whole_loop.main()
    else:
        with pytest.raises(SystemExit, match=says):
            whole_loop.main()
    assert file.read_bytes() == written, "the gate records nothing"


def test_a_run_that_compiles_in_a_measured_step_is_neither_recorded_nor_passed(
    tmp_path, monkeypatch
):
    compiled = made_up(tmp_path)
    for row in compiled.rl[4:]:  # step 5 takes 34 s instead of 10
        row["time_s"] += 24.0
    for row in compiled.batches:
        row["time_s"] += 24.0 if row["step"] > 4 else 0.0
    with pytest.raises(
        SystemExit,
        match=r"step 5 took 34 s, 3\.4 times the median a token of the 3 measured steps, "
        r"so it compiled",
    ):
        shapes.numbers(compiled)


def test_a_record_that_may_hold_a_recompilation_is_no_gate(recorded, monkeypatch):
    file = recorded()
    record = json.loads(file.read_text())
    del record["rows"][0]["longest_step_s"]
    file.write_text(json.dumps(record))
    monkeypatch.setattr(whole_loop, "run", lambda *_: pytest.fail("it was measured"))
    with pytest.raises(
        SystemExit,
        match=r"whole_loop_cpu\.json: it was measured before steps that compile were refused",
    ):
        whole_loop.main()


def test_the_gate_refuses_another_loop_before_it_measures(recorded, monkeypatch):
    recorded(rollouts_per_batch=128, keep_batches=3)
    monkeypatch.setattr(whole_loop, "run", lambda *_: pytest.fail("it was measured"))
    with pytest.raises(
        SystemExit,
        match=r"another loop than asynchrony_cpu is now .*: their figures are not to be compared",
    ):
        whole_loop.main()


def test_the_gate_refuses_a_run_from_a_folder_that_was_another_loop(
    recorded, tmp_path, monkeypatch
):
    recorded()
    monkeypatch.setattr(
        whole_loop, "run", lambda *_: made_up(tmp_path / "now", rollouts_per_batch=128)
    )
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--runs", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"their figures are not to be compared"):
        whole_loop.main()


def test_fields_that_cost_no_time_may_differ_from_the_record(recorded, tmp_path, monkeypatch):
    recorded(keep_batches=3)
    monkeypatch.setattr(whole_loop, "run", lambda *_: made_up(tmp_path / "now"))
    whole_loop.main()


@pytest.mark.parametrize(
    "file", sorted(FOLDER.glob("whole_loop_*.json")), ids=lambda file: file.stem
)
def test_what_is_recorded_is_of_the_manifest_that_is_checked_in(file):
    """A new field that costs no time belongs into COSTS_NO_TIME. Otherwise measure again."""
    manifest = load(ROOT / "manifests" / f"{file.stem.replace('whole_loop', 'asynchrony')}.json")
    assert json.loads(file.read_text())["details"]["timed_sha256"] == whole_loop.timed_sha256(
        manifest
    )


def test_the_gate_is_of_waiting_and_of_pauses_too(tmp_path, capsys):
    before = shapes.numbers(made_up(tmp_path)).row("cpu")
    assert whole_loop.found_worse(shapes.numbers(made_up(tmp_path / "same")), before, 0.1) == []
    worse = dataclasses.replace(
        shapes.numbers(made_up(tmp_path / "worse")),
        trainer_waits=before["trainer_waits"] + 0.06,
        update_pause_s=0.8,
    )
    waits, pauses = whole_loop.found_worse(worse, before, 0.1)
    assert waits.startswith("share of the time that the trainer waits: 0.2267") and pauses.endswith(
        "0.8, and recorded allows 0.75 at most"
    )


def test_a_run_from_a_folder_has_trained_all_its_steps(tmp_path):
    folder = made_up(tmp_path).run_dir
    with pytest.raises(
        SystemExit, match=r"it holds 0 runs of asynchrony_cpu that trained all their steps"
    ):
        shapes.run("asynchrony_cpu", tmp_path)
    (folder / "metrics").mkdir()
    rows = [{"stage": "rl", "step": step, "attempt": 1, "time_s": step} for step in range(1, 17)]
    (folder / "metrics" / "trainer.0.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    assert len(shapes.run("asynchrony_cpu", tmp_path).rl) == 16
