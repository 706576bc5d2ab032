"""Making tasks by name: the errors, the open door, and the check of whole manifests."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from task_chats import task_use

from orrery import tasks
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import load
from orrery.manifest.schema import TaskUse
from orrery.tasks import Task, make
from orrery.tasks.check import check

EXAMPLE = Path(__file__).parents[2] / "examples" / "count_vowels"
MANIFEST = Path(__file__).parents[2] / "manifests" / "reverse_text.json"


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (
            task_use("revers_text"),
            "task 'it': kind: there is no 'revers_text'; did you mean 'reverse_text'?",
        ),
        (
            task_use("quite_else"),
            "task 'it': kind: there is no 'quite_else'; "
            "choose from calculator, dataset, few_shot, lengths, ",
        ),
        (
            task_use("reverse_text", min_lenght=3),
            "task 'it': args: there is no 'min_lenght'; did you mean 'min_length'?",
        ),
        (
            task_use("reverse_text", min_length=0),
            "task 'it': args.min_length: 0 does not fit: input should be greater than 0",
        ),
        (
            task_use("reverse_text", min_length=9),
            "task 'it': args: max_length 7 is below min_length 9",
        ),
        (
            task_use("reverse_text", split="test"),
            "task 'it': args.split: 'test' does not fit: input should be 'train' or 'held_out'",
        ),
        (
            task_use("reverse_text", alphabet="aba"),
            "task 'it': args: alphabet 'aba' must contain each character once, and no blank",
        ),
        (
            task_use("calculator", operators="/"),
            "task 'it': args.operators: '/' does not fit: string should match pattern '^[-+*]+$'",
        ),
        (
            task_use("reasoning_gym", family="leg_count"),
            "task 'it': args.family: reasoning-gym has no 'leg_count'; "
            "did you mean 'leg_counting'?",
        ),
        (
            task_use("reasoning_gym", config={"min_word": 3}),
            "args.config: family spell_backward has no option 'min_word'; did you mean",
        ),
        (
            task_use("reasoning_gym", config={"min_word_len": 0}),
            "task 'it': args.config: family spell_backward refuses {'min_word_len': 0}",
        ),
    ],
)
def test_a_mistake_is_one_sentence(use, sentence):
    with pytest.raises(OrreryError) as error:
        make(use)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_arg_is_named():
    use = task_use("reverse_text")
    use = use.model_copy(
        update={"args": {name: value for name, value in use.args.items() if name != "max_length"}}
    )
    with pytest.raises(
        OrreryError, match=r"args.max_length is missing; this task needs alphabet, min_length"
    ):
        make(use)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on the path where packages can be installed, as `pip install` lays them out."""
    monkeypatch.syspath_prepend(str(tmp_path))
    tasks.kinds.cache_clear()
    yield tmp_path
    tasks.kinds.cache_clear()
    sys.modules.pop("count_vowels", None)


def install(site: Path, name: str, points: dict[str, str]) -> None:
    info = site / f"{name.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(
        "[orrery.tasks]\n" + "".join(f"{kind} = {value}\n" for kind, value in points.items())
    )


def test_an_installed_package_adds_a_kind(site):
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    install(site, project["name"], project["entry-points"]["orrery.tasks"])
    shutil.copy(EXAMPLE / "count_vowels.py", site)
    task = make(task_use("count_vowels", length=5))
    assert isinstance(task, Task)
    assert task.problem(0) == make(task_use("count_vowels", length=5)).problem(0)
    assert task.judge(task.problem(0), task.demonstration(0)).reward == 1.0
    with pytest.raises(OrreryError, match="did you mean 'length'"):
        make(task_use("count_vowels", lenght=5))


def test_a_package_may_not_take_a_kind_that_exists(site):
    install(site, "impostor", {"calculator": "impostor:Calculator"})
    with pytest.raises(
        OrreryError,
        match=r"'calculator' is claimed by orrery\.tasks\.synthetic:Calculator and impostor:",
    ):
        make(task_use("reverse_text"))


def test_a_package_that_cannot_be_imported_is_named(site):
    install(site, "hollow", {"hollow": "hollow_module_that_is_absent:Task"})
    with pytest.raises(OrreryError, match="cannot be imported from hollow_module_that_is_absent"):
        make(task_use("hollow"))


def run_check(*paths: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "orrery.tasks.check", *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_checked_in_manifests_pass_the_check():
    # Others are not in git.
    every = [
        path
        for path in MANIFEST.parent.glob("*.json")
        if load(path).model.tokenizer.kind == "characters"
    ]
    done = run_check(*sorted(every))
    assert len(every) > 5
    assert done.returncode == 0, done.stderr
    assert "tasks.train[0]: reverse_text" in done.stdout


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        (
            '"min_length"',
            '"min_lenght"',
            "error: tasks.train[0]: task 'reverse_text': args: there is no 'min_lenght'; "
            "did you mean 'min_length'?",
        ),
        (
            '"alphabet": "a',
            '"alphabet": "\\u00e9a',
            "error: tasks.train[0]: model.tokenizer.alphabet has no 'é'",
        ),
        ('"max_length": ', '"max_length": 900', "do not fit inference.max_model_len_tokens"),
    ],
)
def test_the_check_refuses_what_would_fail_later(tmp_path, before, after, sentence):
    text = MANIFEST.read_text()
    # the tokenizer's own alphabet stays as it is
    head, middle, tail = text.partition('"tasks": {')
    assert before in tail
    (tmp_path / "bad.json").write_text(head + middle + tail.replace(before, after))
    done = run_check(tmp_path / "bad.json")
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_the_check_refuses_evaluation_on_problems_that_are_trained_sft_included():
    manifest = load(MANIFEST)
    [train], [held_out], warm_start = (
        manifest.tasks.train,
        manifest.tasks.evaluation,
        manifest.stages.sft.data.task,
    )

    def shown(use: TaskUse) -> TaskUse:
        args = {"kind": use.kind, "args": use.args, "num_examples": 1, "system": None}
        return use.model_copy(update={"kind": "few_shot", "args": args})

    for evaluated, path in (
        (train, "tasks.train[0]"),
        (warm_start, "stages.sft.data.task"),
        (shown(warm_start), "stages.sft.data.task"),
    ):
        tasks = manifest.tasks.model_copy(update={"evaluation": [held_out, evaluated]})
        with pytest.raises(OrreryError) as error:
            check(manifest.model_copy(update={"tasks": tasks}))
        assert (
            str(error.value) == f"tasks.evaluation[1]: has the same problems as {path}. "
            "Give it another seed or split"
        )
