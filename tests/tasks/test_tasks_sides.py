"""No row of a file is trained by one task and evaluated by another."""

import json
import re
from pathlib import Path

import pytest
from task_files import args, few_shot, source, write

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Manifest
from orrery.tasks.check import check

ROOT = Path(__file__).parents[2]
ROWS = [{"question": f"{n} + 1?", "answer": str(n + 1), "fold": n % 5} for n in range(200)]
BRIEF = "{question} Reply only the number."
FEW = {"kind": "fraction", "fraction": 0.1}
FOLDS = {"kind": "column", "column": "fold", "values": [3]}


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture
def checked(monkeypatch):
    """Return the check of a manifest with these args of tasks, by the path of their use."""

    def call(**given):
        content = json.loads((ROOT / "manifests/smollm2_problems_smoke.json").read_text())
        for number, (side, split) in enumerate([("train", "train"), ("evaluation", "held_out")]):
            content["tasks"][side] = [
                use(f"{side}_{i}", one | {"split": split}, number)
                for i, one in enumerate(given[side])
            ]
        sft = given.get("sft")
        content["stages"]["sft"]["data"]["task"] = use("sft", sft or given["train"][0], 7)
        monkeypatch.setattr("orrery.tasks.check._renderer", lambda model: None)
        return check(Manifest.model_validate(content))

    return call


def use(name, given, seed):
    shown = given.pop("shown", 0)
    kind, given = ("few_shot", few_shot(shown, **given)) if shown else ("dataset", given)
    return dict(name=name, kind=kind, args=given, weight=1.0, seed=seed, max_turns=1)


@pytest.mark.parametrize("held_out", [{"kind": "fraction", "fraction": 0.25}, FOLDS])
def test_tasks_with_the_same_sides_pass(checked, path, held_out):
    given = args(path, held_out=held_out)
    assert checked(train=[given, given | {"shown": 2}], evaluation=[given, given | {"shown": 1}])


def test_phrasings_pass_if_a_column_divides_the_rows(checked, path):
    uses = [args(path, held_out=FOLDS), args(path, held_out=FOLDS, prompt=BRIEF)]
    assert checked(train=uses, evaluation=uses)


@pytest.mark.parametrize(
    ("trained", "evaluated"),
    [
        ({}, {"prompt": BRIEF}),
        ({"shown": 2}, {"prompt": BRIEF, "shown": 2}),
        ({"held_out": FEW}, {}),
        ({}, {"held_out": FOLDS, "prompt": BRIEF}),
    ],
)
def test_a_row_that_is_trained_and_evaluated_is_refused(checked, path, trained, evaluated):
    with pytest.raises(OrreryError) as error:
        checked(train=[args(path, **trained)], evaluation=[args(path, **evaluated)])
    assert re.match(
        rf"tasks.evaluation\[0\]: task 'evaluation_0': args.source: \d+ of \d+ evaluation rows "
        rf"are rows of tasks.train\[0\] too \({re.escape(str(path))}:\d+, .*: held_out of kind "
        "fraction divides the rows by `prompt` and `fraction`; give both tasks equal values, use ",
        str(error.value),
    )


def test_a_row_of_the_sft_task_is_refused(checked, path):
    given = args(path, held_out=FOLDS)
    with pytest.raises(OrreryError, match=r"rows are rows of stages.sft.data.task too"):
        checked(train=[given], evaluation=[given], sft=args(path))


def test_a_row_or_prompt_of_another_file_is_refused(checked, path, tmp_path):
    own = {"held_out": source(write(tmp_path / "own.jsonl", [{"question": "?", "answer": "1"}]))}
    for name, rows in (
        ("rows.csv", [{"question": "7 + 1?", "answer": "8", "hint": "add"}]),
        ("rows.json", [{"question": "no", "answer": "1"}, ROWS[5]]),
    ):
        held = source(write(tmp_path / name, rows))
        with pytest.raises(OrreryError, match=rf"1 of {len(rows)} evaluation rows are rows of"):
            checked(
                train=[args(path, **own)],
                evaluation=[
                    args(tmp_path / "own.jsonl", held_out=held, prompt="{question}"),
                ],
            )
