"""The task `dataset`: rows of every form, the two sides, and rows that misfit."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from task_files import ROWS, args, source, task, write

from orrery.manifest.errors import OrreryError
from orrery.manifest.publish import sha256_of_data as digest
from orrery.manifest.schema import Manifest
from orrery.tasks.check import check
from orrery.tasks.rows import open_rows
from orrery.tasks.task import Message, split_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "rows.jsonl")


# Rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet", "arrow"])
def test_every_form_of_file_gives_the_same_rows(tmp_path, suffix):
    rows = open_rows(write(tmp_path / f"rows.{suffix}"))
    assert [rows[i] for i in range(len(rows))] == ROWS


def test_a_folders_splits_are_read_by_name(tmp_path):
    write(tmp_path / "main/train-00000-of-00002.parquet", ROWS[:10])
    write(tmp_path / "main/train-00001-of-00002.parquet", ROWS[10:30])
    write(tmp_path / "main/test-00000-of-00001.parquet", ROWS[30:])
    train = open_rows(tmp_path, "train")
    assert [train[i] for i in range(len(train))] == ROWS[:30]
    assert len(open_rows(tmp_path, "test")) == 10
    with pytest.raises(OrreryError, match=r"has no 'dev'. Choose from test, train"):
        open_rows(tmp_path, "dev")
    with pytest.raises(OrreryError, match=r"is a folder of splits. Choose from test, train"):
        open_rows(tmp_path)


def test_a_split_of_several_files_of_any_form_is_read_in_the_order_of_names(tmp_path):
    write(tmp_path / "train-1.csv", ROWS[10:30])
    write(tmp_path / "train-0.jsonl", ROWS[:10])
    write(tmp_path / "train-2.parquet", ROWS[30:])
    rows = open_rows(tmp_path, "train")
    assert [rows[i] for i in range(len(rows))] == ROWS
    assert rows.place(9).endswith("train-0.jsonl:19")
    assert rows.place(10).endswith("train-1.csv: row 0")


def test_a_saved_dataset_is_read_by_split(tmp_path):
    for split, rows in {"train": ROWS[:30], "test": ROWS[30:]}.items():
        write(tmp_path / split / "data-00000-of-00001.arrow", rows)
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
        (tmp_path / split / "state.json").write_text(json.dumps(state))
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert open_rows(tmp_path, "test")[3] == ROWS[33]
    assert len(open_rows(tmp_path / "train")) == 30


def test_null_fields_of_arrow_rows_are_left_out(tmp_path):
    rows = open_rows(write(tmp_path / "rows.parquet", [{"a": {"x": 1, "y": None}, "b": None}]))
    assert rows[0] == {"a": {"x": 1}}


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("rows.txt", b"", "does not end in one of .jsonl"),
        ("rows.json", b"{", "cannot be read"),
        ("rows.json", b'{"a": 1}', "it has no list of rows"),
        ("rows.parquet", b"PAR1", "cannot read"),
        ("rows.csv", b"a\n\xff\n", "cannot be read"),
    ],
)
def test_an_unreadable_file_is_one_sentence(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(OrreryError, match=re.escape(says)) as error:
        open_rows(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(OrreryError, match=r"path: .*none.jsonl: No such file or directory. Name a"):
        open_rows(tmp_path / "none.jsonl")


def test_a_digest_covers_every_data_file_of_a_folder(tmp_path):
    write(tmp_path / "train.jsonl")
    before = digest(tmp_path)
    write(tmp_path / "test.jsonl", ROWS[:1])
    assert digest(tmp_path) != before
    assert (
        digest(tmp_path / "train.jsonl")
        == hashlib.sha256((tmp_path / "train.jsonl").read_bytes()).hexdigest()
    )


# Problems -----------------------------------------------------------------------------------------


def prompts(one, count):
    return [one.problem(index).messages[-1].content for index in range(count)]


def test_the_sides_are_disjoint_and_cover_every_row(path):
    train, held = (task(**args(path, split=split)) for split in ("train", "held_out"))
    sizes = len(train._kept), len(held._kept)
    assert sum(sizes) == len(ROWS) and min(sizes) > 0
    both = set(prompts(train, sizes[0])), set(prompts(held, sizes[1]))
    assert both[0] | both[1] == {row["question"] for row in ROWS} and not both[0] & both[1]


def test_problems_follow_from_args_seed_and_index_and_epochs_differ(path):
    one, same, other = task(**args(path)), task(**args(path)), task(seed=2, **args(path))
    size = len(one._kept)
    assert prompts(one, 2 * size) == prompts(same, 2 * size)
    assert prompts(one, size) != prompts(other, size)
    epochs = prompts(one, 2 * size)
    assert sorted(epochs[:size]) == sorted(epochs[size:]) and epochs[:size] != epochs[size:]


def test_a_column_or_another_file_separates_the_sides(tmp_path):
    rows = [{**row, "fold": i % 4} for i, row in enumerate(ROWS)]
    path = write(tmp_path / "rows.jsonl", rows)
    by_column = {"kind": "column", "column": "fold", "values": [3]}
    held = task(**args(path, held_out=by_column, split="held_out"))
    assert set(prompts(held, 10)) == {row["question"] for row in rows if row["fold"] == 3}
    other = write(tmp_path / "test.csv", [{"question": "9 + 9?", "answer": "18"}])
    held = task(**args(path, held_out=source(other), split="held_out"))
    assert prompts(held, 2) == ["9 + 9?", "9 + 9?"] and held.problem(0).answer == "18"


def test_templates_filters_and_a_system_prompt_make_the_problem(tmp_path):
    rows = [
        {"q": "6 · 7", "level": level, "solution": "First {6}.\n#### 42"} for level in ("a", "b")
    ]
    one = task(
        **args(
            write(tmp_path / "rows.jsonl", rows * 20),
            held_out={"kind": "column", "column": "level", "values": ["b"]},
            where={"level": ["a"]},
            system="Be brief.",
            prompt="Compute \\frac{1}{{x}} {q} ({level}).",
            answer="{solution}",
            answer_pattern="#### (.+)",
        )
    )
    problem = one.problem(0)
    assert [m.content for m in problem.messages] == ["Be brief.", "Compute \\frac{1}{x} 6 · 7 (a)."]
    assert problem.answer == "42"
    assert one.demonstration(0)[-1] == Message("assistant", "First {6}.\n#### 42")


def test_a_prompt_column_may_hold_chat_messages(tmp_path):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "?"}]
    chat.append({"role": "user", "content": "3 + 4"})
    rows = [{"prompt": chat, "answer": 7, "n": n} for n in range(9)]
    one = task(
        **args(
            write(tmp_path / "rows.jsonl", rows),
            prompt="{prompt}",
            held_out={"kind": "column", "column": "n", "values": [1]},
        )
    )
    assert [m.role for m in one.problem(0).messages] == ["user", "assistant", "user"]
    assert one.problem(0).answer == "7"


def test_a_chat_that_ends_with_the_reply_is_refused(tmp_path):
    rows = [
        {
            "answer": f"{n}",
            "n": n,
            "messages": [
                {"role": "user", "content": f"{n} + 0"},
                {"role": "assistant", "content": f"{n}"},
            ][: 1 + n % 2],
        }
        for n in range(6)
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    folds = {"kind": "column", "column": "n", "values": [0]}
    one = task(**args(path, prompt="{messages}", held_out=folds))
    says = r"ends with the assistant's reply, which would show the answer. End it with a user's"
    reply = next(n for n in range(5) if one._place(n) % 2)
    for call in (lambda: one.problem(reply), lambda: one.demonstration(reply)):
        with pytest.raises(OrreryError, match=says):
            call()
    with pytest.raises(OrreryError, match=says) as error:
        one.check_rows(None, 0)
    assert "3 of 5 training rows cannot be read" in str(error.value)
    assert f"prompt: {path}:3: the chat in 'messages' ends" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"prompt": "{qestion}"},
            "40 of 40 rows lack the column 'qestion' of `prompt` (",
        ),
        ({"answer": "{reply}"}, "correct `answer` or add the column. The first such row has"),
        (
            {"prompt": "{no}", "answer": "{no}"},
            "40 of 40 rows lack the column 'no' of `prompt` and `answer` (",
        ),
        (
            {"held_out": {"kind": "fraction", "fraction": 20}},
            "args.held_out.fraction: 20 does not fit",
        ),
        ({"prompt": "solve it"}, "names no column"),
        ({"where": {"question": ["no such"]}}, "no row of"),
        ({"answer_pattern": "####"}, "needs one group"),
        ({"answer_pattern": "####("}, "is no regular expression"),
        ({"verdict": {"kind": "exact", "ignore_case": True, "pattern": "x"}}, "has no group"),
        ({"verdict": {"kind": "pattern", "pattern": "x"}}, "lacks {answer}"),
        ({"verdict": {"kind": "pattern", "pattern": "({answer}"}}, "is no regular expression"),
    ],
)
def test_wrong_args_are_one_sentence(path, changes, says):
    with pytest.raises(OrreryError, match=re.escape(says)):
        task(**args(path, **changes))


def test_a_changed_file_is_refused(path):
    given = args(path)
    path.write_text(path.read_text().replace("3", "4"))
    with pytest.raises(OrreryError, match=r"the manifest says .*. Write the new sha256"):
        task(**given)


# Files that ship, examples, and several files -----------------------------------------------------


def test_the_committed_problems_are_those_that_the_script_writes(tmp_path):
    script = ROOT / "examples/problems/generate.py"
    subprocess.run([sys.executable, script, tmp_path / "rows.jsonl"], check=True)
    written = (tmp_path / "rows.jsonl").read_bytes()
    assert written == (ROOT / "examples/problems/arithmetic.jsonl").read_bytes()


class CharacterRenderer:
    """Stand in for a renderer: each character is a token."""

    def prompt(self, messages, tools):
        return "".join(message.content for message in messages)

    @property
    def tokenizer(self):
        return self

    def encode_batch(self, texts):
        return texts


def checked(monkeypatch, *uses, renderer=None):
    """Return the lines of a manifest's check with these tasks on both sides."""
    content = json.loads((ROOT / "manifests/smollm2_problems_smoke.json").read_text())
    content["stages"]["sft"] = None
    for side, split, seed in (("train", "train", 1), ("evaluation", "held_out", 20000)):
        content["tasks"][side] = [
            {"name": f"sums_{i}", "kind": "dataset", "args": given | {"split": split},
             "weight": weight, "seed": seed, "max_turns": 1}
            for i, (given, weight) in enumerate(uses)
        ]  # fmt: skip
    monkeypatch.setattr("orrery.tasks.check._renderer", lambda model: renderer)
    return check(Manifest.model_validate(content))


def test_a_run_takes_several_files_with_weights_and_checks_every_row(tmp_path, monkeypatch):
    one = write(tmp_path / "one.jsonl")
    two = write(tmp_path / "two.csv", [{"q": f"{n}?", "a": str(n)} for n in range(50)])
    given = args(two, prompt="{q}", answer="{a}")
    lines = checked(monkeypatch, (args(one), 1.0), (given, 3.0))
    *lines, note = lines
    assert len(lines) == 4 and all(" rows, prompts not counted" in line for line in lines)
    assert "tasks.train[0]: the lengths of prompts and answers are unchecked" in note
    assert "there is no tokenizer in '" in note and "Type `orrery fetch model NAME`" in note
    write(one, [*ROWS, *({"question": f"{n}!", "answer": ""} for n in range(20))])
    with pytest.raises(OrreryError, match=r"tasks.train\[0\]: .* have an empty answer"):
        checked(monkeypatch, (args(one), 1.0), (given, 3.0))


def test_answers_longer_than_a_turn_and_more_problems_than_rows_are_notes(tmp_path, monkeypatch):
    rows = [{"question": f"{n}?", "answer": f"{'1' * (n % 2 * 99)}{n} #### {n}"} for n in range(60)]
    given = args(write(tmp_path / "rows.jsonl", rows), answer_pattern="#### (.+)")
    few = {"kind": "fraction", "fraction": 0.05}  # fewer rows than an evaluation takes
    given |= {"verdict": given["verdict"] | {"pattern": "#### (.+)"}, "held_out": few}
    *_, long, asked, last = checked(monkeypatch, (given, 1.0), renderer=CharacterRenderer())
    assert re.match(
        r"  note: tasks.train\[0\]: \d+ of \d+ answers are longer than a turn, with up to 110 ",
        long,
    )
    assert "max_tokens_per_turn (16) to 110 or more" in long
    assert re.match(
        r"  note: orchestrator.evaluation.num_problems 8: only [1-7] rows are held out", asked
    )
    assert last.startswith("  note: stages.evaluate.num_problems 8: only ")
    half = {"kind": "fraction", "fraction": 0.5}
    short = args(write(tmp_path / "short.jsonl"), held_out=half)
    lines = checked(monkeypatch, (short, 1.0), renderer=CharacterRenderer())
    assert not [line for line in lines if "note" in line]


# Rows that misfit ---------------------------------------------------------------------------------


def bad(tmp_path, rows, **changes):
    """Return the sentence of the rows' check."""
    one = task(**args(write(tmp_path / "rows.jsonl", [*ROWS, *rows]), **changes))
    with pytest.raises(OrreryError) as error:
        one.check_rows(lambda problem: len(problem.messages[-1].content), 20)
    return str(error.value).replace(f"{tmp_path}/", "")


def test_good_rows_pass(path):
    assert task(**args(path)).check_rows(None, 0) > 20


def test_empty_answers_are_counted_and_the_first_three_rows_named(tmp_path):
    rows = [{"question": f"{n}?", "answer": " "} for n in range(30)]
    said = bad(tmp_path, rows)
    assert re.match(
        r"source: \d+ of \d+ training rows have an empty answer \(rows.jsonl:\d+, ", said
    )
    assert said.count("rows.jsonl:") == 3 and ", …)" in said and "`where`" in said


def test_answers_that_their_verdict_calls_wrong_are_named(tmp_path):
    rows = [{"question": f"{n}??", "answer": "perhaps"} for n in range(9)]
    said = bad(tmp_path, rows, verdict={"kind": "choice", "num_choices": 4})
    assert "have an answer that the verdict calls wrong" in said and "none of the letters" in said


@pytest.mark.parametrize(
    ("verdict", "mark"),
    [({"kind": "exact", "pattern": "(-?[0-9]+)$"}, "#### "), ({"kind": "math"}, "#### ")],
)
def test_answers_at_the_end_of_a_text_name_the_pattern(tmp_path, verdict, mark):
    of_kind = {"ignore_case": True} if verdict["kind"] == "exact" else {"boxed": True}
    rows = [
        {"question": f"{n}?", "answer": f"He has {n} and takes 3.\n#### {n + 3}"} for n in range(9)
    ]
    said = bad(tmp_path, rows, verdict=verdict | of_kind)
    assert f"such as answer_pattern: '{mark}(.+)'" in said


def test_answers_that_their_pattern_refuses_name_both_fields(tmp_path):
    verdict = {"kind": "pattern", "pattern": "#### {answer}$"}
    said = bad(tmp_path, [], verdict=verdict)
    assert "set `answer` to a right reply, such as '#### {answer}'" in said
    marked = {"answer": "#### {answer}", "answer_pattern": "#### (.+)"}
    path = write(tmp_path / "good.jsonl")
    assert task(**args(path, verdict=verdict, **marked)).check_rows(None, 99) > 20


def test_a_condition_on_an_absent_column_names_where(path):
    with pytest.raises(
        OrreryError, match=r"lack the column 'family' of `where` .*: correct `where` or add"
    ):
        task(**args(path, where={"family": ["gcd"]}))


def test_rows_without_a_column_are_counted_and_the_columns_are_listed(tmp_path):
    path = write(tmp_path / "rows.jsonl", [*ROWS, {"qestion": "?", "answer": "1"}] * 2)
    with pytest.raises(OrreryError) as error:
        task(**args(path))
    said = (
        "2 of 82 rows lack the column 'question' of `prompt` (rows.jsonl:81, "
        "rows.jsonl:163): correct "
    )
    assert said in str(error.value).replace(f"{tmp_path}/", "")
    assert str(error.value).endswith("The first such row has the columns 'qestion', 'answer'")


def test_a_prompt_with_two_answers_is_named(tmp_path):
    rows = [{"question": "7 × 8?", "answer": "56"}] * 9
    rows[4] = {"question": "7 × 8?", "answer": "54"}
    said = bad(tmp_path, rows)
    assert "have the prompt of an earlier row and another answer (rows.jsonl:" in said


def test_long_prompts_are_counted(tmp_path):
    said = bad(tmp_path, [{"question": "x" * (30 + n), "answer": "1"} for n in range(9)])
    assert "have a prompt that is too long" in said and "and 20 fit beside a turn" in said


def test_rows_on_both_sides_are_counted(tmp_path):
    other = write(tmp_path / "test.jsonl", ROWS[:2])
    said = bad(tmp_path, [], held_out=source(other), split="held_out")
    assert said.startswith(
        "source: 2 of 2 held-out rows are training rows too (test.jsonl:1, test.jsonl:3)"
    )


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ('"\\ud83d x"', "a text has a lone surrogate"),
        ('{"\\ud83d": 1}', "a text has a lone surrogate"),
        ("[" * 70 + "]" * 70, "values are nested deeper than 64"),
        ("[" * 3000 + "]" * 3000, "values are nested deeper than 64"),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_a_row_without_a_readable_text_is_one_sentence(tmp_path, suffix, value, says):
    good, bad = json.dumps(ROWS[0]), f'{{"question": {value}, "answer": "1"}}'
    path = tmp_path / f"rows.{suffix}"
    path.write_text(f"{good}\n{bad}\n" if suffix == "jsonl" else f"[{good}, {bad}]")
    with pytest.raises(OrreryError, match=says) as error:
        task(**args(path))
    # A file of JSON that Python cannot parse has no row.
    place = {"jsonl": ":2: ", "json": ": row 1: " if len(value) < 6000 else " cannot be read: "}
    assert f"{path}{place[suffix]}{says}. " in str(error.value)


def test_values_other_than_text_are_filled_in_as_json(tmp_path):
    schema = {"type": "object", "required": ["größe"]}
    rows = [{"question": n, "answer": schema, "tags": ["x", None], "new": True} for n in range(9)]
    given = {"prompt": "{question} {tags} {new}", "verdict": {"kind": "json_schema"}}
    one = task(**args(write(tmp_path / "rows.jsonl", rows), **given))
    assert one.check_rows(None, 0) > 0
    assert one.problem(0).messages[-1].content[1:] == ' ["x", null] true'
    assert one.problem(0).answer == '{"type": "object", "required": ["größe"]}'


def test_the_side_of_a_row_does_not_depend_on_how_its_values_are_written(tmp_path):
    rows = [{"question": [n, True], "answer": n} for n in range(40)]
    held = task(**args(write(tmp_path / "rows.jsonl", rows), split="held_out"))
    expected = [n for n in range(40) if split_of(f"[{n}, True]", 0.25) == "held_out"]
    assert held._kept.tolist() == expected
