"""Few-shot prompts of the task `dataset`: which examples they show, and the system message."""

import pytest
from task_files import ROWS, args, few_shot, source, task, write

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import TaskUse
from orrery.tasks import make
from orrery.tasks.task import Message


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "rows.jsonl")


def test_few_shot_shows_training_rows_before_held_out_problems(path):
    train, held = (
        make(TaskUse(name="sums", kind="few_shot", args=few_shot(**args(path, split=split)),
                     weight=1.0, seed=3, max_turns=1))
        for split in ("train", "held_out")
    )  # fmt: skip
    shown = held.problem(0).messages[:4]
    assert shown == train.problem(5).messages[:4]
    assert [m.role for m in shown] == ["user", "assistant"] * 2
    trained = {row.messages[-1].content for row in map(task(**args(path)).problem, range(40))}
    assert {shown[0].content, shown[2].content} <= trained
    assert held.problem(0).messages[4].content not in trained
    with pytest.raises(OrreryError, match="have a prompt that is too long"):  # five messages
        held.check_rows(lambda problem: len(problem.messages), 4)


def shown_before(path, num_examples, outer, **changes):
    """Return few-shot chats of the training rows, as prompts and as demonstrations."""
    given = few_shot(num_examples, **args(path, **changes)) | {"system": outer}
    one = make(TaskUse(name="it", kind="few_shot", args=given, weight=1.0, seed=3, max_turns=1))
    indices = range(len(one.task._kept))
    return [list(one.problem(n).messages) for n in indices], [*map(one.demonstration, indices)]


def test_few_shot_does_not_show_the_problem_that_it_asks(path):
    chats, demonstrations = shown_before(path, 3, None)
    for chat, demonstration in zip(chats, demonstrations, strict=True):
        assert [message.role for message in chat] == ["user", "assistant"] * 3 + ["user"]
        assert chat[-1] not in chat[:-1]
        assert demonstration[:-1] == chat and demonstration[-1].role == "assistant"
    assert len({tuple(chat[:-1]) for chat in chats}) == 4  # the usual examples, or one replaced


def test_few_shot_of_few_rows_shows_fewer_examples(tmp_path):
    chats, _ = shown_before(write(tmp_path / "rows.jsonl", ROWS[:2] + ROWS[:2]), 3, None,
                            held_out=source(write(tmp_path / "other.jsonl", ROWS[9:])))  # fmt: skip
    assert len(chats) == 4 and all(chat[-1] not in chat[:-1] for chat in chats)


@pytest.mark.parametrize(
    ("outer", "inner", "system"),
    [
        (None, "Be brief.", "Be brief."),
        ("Like this:", None, "Like this:"),
        ("Like this:", "Be brief.", "Like this:\n\nBe brief."),
    ],
)
def test_few_shot_has_one_system_message_at_the_start(path, outer, inner, system):
    for chat in shown_before(path, 2, outer, system=inner)[0]:
        assert chat[0] == Message("system", system)
        assert [message.role for message in chat[1:]] == ["user", "assistant"] * 2 + ["user"]
