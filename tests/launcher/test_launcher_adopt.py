"""Adoption of a run: copies, refusals, and files that stay whole."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from orrery.launcher import cli, runs
from orrery.launcher.receipt import record
from orrery.launcher.runs import (
    RoleStatus,
    Run,
    Status,
    adopt,
    all_runs,
    find,
    hold_lock,
    newest_checkpoint,
)
from orrery.manifest.check import with_values
from orrery.manifest.diff import diff
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import find_workspace, load, pretty_json, run_dir
from orrery.manifest.schema import Manifest
from orrery.runtime.run_directory import begin, begin_attempt, done_path

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]


def changed(manifest: Manifest, **fields) -> Manifest:
    """Return the manifest with other values, by their paths with `__` for dots."""
    return with_values(manifest, {path.replace("__", "."): each for path, each in fields.items()})


def write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def other(checkout):
    """A run stopped in its RL stage, with one whole and one torn checkpoint."""
    run = find("reverse_text")
    begin(run.path)
    write(run.path / "manifest.json", pretty_json(run.manifest))
    for attempt in (1, 2):
        assert begin_attempt(run.path) == attempt
    for stage in ("init", "sft"):
        write(done_path(run.path, stage), "{}")
    write(run.path / "stages/rl/health/trainer.0.json")
    write(run.path / "weights/sft/model.safetensors")
    write(run.path / "weights/wire/version_3/1.safetensors")
    for step, files in ((3, ("trainer/rank_0", "COMPLETE")), (6, ("trainer/rank_0",))):
        for file in files:
            write(run.path / "checkpoints" / f"step_{step}.attempt_1" / file)
    write(run.path / "metrics/trainer.0.jsonl", '{"stage": "rl", "step": 3}\n')
    for file in ("samples.jsonl", "step_3.safetensors"):
        write(run.path / "rollouts" / file, "{}\n")
    write(run.path / "report/index.html")
    role = RoleStatus("trainer.0", "node1", 7, 0, None, "ended", "exit code 75")
    Status(
        "rl",
        2,
        "stopped",
        "rl: stopped; type `snakemake --profile local reverse_text`",
        7,
        "node1",
        "31",
        1.0,
        2.0,
        [role],
    ).write(run.path)
    return run


def begun(checkout, other, **fields) -> Run:
    """A run of the same learning, not begun."""
    manifest = changed(other.manifest, **({"name": "elsewhere"} | fields))
    return Run(manifest, run_dir(checkout / "runs", manifest))


def files(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def test_finished_stages_weights_and_whole_checkpoints_go_along_and_the_other_run_stays(
    checkout, other
):
    before = files(other.path)
    run = begun(
        checkout,
        other,
        trainer__checkpoint={"interval_steps": 5, "keep": 3},
        orchestrator__admission={"kind": "fixed", "max_in_flight": 9},
    )
    assert adopt(run, other) == "done: init, sft; rl goes on after step 3"
    assert set(files(run.path)) == {
        ".lock", "adopted.json", "checkpoints/step_3.attempt_1/COMPLETE",
        "checkpoints/step_3.attempt_1/trainer/rank_0", "layout",
        "manifest.json",
        "metrics/trainer.0.jsonl", "rollouts/samples.jsonl", "rollouts/step_3.safetensors",
        "stages/init/DONE", "stages/rl/health/trainer.0.json", "stages/sft/DONE",
        "status.json", "weights/sft/model.safetensors",
    }  # fmt: skip
    assert (
        find(run.path.name).manifest == run.manifest
        and run.finished() == ["init", "sft"]
        and newest_checkpoint(run.path) == 3
    )
    assert set(files(other.path)) == {*before, ".lock"} and find("reverse_text") == other
    assert os.path.samefile(
        run.path / "weights/sft/model.safetensors", other.path / "weights/sft/model.safetensors"
    )
    assert os.path.samefile(
        run.path / "rollouts/step_3.safetensors", other.path / "rollouts/step_3.safetensors"
    )
    for grows in ("metrics/trainer.0.jsonl", "rollouts/samples.jsonl"):
        assert not os.path.samefile(run.path / grows, other.path / grows), "lines are added there"
    status = runs.read_status(run.path)
    assert (status.stage, status.attempt, status.state, status.slurm_job, status.roles) == (
        "rl",
        2,
        "stopped",
        None,
        [],
    )
    where = "done: init, sft; rl goes on after step 3"
    assert (
        status.message
        == f"adopted from {other.path.name}: {where}; type `orrery run {run.path.name} rl` to go on"
    )
    record(run.path, "rl", 3, "stopped", "", 0.0, 1.0, [], {}, None, checkout)
    said = json.loads((run.path / "receipt.json").read_text())["run"]
    assert said["name"] == "elsewhere"
    assert said["adopted"] == {
        "run": other.path.name,
        "done": ["init", "sft"],
        "checkpoint": {"stage": "rl", "step": 3},
    }


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (
            lambda path: shutil.rmtree(path / "checkpoints/step_3.attempt_1"),
            "done: init, sft; rl begins",
        ),
        (lambda path: done_path(path, "sft").unlink(), "done: init; sft goes on after step 2"),
        (
            lambda path: [write(done_path(path, stage)) for stage in ("rl", "evaluate", "report")],
            "done: init, sft, rl, evaluate; report begins",
        ),
    ],
    ids=["no checkpoint yet", "in SFT", "finished"],
)
def test_where_it_stands_is_what_its_next_stage_finds(checkout, other, change, where):
    write(other.path / "checkpoints/sft/step_2.attempt_1/COMPLETE")
    change(other.path)
    run = begun(checkout, other)
    assert adopt(run, other) == where
    assert json.loads((run.path / "adopted.json").read_text())["done"] == run.finished()


def test_files_are_copied_where_they_cannot_have_two_names(checkout, other, monkeypatch):
    monkeypatch.setattr(
        os, "link", lambda *_: (_ for _ in ()).throw(OSError(18, "Invalid cross-device link"))
    )
    run = begun(checkout, other)
    adopt(run, other)
    assert not os.path.samefile(
        run.path / "weights/sft/model.safetensors", other.path / "weights/sft/model.safetensors"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", 9),
        ("trainer__max_grad_norm", 2.0),
        ("inference__max_model_len_tokens", 96),
        ("orchestrator__max_off_policy_steps", 1),
    ],
)
def test_a_run_that_would_learn_something_else_adopts_nothing(checkout, other, field, value):
    run = begun(checkout, other, **{field: value})
    with pytest.raises(
        OrreryError,
        match=(
            rf"would learn differently from {other.path.name}: "
            rf"{field.replace('__', '.')}: .* → {value}\."
        ),
    ):
        adopt(run, other)
    assert not run.path.exists() and [path.name for path in (checkout / "runs").iterdir()] == [
        other.path.name
    ]


@pytest.mark.parametrize(
    ("delay", "changes", "bound"),
    [
        (0, {"trainer__memory__max_tokens_per_micro_batch": 256}, "max_tokens_per_micro_batch"),
        (0, {"trainer__memory__max_tokens_per_micro_batch": 9999}, ""),
        (0, {"trainer__checkpoint__interval_steps": 20}, ""),
        (2, {"trainer__checkpoint__interval_steps": 20}, "interval_steps"),
    ],
)
def test_memory_and_checkpoints_are_bound_where_they_change_what_is_learned(delay, changes, bound):
    sites = load(ROOT / "manifests/elastic_text.json")
    before = changed(
        sites,
        trainer__elastic__delay_steps=delay,
        trainer__memory__max_tokens_per_micro_batch=sites.model.max_positions,
    )
    after = changed(before, **changes)
    fields = {one.field for one in diff(before, after)}
    assert fields == {field.replace("__", ".") for field in changes}
    refused = {field for field in fields if not runs._is_free(field, runs._bound(before, after))}
    assert refused == (fields if bound else set()) and bound in "".join(refused)


def test_a_run_that_has_begun_and_one_that_stands_nowhere_are_refused(checkout, other):
    one, two = begun(checkout, other), begun(checkout, other, name="nowhere")
    with pytest.raises(
        OrreryError,
        match=(
            rf"{two.path.name}: no stage is done, so it has no state to adopt. Start "
            rf"elsewhere without it"
        ),
    ):
        adopt(one, two)
    with pytest.raises(
        OrreryError, match=r"has already begun, and only a new run can adopt another"
    ):
        adopt(other, one)


def test_a_run_that_is_going_is_not_adopted_and_a_failure_leaves_nothing(
    checkout, other, monkeypatch
):
    run = begun(checkout, other)
    with (
        hold_lock(other.path),
        pytest.raises(OrreryError, match="another launcher is running this run"),
    ):
        adopt(run, other)
    # As a killed adoption leaves it.
    write(checkout / "runs" / f".{run.path.name}.partial" / "status.json", "{}")
    assert [path.name for path in all_runs(find_workspace())] == [other.path.name]
    monkeypatch.setattr(
        shutil, "copy2", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(OrreryError, match=r"cannot adopt the other run: .*No space left on device"):
        adopt(run, other)
    assert [path.name for path in (checkout / "runs").iterdir()] == [other.path.name]


def test_the_command_says_where_it_stands_and_what_to_type_next(
    checkout, other, capsys, monkeypatch
):
    """Edit a checked-in run to be the demo on another device."""
    monkeypatch.setattr(sys, "argv", ["orrery", "adopt", "reverse_text_seed_2", "reverse_text"])
    with pytest.raises(SystemExit) as leave:
        cli.main()
    assert leave.value.code == 2 and "would learn differently" in capsys.readouterr().err
    manifest = changed(
        other.manifest,
        name="reverse_text_seed_2",
        trainer__checkpoint={"interval_steps": 5, "keep": 3},
    )
    (checkout / "manifests/reverse_text_seed_2.json").write_text(pretty_json(manifest))
    with pytest.raises(SystemExit) as leave:
        cli.main()
    out = capsys.readouterr().out
    assert not leave.value.code
    assert out.splitlines() == [
        f"{run_dir('', manifest).name}: done: init, sft; rl goes on after step 3",
        "go on with `snakemake --profile local reverse_text_seed_2`",
    ]
