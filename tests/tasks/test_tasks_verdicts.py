"""Verdicts of the task `dataset`, and reward functions of the user."""

import datetime
import hashlib
import json
import re
import sys
from pathlib import Path

import _gojsonnet
import pytest
from task_chats import fastest_s
from task_files import ROWS, args, task, write

from orrery.manifest.errors import OrreryError
from orrery.tasks.task import Message
from orrery.tasks.verdicts import scorer_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "rows.jsonl")


def score(text, answer, row=None, **verdict):
    return scorer_of({"verdict": verdict, "answer": answer, "row": row})(text)


@pytest.mark.parametrize(
    ("text", "answer", "pattern", "right"),
    [
        ("  Paris. ", "paris", None, True),
        ("ｐａｒｉｓ", "Paris", None, True),
        ("Paris is it", "Paris", None, False),
        ("I say: London. No: Paris", "Paris", r": (\w+)", True),
        ("nothing", "Paris", r": (\w+)", False),
    ],
)
def test_exact_compares_normalised_text(text, answer, pattern, right):
    assert score(text, answer, kind="exact", ignore_case=True, pattern=pattern) == right


def test_a_pattern_quotes_the_answer():
    assert score("#### 3.5", "3.5", kind="pattern", pattern="#### {answer}$") == 1.0
    assert score("#### 375", "3.5", kind="pattern", pattern="#### {answer}$") == 0.0


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("c", "C"),
        ("The answer is (B).", "B"),
        ("A is wrong, so \\boxed{\\text{D}}", "D"),
        ("Answer: **C**, not A", "C"),
        ("I take B, because a dog is A good friend", "B"),
        ("no idea", None),
        ("The answer is a bit subtle. Both fail, so C.", "C"),
        ("The answer is a prime number, therefore (B)", "B"),
        ("The correct option is a mammal: **D**", "D"),
        ("My answer: a triangle has 3 sides, thus \nAnswer - C", "C"),
        ("The answer is a **mammal**, so D", "D"),
        ("The answer is a 3-4-5 triangle. B", "B"),
        ("The answer a student gives is B", "B"),
        ("The option is a\tbird", None),
        ("the answer is a", "A"),
        ("the answer is a.", "A"),
        ("the answer is a\n\nBoth others fail, as in B.", "A"),
        ("the answer is a, not B", "A"),
        ("the answer is (a) because B fails", "A"),
        ("Answer: a) triangle", "A"),
        ("the answer is **a** because B fails", "A"),
        ("the answer is a because B fails", "A"),
        ("option a is right and B is wrong", "A"),
        ("The answer is A because B fails", "A"),
        ("The answer is: B, not C", "B"),
        ("The correct choice is : (b), as C fails", "B"),
        ("ANSWER IS = b, as C fails", "B"),
        ("**Answer:** B, as C fails", "B"),
        ("Answer \u2013 b, as C fails", "B"),
        ("a", "A"),
        (" (a)\n", "A"),
        ("a.", "A"),
        ("a)", "A"),
        ("a dog", None),
    ],
)
def test_a_choice_is_the_letter_that_the_reply_settles_on(text, letter):
    given = [x for x in "ABCD" if score(text, x, kind="choice", num_choices=4)]
    assert given == ([letter] if letter else [])


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("My answer: I think it is B", "B"),
        ("The answer I choose is B", "B"),
        ("The answer: I'm sure of B", "B"),
        ("The choices are hard, so B", "B"),
        ("The answer is I.", "I"),
        ("the answer is i", "I"),
        ("Option I is right", "I"),
        ("(i)", "I"),
    ],
)
def test_the_word_i_is_no_choice(text, letter):
    letters = [chr(ord("A") + n) for n in range(26)]
    assert [x for x in letters if score(text, x, kind="choice", num_choices=26)] == [letter]


def test_a_choice_in_long_blanks_costs_time_in_proportion():
    few, many = (
        fastest_s(lambda n=n: score("answer" + " " * n, "A", kind="choice", num_choices=4))
        for n in (2_000, 16_000)
    )
    assert many < 25 * few  # eight times as many; the square would be 64 times the time


TABLE = re.findall(
    r"^\| ([a-z_]+(?:, .+?)?) \| `(.+)` \| `(.+)` \| ([01]) \|$",
    (ROOT / "docs/datasets.md").read_text(),
    re.MULTILINE,
)
OF_TABLE = {
    "math": {"boxed": False},
    "math, boxed": {"kind": "math", "boxed": True},
    "exact": {"ignore_case": True, "pattern": None},
    "exact, last number": {"kind": "exact", "ignore_case": True, "pattern": "(-?[0-9]+)"},
    "pattern, ####": {"kind": "pattern", "pattern": "#### {answer}$"},
    "choice": {"num_choices": 4},
    "json_schema": {},
}


def test_the_pages_table_has_twenty_answers():
    assert len(TABLE) == 20


@pytest.mark.parametrize(("verdict", "answer", "reply", "worth"), TABLE)
def test_the_pages_table_tells_the_verdicts(verdict, answer, reply, worth):
    assert score(reply, answer, **{"kind": verdict} | OF_TABLE[verdict]) == float(worth)


def test_the_pages_line_for_a_reward_is_jsonnet():
    page = (ROOT / "docs/datasets.md").read_text()
    (line,) = re.findall(r"^verdict: .+$", page, re.MULTILINE)
    read = {"import_callback": lambda _, name: (name, b"text")}
    args = json.loads(_gojsonnet.evaluate_snippet("page", f"{{ {line} }}", **read))
    assert args["verdict"]["function"] == "reward"


def test_json_fits_the_answers_schema():
    schema = json.dumps({"type": "object", "required": ["x"]})
    assert score('Here:\n```json\n{"x": 1}\n```', schema, kind="json_schema") == 1.0
    assert score('{"y": 1}', schema, kind="json_schema") == 0.0
    assert score("{", schema, kind="json_schema") == 0.0
    with pytest.raises(ValueError, match="not a JSON schema"):
        score("1", '{"type": "strange"}', kind="json_schema")


def reward(tmp_path, text):
    path = tmp_path / "reward.py"
    path.write_text(text)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"kind": "python", "path": str(path), "sha256": sha256, "function": "reward"}


def test_a_reward_function_of_the_user_sees_reply_answer_and_row(tmp_path):
    code = "def reward(reply, answer, row): return 0.5 * (reply == answer) + row['bonus']"
    verdict = reward(tmp_path, code)
    assert score("7", "7", {"bonus": 0.25}, **verdict) == 0.75
    Path(verdict["path"]).write_text("# another\n" + code)
    verdict["path"] = str(Path(verdict["path"]))
    with pytest.raises(OrreryError, match="defines no function 'prize'"):
        score("7", "7", {}, **(reward(tmp_path, code) | {"function": "prize"}))
    with pytest.raises(OrreryError, match="the manifest says"):
        score("7", "7", {}, **(reward(tmp_path, code) | {"sha256": "0" * 64}))


def test_formulas_without_their_library_are_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(OrreryError, match=r"needs math-verify, .* here. Type `make setup`"):
        score("7", "7", kind="math", boxed=False)


async def test_a_reply_is_judged_in_an_isolated_process(path, tmp_path):
    one = task(**args(path))
    problem = one.problem(3)
    for text, reward_ in ((problem.answer, 1.0), ("no idea", 0.0)):
        judgement = await one.judge(problem, [*problem.messages, Message("assistant", text)])
        assert (judgement.reward, judgement.metrics["unscorable"]) == (reward_, 0.0)
    code = "import os, time\ndef reward(reply, answer, row):\n"
    code += "    os._exit(0) if reply == 'leave' else time.sleep(99) if reply == 'wait' else None\n"
    code += "    return row['question'].count('+') / 2"
    one = task(**args(path, verdict=reward(tmp_path, code)))
    problem = one.problem(3)
    for text, reward_ in (("any", 0.5), ("leave", 0.0)):
        judgement = await one.judge(problem, [*problem.messages, Message("assistant", text)])
        assert (judgement.reward, judgement.metrics["unscorable"]) == (reward_, float(not reward_))


async def test_a_reward_file_is_found_from_the_working_directory(path, tmp_path, monkeypatch):
    verdict = reward(tmp_path, "def reward(reply, answer, row): return 0.75")
    monkeypatch.chdir(tmp_path)
    one = task(**args(path, verdict=verdict | {"path": "reward.py"}))
    assert (await one.judge(one.problem(3), [Message("assistant", "any")])).reward == 0.75


async def test_values_that_json_lacks_reach_a_reward_function_as_text(tmp_path):
    rows = [{**row, "when": datetime.date(2026, 11, day + 1)} for day, row in enumerate(ROWS[:8])]
    path = write(tmp_path / "rows.parquet", rows)
    code = "def reward(reply, answer, row): return float(row['when'] == '2026-11-01')"
    one = task(**args(path, verdict=reward(tmp_path, code)))
    rewards = [
        (await one.judge(one.problem(n), [Message("assistant", "x")])).reward for n in range(4)
    ]
    assert set(rewards) <= {0.0, 1.0}
    at_first = next(row for row in rows if row["when"].day == 1)
    assert one._request(rows.index(at_first), "")["row"]["when"] == "2026-11-01"


async def test_an_exception_of_a_reward_function_is_logged_once(path, tmp_path, caplog):
    code = "def reward(reply, answer, row):\n    return float(reply)"
    one = task(**args(path, verdict=reward(tmp_path, code)))
    for _ in range(3):
        judgement = await one.judge(one.problem(0), [Message("assistant", "seven")])
        assert (judgement.reward, judgement.metrics["unscorable"]) == (0.0, 1.0)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "ValueError: could not convert string to float: 'seven' (reward.py:2)" in said


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("(reply, answer): return 1.0", "takes 2 positional arguments but 3 were given"),
        ("(reply, answer, row): return row['level']", "raises KeyError: 'level' (reward.py:1)"),
        ("(reply, answer, row): pass", "the reward is NoneType, not a number"),
        ("(reply, answer, row): return 2", "returns 2; return a number from 0 to 1"),
        ("(reply, answer, row): return float(reply)", "for an empty reply it raises ValueError"),
        ("(reply, answer, row): exit()", "checking the row ends the process"),
    ],
)
def test_a_reward_function_is_tried_when_rows_are_checked(path, tmp_path, code, says):
    verdict = reward(tmp_path, f"def reward{code}")
    rows = write(path, [{"question": f"{n}?", "answer": "1"} for n in range(40)])
    with pytest.raises(OrreryError, match=re.escape(says)):
        task(**args(rows, verdict=verdict)).check_rows(None, 0)


def test_a_row_that_takes_too_long_is_named(path, tmp_path, monkeypatch):
    code = "def reward(reply, answer, row):\n    while answer == '7': pass\n    return 1.0"
    rows = write(path, [{"question": f"{n}?", "answer": str(n)} for n in range(9)])
    one = task(**args(rows, verdict=reward(tmp_path, code)))
    slow = next(at for at in one._kept if one._row(at)["answer"] == "7")
    monkeypatch.setattr("orrery.tasks.dataset.watched.__defaults__", (0.5,))
    with pytest.raises(OrreryError, match=rf":{2 * slow + 1}: checking the row takes more than"):
        one.check_rows(None, 0)


async def test_a_request_that_its_verdict_refuses_fails_the_rollout_with_a_sentence(path):
    one = task(**args(path, verdict={"kind": "choice", "num_choices": 2}))
    with pytest.raises(OrreryError, match=r"the answer '\d+' is none of the letters AB"):
        await one.judge(one.problem(0), [Message("assistant", "A")])
