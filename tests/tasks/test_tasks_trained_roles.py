"""Which tokens of an example are trained, in the character format and in pretrained templates."""

import itertools

import pytest
from task_chats import ALPHABET, character_renderer, write_qwen_like

from orrery.manifest.errors import OrreryError
from orrery.tasks import Message, Tool, ToolCall
from orrery.tasks.chat import Renderer

TOOL = Tool("calculator", "adds", {"type": "object", "properties": {"input": {"type": "string"}}})
ROLES = ("system", "user", "assistant", "tool")
CHAT = [
    Message("system", "be brief"),
    Message("user", "hello 1+2"),
    Message(
        "assistant",
        "",
        (ToolCall("calculator", {"input": "1+2"}), ToolCall("calculator", {"input": "2"})),
    ),
    Message("tool", "3", name="calculator"),
    Message("tool", "hello", name="calculator"),
    Message("assistant", "3"),
    Message("user", "be brief"),  # the same words as the first message
    Message("assistant", "hello"),
]


@pytest.fixture(scope="module")
def characters(tmp_path_factory):
    return character_renderer(tmp_path_factory.mktemp("characters"), ALPHABET + '{}":_')


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return Renderer(write_qwen_like(tmp_path_factory.mktemp("qwen")))


def with_template(folder, template: str) -> Renderer:
    write_qwen_like(folder)
    (folder / "chat_template.jinja").write_text(template)
    return Renderer(folder)


def runs(ids, trained) -> list[list[int]]:
    """Return the runs of trained tokens. Adjoining runs are one."""
    groups = itertools.groupby(zip(ids, trained, strict=True), lambda token: bool(token[1]))
    return [[int(i) for i, _ in run] for is_trained, run in groups if is_trained]


def trained_text(renderer, chat, roles, tools=()) -> list[str]:
    return [renderer.decode(run) for run in runs(*renderer.example(chat, tools, roles))]


CALLED = "<|call|>calculator 1+2<|end_call|><|call|>calculator 2<|end_call|><|end|>"
IN_CHARACTERS = {
    "system": ["be brief<|end|>"],
    "user": ["hello 1+2<|end|>", "be brief<|end|>"],
    "assistant": [CALLED, "3<|end|>", "hello<|end|>"],
    "tool": ["3<|end|>", "hello<|end|>"],
}
CALLS = [
    f'<tool_call>\n{{"name": "calculator", "arguments": {{"input": "{text}"}}}}\n</tool_call>'
    for text in ("1+2", "2")
]
IN_QWEN = {
    "system": ["be brief<|im_end|>"],
    "user": ["hello 1+2<|im_end|>", "be brief<|im_end|>"],
    "assistant": ["".join(CALLS) + "<|im_end|>", "3<|im_end|>", "hello<|im_end|>"],
    # Both results stand in one turn: it ends behind the second.
    "tool": ["3", "hello\n</tool_response><|im_end|>"],
}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_alone_is_trained_with_its_ends_of_turn_and_without_its_headers(
    characters, qwen, role
):
    assert trained_text(characters, CHAT, (role,)) == IN_CHARACTERS[role]
    assert trained_text(qwen, CHAT, (role,)) == IN_QWEN[role]


@pytest.mark.parametrize("tools", [(), (TOOL,)], ids=["no tools", "tools"])
def test_masks_of_roles_add_up_and_change_no_token(qwen, tools):
    expected, assistant = qwen.example(CHAT, tools)
    alone = {}
    for role in ROLES:
        ids, alone[role] = qwen.example(CHAT, tools, (role,))
        assert ids.tolist() == expected.tolist()
    assert alone["assistant"].tolist() == assistant.tolist()
    assert sum(mask.astype(int) for mask in alone.values()).max() == 1, "a token is of one message"
    for roles in itertools.combinations(ROLES, 2):
        assert (
            qwen.example(CHAT, tools, roles)[1].tolist()
            == (alone[roles[0]] | alone[roles[1]]).tolist()
        )


def test_a_template_that_trims_and_has_no_end_of_turn_for_others_trains_their_content_alone(
    tmp_path,
):
    renderer = with_template(
        tmp_path,
        "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content | trim }}<|im_end|>"
        "{% else %}[INST] {{ m.content | trim }} [/INST]{% endif %}{% endfor %}",
    )
    chat = [
        Message("user", "  hello "),
        Message("assistant", "3"),
        Message("user", "4\n"),
        Message("assistant", "5"),
    ]
    # The tokenizer has words of letters, and bytes for the rest: no token crosses a content's edge.
    assert trained_text(renderer, chat, ("user",)) == ["hello", "4"]
    assert trained_text(renderer, chat, ("assistant",)) == [" 3<|im_end|>", " 5<|im_end|>"]


def test_a_token_that_lies_partly_in_trained_text_is_trained(tmp_path):
    renderer = with_template(
        tmp_path,
        "{% for m in messages %}<|im_start|>{{ m.role }} he{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant he{% endif %}",
    )
    chat = [Message("user", "llo"), Message("assistant", "3")]
    assert trained_text(renderer, chat, ("user",)) == ["hello<|im_end|>"], (
        "header and content share a token: `hello` is one"
    )


def test_a_message_that_the_template_does_not_write_by_itself_is_named(tmp_path):
    renderer = with_template(
        tmp_path,
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}"
        "{% if m.role == 'user' %} {{ messages[0].content }}{% endif %}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}",
    )
    chat = [Message("system", "x"), Message("user", "y"), Message("assistant", "z")]
    assert trained_text(renderer, chat, ("assistant",)) == ["z<|im_end|>"]
    with pytest.raises(
        OrreryError,
        match=r"mixes message 0 \(system\) with other text.*Leave 'system' out of",
    ):
        renderer.example(chat, (), ("system",))
    renderer = with_template(
        tmp_path,
        "{% for m in messages %}<|im_start|>{{ m.role }} "
        "{{ m.content | length if m.role == 'user' else m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}",
    )
    chat = [
        Message("user", "x"),
        Message("assistant", "z"),
        Message("user", "y"),
        Message("assistant", "z"),
    ]
    with pytest.raises(OrreryError, match=r"mixes message 0 \(user\) with other text"):
        renderer.example(chat, (), ("user",))


def test_a_chat_may_end_with_any_trained_role_and_must_have_something_to_train(characters):
    asked, answered = Message("user", "1+2"), Message("assistant", "3")
    assert trained_text(characters, [asked], ("user",)) == ["1+2<|end|>"]
    ids, _ = characters.example([asked, answered, asked], (), ("user", "assistant"))
    assert characters.decode(ids) == "<|user|>1+2<|end|><|assistant|>3<|end|><|user|>1+2<|end|>", (
        "nobody is asked to answer"
    )
    with pytest.raises(
        OrreryError,
        match=r"assistant or tool message and must not begin with an assistant message",
    ):
        characters.example([asked, answered, asked], (), ("tool",))
    with pytest.raises(OrreryError, match=r"no message has a role in trained_roles \['tool'\]"):
        characters.example([asked, answered], (), ("tool",))


def test_the_chats_first_token_is_never_trained(tmp_path):
    renderer = with_template(
        tmp_path, "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    _, trained = renderer.example(
        [Message("user", "ab"), Message("assistant", "c")], (), ("user", "assistant")
    )
    assert trained.tolist() == [False, True, True, True, True]


def test_transformers_marks_the_same_tokens_as_the_assistants(tmp_path):
    transformers = pytest.importorskip("transformers")
    renderer = Renderer(write_qwen_like(tmp_path))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    template = (tmp_path / "chat_template.jinja").read_text()
    plain = [
        {"role": m.role, "content": m.content}
        for m in CHAT
        if m.role != "tool" and not m.tool_calls
    ]
    marked = theirs.apply_chat_template(
        plain,
        chat_template=template,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ids, trained = renderer.example([Message(m["role"], m["content"]) for m in plain])
    header, newline = renderer.encode("<|im_start|>assistant\n"), renderer.encode("\n")
    assert marked["input_ids"] == ids.tolist() + newline
    # Their block of a turn holds its header and the end of its line too.
    assert runs(marked["input_ids"], marked["assistant_masks"]) == [
        header + run + newline for run in runs(ids, trained)
    ]
