"""Chats as tokens: the character format, and any Hugging Face folder."""

import itertools
import json

import msgspec
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from task_chats import (
    ALPHABET,
    character_model,
    character_renderer,
    completion,
    fastest_s,
    task_use,
    write_qwen_like,
)

from orrery.manifest.errors import OrreryError
from orrery.manifest.publish import sha256_of
from orrery.tasks import Message, Tool, ToolCall, make
from orrery.tasks.chat import (
    END_ID,
    PAD_ID,
    SPECIALS,
    Renderer,
    take_calls,
    vocab_size,
    write_tokenizer,
)

TOOL = Tool("calculator", "adds", {"type": "object", "properties": {"input": {"type": "string"}}})


@pytest.fixture(scope="module")
def characters(tmp_path_factory):
    return character_renderer(tmp_path_factory.mktemp("characters"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return Renderer(write_qwen_like(tmp_path_factory.mktemp("qwen")))


texts = st.text(ALPHABET, max_size=12)
calls = st.builds(
    ToolCall,
    st.sampled_from(["calculator", "search"]),
    st.fixed_dictionaries({"input": st.text("0123456789+*", max_size=6)}),
)
spoken = st.one_of(
    st.builds(Message, st.just("assistant"), texts),
    st.builds(Message, st.just("assistant"), st.just(""), st.tuples(calls)),
)
heard = st.builds(Message, st.sampled_from(["user", "tool"]), texts)
chats = st.tuples(
    st.lists(st.builds(Message, st.sampled_from(["system", "user"]), texts), min_size=1, max_size=2)
).flatmap(
    lambda first: st.lists(
        st.tuples(spoken, st.lists(heard, min_size=1, max_size=2)), min_size=1, max_size=3
    ).map(lambda turns: (first[0], turns))
)


@given(chats)
@settings(max_examples=60, deadline=None)
def test_prompt_sampled_and_next_turn_are_the_whole_chat(characters, chat):
    first, turns = chat
    ids, messages = characters.prompt(first), list(first)
    for said, replies in turns:
        ids = ids + completion(characters, said) + characters.next_turn(replies)
        messages += [said, *replies]
        assert ids == characters.prompt(messages)


@given(chats)
@settings(max_examples=60, deadline=None)
def test_an_example_trains_exactly_what_the_assistant_sampled(characters, chat):
    first, turns = chat
    messages = [*first, *itertools.chain.from_iterable([said, *replies] for said, replies in turns)]
    while messages[-1].role != "assistant":
        messages.pop()
    ids, trained = characters.example(messages)
    assert (
        ids.dtype == np.int32
        and trained.dtype == bool
        and len(ids) == len(trained)
        and not trained[0]
    )
    assert ids[trained].tolist() == [
        i for m in messages if m.role == "assistant" for i in completion(characters, m)
    ]
    assert characters.decode(ids) + "<|assistant|>" == characters.decode(
        characters.prompt(messages)
    )


@given(spoken)
@settings(max_examples=60, deadline=None)
def test_what_is_said_is_understood(characters, message):
    assert characters.parse(completion(characters, message)) == message


@given(st.lists(st.integers(0, vocab_size(ALPHABET) - 1), max_size=20))
@settings(max_examples=100, deadline=None)
def test_any_sampled_tokens_parse_and_stay_verbatim(characters, sampled):
    message = characters.parse(sampled)
    assert message.role == "assistant"
    if not message.tool_calls and sampled[-1:] != [END_ID]:
        assert characters.tokenizer.encode(message.content, add_special_tokens=False).ids == sampled


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("<|call|>calculator 1+2<|end_call|>", [("calculator", {"input": "1+2"})]),
        (
            "<|call|>a 1<|end_call|><|call|>b 2<|end_call|>",
            [("a", {"input": "1"}), ("b", {"input": "2"})],
        ),
        ("<|call|>calculator<|end_call|>", [("calculator", {"input": ""})]),
        ("<|call|> 1+2<|end_call|>", []),
        ("<|call|>calculator 1+2", []),
        ("calculator 1+2<|end_call|>", []),
    ],
)
def test_only_well_formed_calls_are_calls(characters, text, calls):
    message = characters.parse([*characters.encode(text), END_ID])
    assert [(call.name, call.arguments) for call in message.tool_calls] == calls
    assert message.content == ("" if calls else text)


def test_arguments_beyond_one_text_are_json(tmp_path):
    renderer = character_renderer(tmp_path, ALPHABET + '{}":\\')
    for arguments in ({"x": 1, "y": "b"}, {"input": 3}):
        message = Message("assistant", "", (ToolCall("add", arguments),))
        assert renderer.parse(completion(renderer, message)) == message
    for malformed in ('{"x":', '{"input":"\\ud800"}'):
        message = renderer.parse(renderer.encode(f"<|call|>add {malformed}<|end_call|>"))
        assert message.tool_calls == () and msgspec.json.encode(message)


def test_ids_are_the_specials_and_then_the_alphabet(characters):
    assert [characters.tokenizer.token_to_id(token) for token in (*SPECIALS, *ALPHABET)] == list(
        range(vocab_size(ALPHABET))
    )
    assert (PAD_ID, END_ID, characters.stop_token_ids) == (0, 1, [1])
    assert vocab_size("abc") == 11


def test_a_strange_character_is_named(characters):
    with pytest.raises(OrreryError, match=r"model.tokenizer.alphabet has no 'Éé', which is in"):
        characters.prompt([Message("user", "caféÉ")])


def test_a_tokenizer_that_was_saved_with_padding_and_truncation_does_neither(tmp_path, qwen):
    write_qwen_like(tmp_path)
    saved = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    saved.enable_padding(pad_token="<|endoftext|>")
    saved.enable_truncation(4)
    saved.save(str(tmp_path / "tokenizer.json"))
    chats = [[Message("user", text), Message("assistant", "yes")] for text in ("hello", "no " * 9)]
    for chat in chats:
        for found, expected in zip(
            Renderer(tmp_path).example(chat), qwen.example(chat), strict=True
        ):
            assert found.tolist() == expected.tolist()


def test_transformers_reads_the_folder_as_we_do(tmp_path):
    transformers = pytest.importorskip("transformers")
    renderer = character_renderer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    chat = make(task_use("calculator")).demonstration(0)
    ids, _ = renderer.example(chat)
    plain = [
        {
            "role": m.role,
            "content": m.content,
            "tool_calls": [
                {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in m.tool_calls
            ],
        }
        for m in chat
    ]
    assert theirs.apply_chat_template(plain, tokenize=True, return_dict=False) == ids.tolist()
    assert theirs.decode(ids) == renderer.decode(ids)
    assert (len(theirs), theirs.eos_token_id, theirs.pad_token_id) == (
        vocab_size(ALPHABET),
        END_ID,
        PAD_ID,
    )


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (character_model("abca"), "model.tokenizer.alphabet: it contains 'a' twice"),
        (
            character_model("abc", vocab_size=10),
            r"model.vocab_size: 10 does not fit the tokenizer; 8 specials \+ 3 characters = 11",
        ),
        (
            character_model(
                tokenizer={"kind": "pretrained", "path": "/nowhere", "sha256": "0" * 64}
            ),
            "there is no tokenizer.json in '/nowhere'",
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_is_refused(tmp_path, model, sentence):
    with pytest.raises(OrreryError, match=sentence):
        write_tokenizer(model, tmp_path)


def test_a_text_with_a_token_beyond_the_models_vocabulary_is_refused_and_others_are_not(tmp_path):
    write_tokenizer(character_model("abc"), tmp_path)
    renderer = Renderer(tmp_path, vocab_size=10)
    assert renderer.prompt([Message("user", "ab")]) == Renderer(tmp_path).prompt(
        [Message("user", "ab")]
    )
    for refused in (
        lambda: renderer.prompt([Message("user", "abc")]),
        lambda: renderer.next_turn([Message("user", "c")]),
    ):
        with pytest.raises(
            OrreryError,
            match=r"model\.vocab_size 10: the tokenizer gives 'c' the id 10, "
            "and the model has no such row",
        ):
            refused()
    with pytest.raises(OrreryError, match=r"^line 3: model\.vocab_size 10"):
        renderer.examples(
            [("line 3", [Message("user", "a"), Message("assistant", "c")], ())], ("assistant",)
        )


def test_a_pretrained_tokenizer_is_copied_only_when_its_digest_matches(tmp_path):
    source = write_qwen_like(tmp_path / "source")
    digest = sha256_of(list(source.iterdir()))
    write_tokenizer(
        character_model(tokenizer={"kind": "pretrained", "path": str(source), "sha256": digest}),
        tmp_path / "copy",
    )
    assert {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()} == {
        p.name: p.read_bytes() for p in source.iterdir()
    }
    assert Renderer(tmp_path / "copy").prompt([Message("user", "hello")]) == Renderer(
        source
    ).prompt([Message("user", "hello")])
    with pytest.raises(
        OrreryError, match=rf"model.tokenizer.sha256 0{{64}}: .* of .* have {digest}. Write this"
    ):
        write_tokenizer(
            character_model(
                tokenizer={"kind": "pretrained", "path": str(source), "sha256": "0" * 64}
            ),
            tmp_path / "not",
        )
    assert not (tmp_path / "not" / "tokenizer.json").exists()


def test_variables_of_the_chat_template_are_in_the_written_folder(tmp_path):
    """Renderer, engines, exports and transformers read this folder, so they use one template."""
    source = write_qwen_like(tmp_path / "source")
    template = source / "chat_template.jinja"
    thinking = "{%- if add_generation_prompt and enable_thinking is false %}no thoughts{% endif %}"
    template.write_text(template.read_text() + thinking)
    tokenizer = {
        "kind": "pretrained",
        "path": str(source),
        "sha256": sha256_of(sorted(source.iterdir())),
    }

    def written(**changes):
        model = character_model(tokenizer=tokenizer | changes)
        write_tokenizer(model, tmp_path / "copy")
        return model

    ask = [Message("user", "hello")]
    plain = Renderer(source)
    assert "chat_template_kwargs" not in written().model_dump_json()
    assert Renderer(tmp_path / "copy").prompt(ask) == plain.prompt(ask)
    model = written(chat_template_kwargs={"enable_thinking": False})
    assert '"chat_template_kwargs":{"enable_thinking":false}' in model.model_dump_json()
    off = Renderer(tmp_path / "copy")
    assert off.decode(off.prompt(ask)) == plain.decode(plain.prompt(ask)) + "no thoughts"
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "copy" / "tokenizer.json"),
        chat_template=(tmp_path / "copy" / "chat_template.jinja").read_text(),
    )
    chat = [{"role": "user", "content": "hello"}]
    for chosen, ending in (({}, "no thoughts"), ({"enable_thinking": True}, "assistant\n")):
        said = theirs.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True, **chosen
        )
        assert said.endswith(ending)
    with pytest.raises(OrreryError, match=r"has no variable 'thinking' to set. .* enable_thinking"):
        written(chat_template_kwargs={"thinking": False})


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"],
)
def test_another_template_or_stop_token_is_another_tokenizer(name, tmp_path):
    source = write_qwen_like(tmp_path / "source")
    model = character_model(
        tokenizer={
            "kind": "pretrained",
            "path": str(source),
            "sha256": sha256_of(list(source.iterdir())),
        }
    )
    file = source / name
    file.write_text(file.read_text() + "\n")
    with pytest.raises(
        OrreryError,
        match=rf"sha256 .*{name}.* have {sha256_of(list(source.iterdir()))}. Write",
    ):
        write_tokenizer(model, tmp_path / "copy")


# A pretrained format


def test_a_pretrained_format_renders_turns_around_what_was_sampled(qwen):
    first = [Message("system", "be brief"), Message("user", "1+2?")]
    said = Message("assistant", "", (ToolCall("calculator", {"input": "1+2"}),))
    replies = [Message("tool", "3", name="calculator"), Message("tool", "4", name="calculator")]
    prompt = qwen.prompt(first, [TOOL])
    assert qwen.decode(prompt).startswith("<|im_start|>system\nTools: [{")
    ids = prompt + completion(qwen, said) + qwen.next_turn(replies)
    assert ids == qwen.prompt([*first, said, *replies], [TOOL])
    assert qwen.parse(completion(qwen, said)) == said


def test_tokens_that_encoding_would_merge_stay_apart(qwen):
    sampled = [qwen.tokenizer.token_to_id(letter) for letter in "hello"] + qwen.stop_token_ids[:1]
    whole = qwen.prompt([Message("user", "x")]) + sampled + qwen.next_turn([Message("user", "y")])
    again = qwen.prompt([Message("user", "x"), Message("assistant", "hello"), Message("user", "y")])
    assert qwen.decode(whole) == qwen.decode(again)
    assert len(whole) == len(again) + 4


def test_a_turn_cut_by_its_length_is_closed_first(qwen):
    replies = [Message("user", "y")]
    assert qwen.next_turn(replies, closed=False) == [
        qwen.stop_token_ids[0],
        *qwen.next_turn(replies),
    ]


def test_both_stop_tokens_of_a_pretrained_folder_stop(qwen):
    assert [qwen.tokenizer.id_to_token(i) for i in qwen.stop_token_ids] == [
        "<|im_end|>",
        "<|endoftext|>",
    ]
    for stop in qwen.stop_token_ids:
        assert qwen.parse([*qwen.encode("hello"), stop]) == Message("assistant", "hello")


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{}</tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        "<tool_call>{",
        '<tool_call>{"name": "search", "arguments": {"input": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    ],
)
def test_malformed_json_calls_are_text(qwen, text):
    assert qwen.parse(qwen.encode(text)) == Message("assistant", text)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (
            "a<|call|>x 1<|end_call|>b<|call|>y <|call|> 2<|end_call|> <|call|>",
            "ab <|call|>",
            ["1", "<|call|> 2"],
        ),
        (
            "<|end_call|><|call|> 1<|end_call|>\n<|call|>x 2\n3<|end_call|> ",
            "<|end_call|><|call|> 1<|end_call|>",
            ["2\n3"],
        ),
    ],
)
def test_a_call_begins_at_the_first_marker_ends_at_the_next_end_and_leaves_the_rest_as_text(
    text, content, calls
):
    rest, found = take_calls(text, characters=True)
    assert (rest.strip(), [call.arguments["input"] for call in found]) == (content, calls)


@pytest.mark.parametrize("opens", ["<|call|>", "<tool_call>"])
def test_openings_without_an_end_cost_time_in_proportion(opens):
    few, many = (
        fastest_s(lambda n=n: take_calls(opens * n, opens == "<|call|>")) for n in (500, 4000)
    )
    # Eight times as many; each with a look at the whole rest would be 64 times the time.
    assert many < 25 * few


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "which is no stop token"),
        (
            "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}<|im_end|>"
            "{% endif %}{% endfor %}",
            "drops the assistant's messages",
        ),
        (None, "has no chat template"),
    ],
)
def test_a_format_that_cannot_be_trained_on_is_refused(tmp_path, template, sentence):
    folder = write_qwen_like(tmp_path)
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    with pytest.raises(OrreryError, match=sentence):
        Renderer(folder)


def test_tools_need_a_format_with_calls(tmp_path):
    folder = write_qwen_like(tmp_path)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    renderer = Renderer(folder)
    assert (
        renderer.decode(renderer.prompt([Message("user", "x")]))
        == "<|im_start|>user x<|im_end|><|im_start|>assistant "
    )
    with pytest.raises(OrreryError, match="no tool calls that we can parse"):
        renderer.prompt([Message("user", "x")], [TOOL])


def test_a_template_that_asks_for_the_date_gets_the_same_one_every_day(tmp_path):
    folder = write_qwen_like(tmp_path)
    template = folder / "chat_template.jinja"
    template.write_text("{{- strftime_now('%d %b %Y, %H:%M') + '\\n' }}" + template.read_text())
    renderer = Renderer(folder)
    assert renderer.decode(renderer.prompt([Message("user", "x")])).startswith(
        "26 Jul 2024, 00:00\n<|im_start|>user\nx"
    )


@pytest.mark.parametrize("roles", [["user"], ["assistant"], ["user", "assistant", "user"]])
def test_an_example_ends_with_the_assistant(characters, roles):
    with pytest.raises(OrreryError, match="an example must end with an assistant message"):
        characters.example([Message(role, "x") for role in roles])


def test_the_room_needs_no_torch_and_no_transformers():
    import subprocess
    import sys

    code = (
        "import sys, orrery.tasks.chat, orrery.tasks.check; "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
