"""Promises of single kinds beyond the contract."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from task_chats import ARGS, fastest_s, judged, task_use

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import TaskUse
from orrery.tasks import Message, ToolCall, make
from orrery.tasks.synthetic import evaluate, longest_common_subsequence, result, text_calls
from orrery.tasks.task import split_of

SMALL = [
    ("reverse_text", {"alphabet": "abc"}),
    ("calculator", {"max_operand": 5}),
    ("reverse_words", {"min_words": 2, "max_words": 2}),
    (
        "reasoning_gym",
        {
            "family": "chain_sum",
            "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        },
    ),
    (
        "reasoning_gym",
        {"family": "spell_backward", "config": {"min_word_len": 3, "max_word_len": 3}},
    ),
]


@pytest.mark.parametrize(("kind", "small"), SMALL)
def test_train_and_held_out_problems_never_meet(kind, small):
    texts = {}
    for split in ("train", "held_out"):
        tasks = [make(task_use(kind, seed, split=split, **small)) for seed in (0, 1)]
        texts[split] = {task.problem(i).messages[-1].content for task in tasks for i in range(300)}
    assert len(texts["held_out"]) > 20
    assert not texts["train"] & texts["held_out"]


def test_a_split_without_texts_is_refused_instead_of_searched_for_ever():
    for split in ("train", "held_out"):
        task = make(task_use("reverse_text", alphabet="a", min_length=1, max_length=1, split=split))
        try:
            assert task.problem(0).answer == "a"
        except OrreryError as error:
            assert "widen the lengths" in str(error)
            return
    pytest.fail("one text stands on both sides")


def test_a_family_of_one_problem_has_it_on_one_side_alone():
    args = {"family": "prime_factorization", "config": {"min_value": 30, "max_value": 30}}
    (train, held_out) = (
        make(task_use("reasoning_gym", **args, split=split)) for split in ("train", "held_out")
    )
    assert split_of(train.problem(0).messages[0].content) == "train"
    with pytest.raises(
        OrreryError,
        match=r"no held_out question of family prime_factorization in 1000 draws. "
        "Config .* allows too few",
    ):
        held_out.problem(0)


@pytest.mark.parametrize(
    ("said", "reward", "lcs_ratio"),
    [
        ("dcba", 1.0, 1.0),
        (" dcba\n", 1.0, 1.0),
        ("dcb", 0.75, 6 / 7),
        ("dcbaa", 0.8, 8 / 9),
        ("xdcb", 0.0, 0.75),
        ("", 0.0, 0.0),
        ("dbca", 0.5, 0.75),
    ],
)
def test_reverse_text_counts_characters_in_their_place(said, reward, lcs_ratio):
    task = make(task_use("reverse_text", alphabet="abcd"))
    index = next(i for i in range(10_000) if task.problem(i).answer == "dcba")
    verdict = task.judge(
        task.problem(index), [*task.problem(index).messages, Message("assistant", said)]
    )
    assert verdict.reward == pytest.approx(reward)
    assert verdict.metrics["lcs_ratio"] == pytest.approx(lcs_ratio)


@given(st.text("abc", max_size=8), st.text("abc", max_size=8))
def test_the_common_subsequence_is_the_longest(a, b):
    def slow(a: str, b: str) -> int:
        if not a or not b:
            return 0
        return slow(a[1:], b[1:]) + 1 if a[0] == b[0] else max(slow(a[1:], b), slow(a, b[1:]))

    assert longest_common_subsequence(a, b) == slow(a, b)


@pytest.mark.parametrize(
    ("expression", "value"), [("1+2*3", 7), ("(1+2)*3", 9), ("-4 - -5", 1), ("12", 12)]
)
def test_the_calculator_knows_precedence(expression, value):
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1+",
        "a",
        "2**9",
        "1//2",
        "1/2",
        "()",
        "1,2",
        "1 2",
        "007",
        "9" * 201,
        "(" * 99 + ")" * 99,
        "1.5",
        "1_0",
    ],
)
def test_the_calculator_refuses_anything_else(expression):
    with pytest.raises(ValueError, match="expression"):
        evaluate(expression)


def test_calculator_rewards_are_the_stated_shares():
    task = make(task_use("calculator"))
    problem = task.problem(0)

    def reward(*said: Message) -> float:
        return task.judge(problem, [*problem.messages, *said]).reward

    call = Message("assistant", "", (ToolCall("calculator", {"input": "1+1"}),))
    broken = Message("assistant", "", (ToolCall("calculator", {"input": "1+"}),))
    tool = Message("tool", "2", name="calculator")
    right, wrong = Message("assistant", problem.answer), Message("assistant", "nothing")
    assert reward(call, tool, right) == 1.0
    assert reward(call, tool, wrong) == 0.25
    assert reward(right) == 0.75
    assert reward(broken, Message("tool", "error"), wrong) == 0.0
    assert reward(call) == 0.25  # cut off before an answer


def test_every_call_is_answered_up_to_the_limit():
    task = make(task_use("calculator"))
    problem = task.problem(0)
    calls = tuple(
        ToolCall(name, args)
        for name, args in [
            ("calculator", {"input": "2*3"}),
            ("sin", {"input": "0"}),
            ("calculator", {}),
        ]
    )
    replies = task.reply(problem, [*problem.messages, Message("assistant", "", calls * 2)])
    assert [reply.content for reply in replies] == [
        "6",
        "error no such tool",
        "error give one argument input",
    ]
    assert result(ToolCall("calculator", {"input": 3})).startswith("error")


def test_neighbouring_seeds_of_reasoning_gym_share_no_stream():
    one, two = (
        make(task_use("reasoning_gym", seed, family="basic_arithmetic", config={}))
        for seed in (0, 1)
    )
    assert [one.problem(i + 1).answer for i in range(10)] != [
        two.problem(i).answer for i in range(10)
    ]


@pytest.mark.parametrize(
    "family",
    [
        "basic_arithmetic",
        "countdown",
        "leg_counting",
        "letter_counting",
        "sudoku",
        "word_sorting",
        "chain_sum",
    ],
)
def test_families_of_reasoning_gym_judge_their_own_answers(family):
    task = make(task_use("reasoning_gym", family=family, config={}))
    problem, chat = task.problem(1), task.demonstration(1)
    assert judged(task, problem, chat[len(problem.messages) :]).reward == 1.0
    assert (
        judged(
            task, problem, [Message("assistant", f"so <answer>{problem.answer}</answer>")]
        ).reward
        == 1.0
    )


def test_a_family_without_reference_answers_says_so():
    task = make(task_use("reasoning_gym", family="boxnet", config={}))
    with pytest.raises(OrreryError, match="family boxnet has no reference answers"):
        task.demonstration(0)


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("c b a", 1.0),
        (" c  b\na ", 1.0),
        ("c b", 2 / 3),
        ("c b a a", 0.75),
        ("a b c", 1 / 3),
        ("b a c", 0.0),
        ("", 0.0),
    ],
)
def test_reverse_words_counts_words_in_their_place(said, reward):
    task = make(task_use("reverse_words", min_words=3, max_words=3))
    problem = task.problem(0)
    letter = dict(zip("cba", problem.answer.split(), strict=True))
    words = "".join(letter.get(each, each) for each in said)
    assert task.judge(
        problem, [*problem.messages, Message("assistant", words)]
    ).reward == pytest.approx(reward)


def test_a_call_in_text_is_a_call_where_the_format_has_none():
    task = make(task_use("calculator", call_syntax="text"))
    problem = task.problem(0)
    expression = problem.messages[0].content
    assert not problem.tools

    def reward(*said: Message) -> float:
        return task.judge(problem, [*problem.messages, *said]).reward

    call, right = (
        Message("assistant", f"calculator({expression})"),
        Message("assistant", problem.answer),
    )
    assert task.reply(problem, [*problem.messages, call]) == [
        Message("tool", problem.answer, name="calculator")
    ]
    assert (
        task.reply(problem, [*problem.messages, Message("assistant", "calculator(1+)")])[0].content
        == "error not an expression"
    )
    assert task.reply(problem, [*problem.messages, Message("assistant", "calculator 1+1")]) is None
    assert reward(call, Message("tool", problem.answer), right) == 1.0
    assert reward(call) == 0.25
    assert reward(right) == 0.75
    # No call, and no answer.
    assert reward(Message("assistant", f"calculator({problem.answer}")) == 0.0


def test_a_line_has_one_call_in_text_from_its_first_opening_to_its_last_parenthesis():
    text = ") calculator(1+(2)) calculator(3) x\ncalculator(4\n) calculator(\n"
    text += "calculator()\rcalculator(5)"
    assert text_calls(text) == ["1+(2)) calculator(3", ")\rcalculator(5"]


def test_calls_in_text_without_an_end_cost_time_in_proportion():
    few, many = (fastest_s(lambda n=n: text_calls("calculator(" * n)) for n in (500, 4000))
    # Eight times as many; each with a look at the whole rest would be 64 times the time.
    assert many < 25 * few


def few_shot(kind: str, seed: int = 3, **changes):
    args = {"kind": kind, "args": ARGS[kind] | changes, "num_examples": 3, "system": "be brief"}
    return TaskUse(name="it", kind="few_shot", args=args, weight=1.0, seed=seed, max_turns=1)


def test_examples_are_the_same_before_every_problem_and_of_the_training_side():
    uses = [
        few_shot("reverse_words", seed, split=split)
        for seed in (0, 1)
        for split in ("train", "held_out")
    ]
    chats = [make(use).problem(index).messages for use in uses for index in range(2)]
    assert len({chat[:-1] for chat in chats}) == 1 and len(chats[0]) == 1 + 2 * 3 + 1
    assert all(
        split_of(message.content.removeprefix("reverse ")) == "train"
        for message in chats[0][1:-1:2]
    )
    assert len({chat[-1] for chat in chats}) == len(chats)


def test_a_few_shot_task_needs_demonstrations_and_nests_no_further():
    for kind, words in (
        ("lengths", "has no demonstrations"),
        ("few_shot", "few_shot cannot contain few_shot"),
    ):
        with pytest.raises(OrreryError, match=words):
            make(few_shot(kind))


def test_drawn_lengths_have_the_median_and_the_tail_that_the_args_say():
    task = make(task_use("lengths"))
    lengths = sorted(task.problem(index).exact_tokens for index in range(2000))
    assert 90 <= lengths[1000] <= 111  # 100, and three standard errors of a median of 2000
    assert lengths[-2] >= 10 * lengths[1000]
    assert lengths == sorted(
        make(task_use("lengths")).problem(index).exact_tokens for index in range(2000)
    )
