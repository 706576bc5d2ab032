"""The contract of every kind of task. A new kind adds its args to `task_chats.ARGS`."""

import subprocess
import sys

import msgspec
import pytest
from task_chats import ARGS, judged, task_use

from orrery.tasks import KINDS, Message, Problem, make

INDICES = range(8)
GARBAGE = ["", " ", "<|user|>", "zzzzzzzzzzzzzzzzzzzz", "\x00", "]" * 500, "0x", "<answer>", "{}"]

kinds = pytest.mark.parametrize("kind", sorted(KINDS))
# It measures engines, and rewards noise.
learnable = pytest.mark.parametrize("kind", sorted(set(KINDS) - {"lengths"}))


def test_every_kind_is_under_contract():
    assert set(ARGS) == set(KINDS)


@kinds
def test_a_problem_is_a_function_of_args_seed_and_index(kind):
    forwards = [make(task_use(kind)).problem(i) for i in INDICES]
    task = make(task_use(kind))
    backwards = [task.problem(i) for i in reversed(INDICES)]
    assert forwards == backwards[::-1]
    assert [problem.index for problem in forwards] == list(INDICES)


@kinds
def test_another_process_sees_the_same_problems(kind):
    code = (
        "import sys, msgspec; from orrery.manifest.schema import TaskUse;"
        "from orrery.tasks import make;"
        "task = make(TaskUse.model_validate_json(sys.argv[1]));"
        f"problems = [task.problem(i) for i in range({len(INDICES)})];"
        "sys.stdout.buffer.write(msgspec.json.encode(problems))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, task_use(kind).model_dump_json()],
        capture_output=True,
        check=True,
    )
    here = make(task_use(kind))
    assert done.stdout == msgspec.json.encode([here.problem(i) for i in INDICES])


@kinds
def test_seeds_give_different_problems(kind):
    texts = [
        {make(task_use(kind, seed)).problem(i).messages[-1].content for i in range(40)}
        for seed in (0, 1)
    ]
    assert len(texts[0] & texts[1]) <= 4


@kinds
def test_problems_survive_json(kind):
    problem = make(task_use(kind)).problem(0)
    assert msgspec.json.decode(msgspec.json.encode(problem), type=Problem) == problem


@kinds
def test_a_problem_ends_before_the_assistant_speaks(kind):
    assert all(make(task_use(kind)).problem(i).messages[-1].role != "assistant" for i in INDICES)


@learnable
def test_demonstrations_are_judged_one_and_the_environment_agrees_with_them(kind):
    task = make(task_use(kind))
    for index in INDICES:
        problem, chat = task.problem(index), task.demonstration(index)
        assert chat[: len(problem.messages)] == list(problem.messages)
        assert judged(task, problem, chat[len(problem.messages) :]).reward == pytest.approx(1.0)
        for turn, message in enumerate(chat):
            if message.role == "assistant":
                replies = task.reply(problem, chat[: turn + 1]) or []
                assert list(replies) == chat[turn + 1 : turn + 1 + len(replies)]


@learnable
def test_garbage_is_judged_low_and_never_raises(kind):
    task = make(task_use(kind))
    for index in INDICES:
        for text in GARBAGE:
            verdict = judged(task, task.problem(index), [Message("assistant", text)])
            assert 0.0 <= verdict.reward <= 0.5, (text, verdict)
            assert all(isinstance(value, float) for value in verdict.metrics.values())


@kinds
def test_a_final_answer_without_a_call_ends_the_episode(kind):
    task = make(task_use(kind))
    problem = task.problem(0)
    assert not task.reply(problem, [*problem.messages, Message("assistant", "hm")])
