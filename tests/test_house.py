"""Layout of packages/ and contrib/, prose also of tests/, within the limits of CONTRIBUTING.md."""

from functools import cache
from pathlib import Path

import pytest
from house import MARKS, House, measure

ROOT = Path(__file__).parents[1]


CODE = ("packages", "contrib")


@cache
def house(*folders: str) -> House:
    return measure(*(ROOT / name for name in folders))


@pytest.mark.parametrize(("kind", "most"), [("files", 600), ("classes", 350), ("functions", 80)])
def test_no_file_class_or_function_is_too_long(kind, most):
    assert [each for each in getattr(house(*CODE), kind) if each[0] > most] == []


def test_at_most_five_class_names_mean_two_things():
    assert len(house(*CODE).ambiguous) <= 5, house(*CODE).ambiguous


@pytest.mark.parametrize("folders", [CODE, ("tests",)], ids=" ".join)
@pytest.mark.parametrize("name", MARKS)
def test_the_prose_is_plain(folders, name):
    found = house(*folders).marks()[name]
    assert found <= MARKS[name][1], f"python tests/house.py {folders[0]} --worst 40 shows where"


def test_the_marks_are_found(tmp_path):
    (tmp_path / "riddle.py").write_text(
        '"""What nobody asks; of those who have it."""\n# Of whole weights, which are small.\n'
    )
    found = measure(tmp_path).marks()
    assert found["semicolons"] > 0 and found["nobody, somebody, nothing"] > 0
    assert found["a sentence that starts with 'Of'"] > 0 and found["who, whoever, whom"] > 0
