"""Convert chats to token ids with a Hugging Face tokenizer folder, and write such folders.

- A chat has the same tokens in SFT and RL.
- The character tokenizer's format is `<|user|>abc<|end|><|assistant|>cba<|end|>`. A tool call is
  `<|call|>name input<|end_call|>`. A tool result is a `<|tool|>` turn.
- Pretrained models must use the Hermes / Qwen syntax for tool calls,
  `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
"""

import datetime
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
import msgspec
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from orrery.manifest.errors import OrreryError
from orrery.manifest.json_file import read_object
from orrery.manifest.publish import sha256_of
from orrery.manifest.schema import Model
from orrery.tasks.task import Message, Role, Tool, ToolCall

PAD, END = "<|pad|>", "<|end|>"
CALL, END_CALL = "<|call|>", "<|end_call|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
SPECIALS = (PAD, END, *ROLES, CALL, END_CALL)  # token ids 0 to 7, before the alphabet
PAD_ID, END_ID = 0, 1

TODAY = datetime.datetime(2024, 7, 26)  # the date in chat templates (Llama's default)

CHARACTER_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message.role + '|>' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{%- set arguments = call.function.arguments -%}
{{- '<|call|>' + call.function.name + ' ' -}}
{{- arguments.input if arguments.keys() | list == ['input'] \
and arguments.input is string else arguments | tojson -}}
{{- '<|end_call|>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

FILES = (
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
SMOLLM2 = "make weights/SmolLM2-135M-Instruct/config.json"
FETCH = f"Type `orrery fetch model NAME`, or for SmolLM2 `{SMOLLM2}`"
# template variables that the renderer sets
GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}
GIVEN |= {"bos_token", "eos_token", "pad_token", "unk_token", "raise_exception", "strftime_now"}

PLACEHOLDER = "\N{BLACK FLORETTE}placeholder\N{BLACK FLORETTE}"
CONTENT = "\N{BLACK FLORETTE}content\N{BLACK FLORETTE}"
ASK = {"role": "user", "content": "?"}
BEHIND = [ASK, {"role": "assistant", "content": PLACEHOLDER}]
EVERYTHING = (0, -1)  # marks all tokens, even tokens without characters
Example = tuple[np.ndarray, np.ndarray]


class _Part(NamedTuple):
    text: str
    trained: list[tuple[int, int]]


class Renderer:
    """Render and parse chats. Encoding raises OrreryError for token ids ≥ `vocab_size`."""

    def __init__(self, folder: Path, vocab_size: int | None = None) -> None:
        folder = Path(folder)
        try:
            config = read_object(folder / "tokenizer_config.json", "copy the model's folder again")
            self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            self.tokenizer.no_truncation()  # tokenizer.json may set a truncation
            self.tokenizer.no_padding()
        except Exception as error:
            raise OrreryError(
                f"tokenizer: cannot read {folder}: {error}. "
                "It needs tokenizer.json and tokenizer_config.json"
            ) from error
        source = template_source(config, folder)
        self._template = template_environment().from_string(source)
        self._globals = {
            name: _content(config[name])
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if config.get(name)
        }
        self._unknown_id = self._token_id(config.get("unk_token"))
        self._is_characters = CALL in source
        self._has_calls = self._is_characters or "<tool_call>" in source
        self._vocab_size = vocab_size
        self.stop_token_ids = self._stop_token_ids(folder)
        self._end = self._end_of_turn()
        self._known = set(self.tokenizer.get_vocab()) if self._is_characters else None

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        chat = [_hugging_face(message) for message in messages]
        return self.encode(self._render(chat, tools, add_generation_prompt=True))

    def next_turn(self, messages: Sequence[Message], closed: bool = True) -> list[int]:
        """Return the token ids of `messages` and the generation prompt.

        If not `closed`, begin with the end-of-turn token that the previous turn lacks.
        """
        chat = [*BEHIND, *(_hugging_face(message) for message in messages)]
        whole = self._render(chat, add_generation_prompt=True)
        opening = whole[self._begin(whole) :]
        return self.encode(opening if closed else self._end + opening)

    def _assistant_text(self, message: Message) -> str:
        opened = self._render([ASK], add_generation_prompt=True)
        whole = self._render([ASK, _hugging_face(message)])
        if not whole.startswith(opened) or self._end not in whole[len(opened) :]:
            raise OrreryError(
                "tokenizer: its chat template does not begin the assistant's turns with the "
                "generation prompt. Use another model"
            )
        text = whole[len(opened) :]
        return text[: text.rindex(self._end) + len(self._end)]

    def example(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        trained_roles: Sequence[Role] = ("assistant",),
    ) -> Example:
        """Return a finished chat as (token ids i32 [T], trained bool [T]).

        Messages of `trained_roles` are trained: all tokens of assistant turns, and the content and
        end-of-turn token of other messages. The first token is untrained.

        Raise OrreryError if the order of roles is invalid, no message is trained, or the template
        mixes a trained message with other text.
        """
        parts = self._parts(messages, tools, trained_roles)
        return self._joined(parts, self._encode_batch([part.text for part in parts]))

    def examples(
        self,
        chats: Sequence[tuple[str, Sequence[Message], Sequence[Tool]]],
        trained_roles: Sequence[Role],
    ) -> list[Example]:
        """Return the `example` of each (place, messages, tools), encoded on all CPU cores.

        `place` names the chat in errors.
        """
        parts = []
        for place, messages, tools in chats:
            with _naming(place):
                parts.append(self._parts(messages, tools, trained_roles))
        encodings = iter(self._encode_batch([part.text for chat in parts for part in chat]))
        made = []
        for (place, _, _), chat in zip(chats, parts, strict=True):
            with _naming(place):
                made.append(self._joined(chat, list(islice(encodings, len(chat)))))
        return made

    def parse(self, token_ids: Sequence[int]) -> Message:
        """Return the sampled message. Malformed calls stay in its text."""
        ids = list(token_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        calls: list[ToolCall] = []
        if self._has_calls:
            text, calls = take_calls(text, self._is_characters)
        return Message("assistant", text.strip() if calls else text, tuple(calls))

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        """Return token ids. Special tokens in `text` are recognized."""
        return self._known_ids(text, self.tokenizer.encode(text, add_special_tokens=False))

    def _encode_batch(self, texts: list[str]) -> list[tokenizers.Encoding]:
        return self.tokenizer.encode_batch(texts, add_special_tokens=False)

    def _known_ids(self, text: str, encoding: tokenizers.Encoding) -> list[int]:
        ids = encoding.ids
        if self._known is not None and self._unknown_id in ids:
            characters = set(re.sub(r"<\|\w+\|>", "", text)) - self._known
            strange = "".join(sorted(characters))
            raise OrreryError(
                f"model.tokenizer.alphabet has no {strange!r}, which is in {text!r}. "
                "Add these characters to the run's alphabet, or change the text"
            )
        if self._vocab_size is not None and ids and (most := max(ids)) >= self._vocab_size:
            token = self.tokenizer.id_to_token(most)
            raise OrreryError(
                f"model.vocab_size {self._vocab_size}: the tokenizer gives {token!r} the id "
                f"{most}, and the model has no such row. Set model.tokenizer to the model's own, "
                "or leave that text out"
            )
        return ids

    def _parts(
        self, messages: Sequence[Message], tools: Sequence[Tool], trained_roles: Sequence[Role]
    ) -> list[_Part]:
        roles = [message.role for message in messages]
        turns = [i for i, role in enumerate(roles) if role == "assistant"]
        last = ["assistant", *(role for role in trained_roles if role != "assistant")]
        if not roles or roles[0] == "assistant" or roles[-1] not in last:
            raise OrreryError(
                f"chat of roles {roles}: an example must end with an {' or '.join(last)} message "
                "and must not begin with an assistant message"
            )
        of_assistant = [EVERYTHING] if "assistant" in trained_roles else []
        first = messages[: turns[0] if turns else None]
        parts = [self._heard(first, 0, bool(turns), tools, trained_roles)]
        for turn, following in zip(turns, [*turns[1:], None][: len(turns)], strict=True):
            parts.append(_Part(self._assistant_text(messages[turn]), of_assistant))
            heard = messages[turn + 1 : following]
            if turn + 1 < len(messages):
                is_answered = following is not None
                parts.append(self._heard(heard, turn + 1, is_answered, (), trained_roles))
        if not any(part.trained for part in parts):
            raise OrreryError(
                f"chat of roles {roles}: no message has a role in trained_roles "
                f"{list(trained_roles)}. Leave the chat out"
            )
        return parts

    def _joined(self, parts: Sequence[_Part], encodings: Sequence[tokenizers.Encoding]) -> Example:
        ids: list[int] = []
        masks = []
        for part, encoding in zip(parts, encodings, strict=True):
            ids += self._known_ids(part.text, encoding)
            mask = np.zeros(len(encoding.ids), dtype=bool)
            if part.trained == [EVERYTHING]:
                mask[:] = True
            elif part.trained:
                starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
                for begin, end in part.trained:
                    mask |= (starts < end) & (ends > begin)
            masks.append(mask)
        trained = np.concatenate(masks)
        trained[:1] = False  # the model cannot predict the first token
        return np.array(ids, dtype=np.int32), trained

    def _heard(
        self,
        messages: Sequence[Message],
        first: int,
        is_answered: bool,
        tools: Sequence[Tool],
        trained_roles: Sequence[Role],
    ) -> _Part:
        before = [] if first == 0 else BEHIND
        chat = [*before, *(_hugging_face(message) for message in messages)]
        whole = self._render(chat, tools, is_answered)
        begin = self._begin(whole) if before else 0
        trained = []
        if any(message.role in trained_roles for message in messages):
            found = [
                self._content_in(whole, chat, len(before) + i, first + i, tools, is_answered)
                for i in range(len(messages))
            ]
            following = [start for start, _ in found[1:]] + [len(whole)]
            for message, (start, end), until in zip(messages, found, following, strict=True):
                if message.role in trained_roles:
                    at = whole.find(self._end, end, until)
                    stop = end if at < 0 else at + len(self._end)
                    trained.append((start - begin, stop - begin))
        return _Part(whole[begin:], trained)

    def _content_in(
        self,
        whole: str,
        chat: list[dict[str, Any]],
        at: int,
        number: int,
        tools: Sequence[Tool],
        is_answered: bool,
    ) -> tuple[int, int]:
        role = chat[at]["role"]
        marked_chat = [*chat[:at], chat[at] | {"content": CONTENT}, *chat[at + 1 :]]
        marked = self._render(marked_chat, tools, is_answered)
        before, _, after = marked.partition(CONTENT)
        is_alone = marked.count(CONTENT) == 1 and len(before) + len(after) <= len(whole)
        if not is_alone or not whole.startswith(before) or not whole.endswith(after):
            raise OrreryError(
                f"tokenizer: its chat template mixes message {number} ({role}) with other text, so "
                "the message's tokens are unknown. "
                f"Leave {role!r} out of stages.sft.trained_roles"
            )
        return len(before), len(whole) - len(after)

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = False,
    ) -> str:
        functions = [{"type": "function", "function": msgspec.to_builtins(tool)} for tool in tools]
        if functions and not self._has_calls:
            raise OrreryError(
                "tokenizer: its chat template has no tool calls that we can parse. "
                "Use a task without tools or another model"
            )
        try:
            return self._template.render(
                messages=messages,
                tools=functions or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._globals,
            )
        except jinja2.TemplateError as error:
            roles = [message["role"] for message in messages]
            raise OrreryError(
                f"tokenizer: its chat template refuses the roles {roles}: {error}"
            ) from error

    def _begin(self, whole: str) -> int:
        after = whole.rindex(PLACEHOLDER) + len(PLACEHOLDER)
        return whole.index(self._end, after) + len(self._end)

    def _end_of_turn(self) -> str:
        whole = self._render(BEHIND)
        if PLACEHOLDER not in whole:
            raise OrreryError(
                "tokenizer: its chat template drops the assistant's messages. Use another model"
            )
        after = whole.rpartition(PLACEHOLDER)[2]
        tokens = [self.tokenizer.id_to_token(number) for number in self.stop_token_ids]
        ends = [(after.index(token), token) for token in tokens if token and token in after]
        if not ends:
            raise OrreryError(
                "tokenizer: in its chat template the assistant's turn ends with "
                f"{after!r}, which is no stop token. Set eos_token to the turn's last token"
            )
        return min(ends)[1]

    def _stop_token_ids(self, folder: Path) -> list[int]:
        stops = [self._token_id(self._globals.get("eos_token"))]
        path = folder / "generation_config.json"
        if path.is_file():
            more = read_object(path, "copy the model's folder again").get("eos_token_id")
            stops += more if isinstance(more, list) else [more]
            if odd := [stop for stop in stops if not isinstance(stop, int | None)]:
                raise OrreryError(
                    f"{path}: eos_token_id {odd[0]!r} is neither a token id nor a list of them. "
                    "Copy the model's folder again"
                )
        found = list(dict.fromkeys(stop for stop in stops if stop is not None))
        if not found:
            raise OrreryError(f"tokenizer: {folder} has no eos_token, so no turn would end. Set it")
        return found

    def _token_id(self, token: Any) -> int | None:
        return None if token is None else self.tokenizer.token_to_id(_content(token))


def _hugging_face(message: Message) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        entry["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.name is not None:
        entry["name"] = message.name
    return entry


@contextmanager
def _naming(place: str) -> Iterator[None]:
    try:
        yield
    except OrreryError as error:
        raise OrreryError(f"{place}: {error}") from error


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else token


def vocab_size(alphabet: str) -> int:
    """Return the number of token ids. jsonnet/lib/run.libsonnet repeats this formula."""
    return len(SPECIALS) + len(alphabet)


def write_tokenizer(model: Model, folder: Path) -> None:
    """Write `model.tokenizer` into `folder` as Hugging Face files.

    `chat_template_kwargs` become the template's defaults, so trainer, engines and exported models
    make equal prompts. Raise OrreryError if the template lacks such a variable, or a pretrained
    tokenizer differs from its `sha256`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if model.tokenizer.kind == "characters":
        _write_character_tokenizer(model.tokenizer.alphabet, model, folder)
        return
    source = Path(model.tokenizer.path)
    if not (source / "tokenizer.json").is_file():
        raise OrreryError(
            f"model.tokenizer.path: there is no tokenizer.json in {str(source)!r}. {FETCH}, or "
            "name the model's folder"
        )
    files = [source / name for name in FILES if (source / name).is_file()]
    if (found := sha256_of(files)) != (expected := model.tokenizer.sha256):
        names = " ".join(file.name for file in files)
        raise OrreryError(
            f"model.tokenizer.sha256 {expected}: {names} of {source} have {found}. Write this "
            "digest if these files are right, or fetch the manifest's files again"
        )
    for file in files:
        shutil.copyfile(file, folder / file.name)
    if variables := model.tokenizer.chat_template_kwargs:
        config = read_object(folder / "tokenizer_config.json", "fetch the model again")
        text = _with_defaults(template_source(config, folder), variables, source)
        (folder / "chat_template.jinja").write_text(text)


def _with_defaults(template: str, variables: Mapping[str, Any], source: Path) -> str:
    known = jinja2.meta.find_undeclared_variables(template_environment().parse(template))
    begin = ""
    for name, value in variables.items():
        if name not in known - GIVEN:
            has = ", ".join(sorted(known - GIVEN)) or "none"
            raise OrreryError(
                f"model.tokenizer.chat_template_kwargs: the chat template of {source} has no "
                f"variable {name!r} to set. Choose from {has}"
            )
        literal = "none" if value is None else json.dumps(value)
        begin += f"{{% if {name} is not defined %}}{{% set {name} = {literal} %}}{{% endif +%}}"
    return begin + template


def _write_character_tokenizer(alphabet: str, model: Model, folder: Path) -> None:
    if len(set(alphabet)) != len(alphabet):
        twice = "".join(sorted(c for c in set(alphabet) if alphabet.count(c) > 1))
        raise OrreryError(f"model.tokenizer.alphabet: it contains {twice!r} twice. Remove one")
    if model.vocab_size < vocab_size(alphabet):
        rule = f"{len(SPECIALS)} specials + {len(alphabet)} characters = {vocab_size(alphabet)}"
        raise OrreryError(
            f"model.vocab_size: {model.vocab_size} does not fit the tokenizer; {rule}"
        )
    vocab = {token: i for i, token in enumerate((*SPECIALS, *alphabet))}
    # Unknown characters become PAD, so `Renderer.encode` raises.
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in SPECIALS]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.max_positions,
        "clean_up_tokenization_spaces": False,
        "pad_token": PAD,
        "eos_token": END,
        "unk_token": PAD,
        "chat_template": CHARACTER_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": END_ID, "pad_token_id": PAD_ID}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def template_source(config: dict[str, Any], folder: Path) -> str:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text()
    template = config.get("chat_template")
    if isinstance(template, list):  # named templates
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str):
        raise OrreryError(
            f"tokenizer: {folder} has no chat template. Use an instruction-tuned model, or give "
            "it one (`orrery fetch model NAME --chat-template FILE`)"
        )
    return template


class _Generation(jinja2.ext.Extension):
    """Render the body of `{% generation %}`."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template_environment() -> jinja2.Environment:
    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = TODAY.strftime
    return environment


def take_calls(text: str, characters: bool) -> tuple[str, list[ToolCall]]:
    """Return (text without its calls, the calls)."""
    opens, closes = (CALL, END_CALL) if characters else ("<tool_call>", "</tool_call>")
    kept, calls, after = [], [], 0
    while (begin := text.find(opens, after)) >= 0:
        end = text.find(closes, begin + len(opens))
        if end < 0:
            break
        call = _parse_call(text[begin + len(opens) : end], characters)
        before, after = after, end + len(closes)
        kept.append(text[before : after if call is None else begin])
        calls += [] if call is None else [call]
    return "".join([*kept, text[after:]]), calls


def _parse_call(text: str, characters: bool) -> ToolCall | None:
    try:
        if characters:
            name, _, rest = text.partition(" ")
            arguments = json.loads(rest) if rest.startswith("{") else {"input": rest}
        else:
            call = json.loads(text)
            name, arguments = call["name"], call["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        msgspec.json.encode((name, arguments))  # raises for a lone surrogate
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    is_call = isinstance(name, str) and name and isinstance(arguments, dict)
    return ToolCall(name, arguments) if is_call else None
