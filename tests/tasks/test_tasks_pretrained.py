"""Chats in the tokenizer and template of SmolLM2-135M-Instruct (benchmarks/async/smollm2.py).

Skipped if the packages that contain it are not installed. Nothing is downloaded.
"""

from pathlib import Path

import pytest
import smollm2
from replaced import replaced
from task_chats import completion

from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import load
from orrery.tasks import Message, make
from orrery.tasks.chat import Renderer
from orrery.tasks.check import check

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    bool(smollm2.missing()), reason=f"not installed: {', '.join(smollm2.missing())}"
)

MANIFEST = load(ROOT / "manifests" / "smollm2_smoke.json")
uses = pytest.mark.parametrize("use", MANIFEST.tasks.train, ids=lambda use: use.name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    smollm2.write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def renderer(folder):
    return Renderer(folder)


@pytest.fixture(scope="module")
def theirs(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def plain(messages):
    return [{"role": message.role, "content": message.content} for message in messages]


@uses
def test_prompts_are_the_tokens_that_transformers_makes_of_the_chat(renderer, theirs, use):
    for index in range(4):
        messages = make(use).problem(index).messages
        expected = theirs.apply_chat_template(
            plain(messages), add_generation_prompt=True, return_dict=False
        )
        assert renderer.prompt(messages) == expected


def test_a_turn_ends_with_the_end_of_the_template_s_turn_and_nothing_else(renderer, theirs):
    assert renderer.stop_token_ids == [theirs.convert_tokens_to_ids("<|im_end|>")]
    said = completion(renderer, Message("assistant", "river tree apple"))
    assert said[-1:] == renderer.stop_token_ids and said.count(said[-1]) == 1
    assert renderer.parse(said) == Message("assistant", "river tree apple")


@uses
def test_what_is_sampled_and_appended_over_turns_is_the_whole_chat(renderer, use):
    task = make(use)
    problem, chat = task.problem(0), task.demonstration(0)
    ids, turn = renderer.prompt(problem.messages), len(problem.messages)
    while turn < len(chat):
        ids = ids + completion(renderer, chat[turn])
        replies = task.reply(problem, chat[: turn + 1]) or []
        assert list(replies) == chat[turn + 1 : turn + 1 + len(replies)]
        turn += 1 + len(replies)
        ids = ids + renderer.next_turn(replies)
    assert ids == renderer.prompt(chat)


def test_the_manifest_s_tokenizer_is_this_one_and_its_prompts_fit(folder):
    """`check` refuses another digest, and a prompt and a turn that exceed the context."""
    manifest = replaced(MANIFEST, "model.tokenizer", path=str(folder))
    assert len(check(manifest)) == 2 * len(MANIFEST.tasks.train)
    short = replaced(manifest, "model", vocab_size=100)
    with pytest.raises(
        OrreryError, match=r"^tasks\.train\[0\]: model\.vocab_size 100: the tokenizer gives "
    ):
        check(short)
