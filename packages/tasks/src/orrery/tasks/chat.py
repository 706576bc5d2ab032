"""Chats as tokens, for any Hugging Face tokenizer folder, without transformers.

- In: a folder with `tokenizer.json`, `tokenizer_config.json` and a chat template (in the config or in `chat_template.jinja`).
- `prompt` is the whole chat up to where the assistant speaks. What it then samples stays verbatim for ever: `next_turn` gives only the
  tokens that follow, found by rendering the new messages behind a placeholder assistant turn. No token is ever decoded and encoded again.
- `example` composes the same parts, so SFT sees exactly the tokens that RL produces. Which of them are trained is said by role; where a
  message stands in what the template writes is found by writing it once more with other content there.
- The character format (written by `write_tokenizer`): `<|user|>abc<|end|><|assistant|>cba<|end|>`; a call is
  `<|call|>name input<|end_call|>` inside an assistant turn, a result is a `<|tool|>` turn. Tools are not announced in the prompt.
- A template that asks for the date (`strftime_now`) gets TODAY, whatever the clock says: a prompt is the same on every day of a run and
  in every reproduction of it.
- Calls in pretrained formats: the Hermes / Qwen syntax, `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
"""

import datetime
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import msgspec
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from orrery.manifest.digest import sha256_of
from orrery.manifest.errors import OrreryError
from orrery.manifest.json_file import read_object
from orrery.manifest.schema import Model
from orrery.tasks.task import Message, Role, Tool, ToolCall

# The character format -------------------------------------------------------------------------------------------------

PAD, END = "<|pad|>", "<|end|>"
CALL, END_CALL = "<|call|>", "<|end_call|>"
SPECIALS = (
    PAD,
    END,
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    CALL,
    END_CALL,
)  # ids 0 … 7, then the alphabet
PAD_ID, END_ID = 0, 1

TODAY = datetime.datetime(
    2024, 7, 26
)  # what Llama's templates write where there is no clock; others call the clock without a test

CHARACTER_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message.role + '|>' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{%- set arguments = call.function.arguments -%}
{{- '<|call|>' + call.function.name + ' ' -}}
{{- arguments.input if arguments.keys() | list == ['input'] and arguments.input is string else arguments | tojson -}}
{{- '<|end_call|>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

# What is copied of a pretrained tokenizer, as far as it is there; generation_config.json names the tokens that end a turn.
FILES = (
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def vocab_size(alphabet: str) -> int:
    """Tokens of the character tokenizer: the 8 specials, then one a character. Jsonnet derives `model.vocab_size` by this formula."""
    return len(SPECIALS) + len(alphabet)


def write_tokenizer(model: Model, folder: Path) -> None:
    """Write `model.tokenizer` into `folder` as Hugging Face files; a pretrained one is copied, if the `sha256` of its files is right."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if model.tokenizer.kind == "characters":
        _write_character_tokenizer(model.tokenizer.alphabet, model, folder)
        return
    source = Path(model.tokenizer.path)
    if not (source / "tokenizer.json").is_file():
        raise OrreryError(
            f"model.tokenizer.path: there is no tokenizer.json in {str(source)!r}; name the folder of the pretrained model"
        )
    files = [source / name for name in FILES if (source / name).is_file()]
    if (found := sha256_of(files)) != (expected := model.tokenizer.sha256):
        raise OrreryError(
            f"model.tokenizer.sha256 {expected}: {' '.join(file.name for file in files)} of {source} have {found}; "
            "write that if they are the ones that you mean, else fetch the manifest's files again"
        )
    for file in files:
        shutil.copyfile(file, folder / file.name)


def _write_character_tokenizer(alphabet: str, model: Model, folder: Path) -> None:
    if len(set(alphabet)) != len(alphabet):
        twice = sorted(c for c in set(alphabet) if alphabet.count(c) > 1)
        raise OrreryError(
            f"model.tokenizer.alphabet: {''.join(twice)!r} stands in it twice; each character is one token"
        )
    # More is padding, as in many a published model: rows that no token has.
    if model.vocab_size < vocab_size(alphabet):
        rule = f"{len(SPECIALS)} specials + {len(alphabet)} characters = {vocab_size(alphabet)}"
        raise OrreryError(
            f"model.vocab_size: {model.vocab_size} does not fit the tokenizer; {rule}"
        )
    vocab = {token: i for i, token in enumerate((*SPECIALS, *alphabet))}
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel(vocab, unk_token=PAD)
    )  # an unknown character is refused in `Renderer.encode`
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
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": END_ID, "pad_token_id": PAD_ID}, indent=2) + "\n"
    )


# Any format -----------------------------------------------------------------------------------------------------------

PLACEHOLDER = "\N{BLACK FLORETTE}placeholder\N{BLACK FLORETTE}"
CONTENT = "\N{BLACK FLORETTE}content\N{BLACK FLORETTE}"
ASK = {"role": "user", "content": "?"}
BEHIND = [ASK, {"role": "assistant", "content": PLACEHOLDER}]
EVERYTHING = (0, -1)  # of a text: tokens without characters too
Example = tuple[np.ndarray, np.ndarray]  # (token ids i32 [T], trained bool [T])


class _Part(NamedTuple):
    """A text that is tokenised by itself, and the characters of it, from … to, whose tokens are trained."""

    text: str
    trained: list[tuple[int, int]]


class Renderer:
    """The chat format of one tokenizer folder. `stop_token_ids` end an assistant turn; the first is the one that chats are written with.

    With `vocab_size`, the model's, a text that has a token beyond it is refused: the model has no row for it. The tokenizer may have more.
    """

    def __init__(self, folder: Path, vocab_size: int | None = None) -> None:
        folder = Path(folder)
        try:
            config = read_object(folder / "tokenizer_config.json", "copy the model's folder again")
            self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exception on a missing or broken file
            raise OrreryError(
                f"tokenizer: cannot read {folder}: {error}; it needs tokenizer.json and tokenizer_config.json"
            ) from error
        source = _template_source(config, folder)
        self._template = _environment().from_string(source)
        self._globals = {
            name: _content(config[name])
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if config.get(name)
        }
        self._unknown_id = self._token_id(config.get("unk_token"))
        self._syntax = (
            CALL if CALL in source else "<tool_call>" if "<tool_call>" in source else None
        )
        self._vocab_size = vocab_size
        self.stop_token_ids = self._stop_token_ids(folder)
        self._end = self._end_of_turn()
        self._known: set[str] | None = set(self.tokenizer.get_vocab()) if CALL in source else None

    # Tokens of a chat

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Tokens of the whole chat, and of what opens the assistant's turn."""
        return self.encode(
            self._render([_hugging_face(m) for m in messages], tools, add_generation_prompt=True)
        )

    def next_turn(self, messages: Sequence[Message], closed: bool = True) -> list[int]:
        """Tokens to append after the assistant's sampled ones: `messages`, and what opens its next turn.

        `closed`: the sampled tokens end with a stop token, as they do unless generation was cut by its length.
        """
        opens = self._after_turn([_hugging_face(m) for m in messages])
        return self.encode(opens if closed else self._end + opens)

    def completion(self, message: Message) -> list[int]:
        """Tokens that the assistant would have sampled to say `message`, with the end-of-turn token."""
        return self.encode(self._said(message))

    def _said(self, message: Message) -> str:
        opened = self._render([ASK], add_generation_prompt=True)
        whole = self._render([ASK, _hugging_face(message)])
        if not whole.startswith(opened) or self._end not in whole[len(opened) :]:
            raise OrreryError(
                "tokenizer: the chat template does not continue its own generation prompt, so turns cannot be told apart"
            )
        said = whole[len(opened) :]
        return said[: said.rindex(self._end) + len(self._end)]

    def example(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        trained_roles: Sequence[Role] = ("assistant",),
    ) -> Example:
        """A finished chat as (token ids i32 [T], trained bool [T]); trained are the messages whose role is in `trained_roles`:

        - the assistant's: all that it would sample, its calls and the end-of-turn token too;
        - of others: the content, and what follows it up to the end-of-turn token, that token too; the content alone where the template
          writes no end of turn before the next message, as between the results of several calls.

        Never trained are headers (`<|im_start|>user`), what stands between turns, what a template adds of its own, the chat's first token.
        A token that lies partly in trained text is trained.

        Raises OrreryError where the chat begins with the assistant, ends with a message that is neither the assistant's nor trained, or has
        nothing to train; and where the template does not write a message of a trained role as a text of its own.
        """
        parts = self._parts(messages, tools, trained_roles)
        return self._joined(
            parts,
            self.tokenizer.encode_batch([part.text for part in parts], add_special_tokens=False),
        )

    def examples(
        self,
        chats: Sequence[tuple[str, Sequence[Message], Sequence[Tool]]],
        trained_roles: Sequence[Role],
    ) -> list[Example]:
        """`example` of each (where it stands, messages, tools), at once: with all cores, and other threads of Python go on meanwhile.

        An OrreryError begins with where the chat stands.
        """
        parts = []
        for where, messages, tools in chats:
            with _naming(where):
                parts.append(self._parts(messages, tools, trained_roles))
        encodings = iter(
            self.tokenizer.encode_batch(
                [part.text for one in parts for part in one], add_special_tokens=False
            )
        )
        made = []
        for (where, _, _), one in zip(chats, parts, strict=True):
            with _naming(where):
                made.append(self._joined(one, list(islice(encodings, len(one)))))
        return made

    def parse(self, token_ids: Sequence[int]) -> Message:
        """The assistant message that was sampled. A malformed call is text; so are special tokens out of place."""
        ids = list(token_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        calls: list[ToolCall] = []
        if self._syntax is not None:
            text, calls = _take_calls(text, self._syntax == CALL)
        return Message("assistant", text.strip() if calls else text, tuple(calls))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones included: for people to read."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text in which special tokens stand by name. Raises OrreryError on a character that the tokenizer does not know, and
        on a token that the model does not."""
        return self._known_ids(text, self.tokenizer.encode(text, add_special_tokens=False))

    def _known_ids(self, text: str, encoding: tokenizers.Encoding) -> list[int]:
        ids = encoding.ids
        if self._known is not None and self._unknown_id in ids:
            strange = sorted({c for c in re.sub(r"<\|\w+\|>", "", text) if c not in self._known})
            raise OrreryError(
                f"model.tokenizer.alphabet has no {''.join(strange)!r}, which stands in {text!r}; add them to the alphabet"
            )
        if self._vocab_size is not None and ids and (most := max(ids)) >= self._vocab_size:
            raise OrreryError(
                f"model.vocab_size: {self._vocab_size}, and the tokenizer makes {self.tokenizer.id_to_token(most)!r} the token {most}, "
                f"which is no row of the model; set model.tokenizer to the model's own, or leave that text out"
            )
        return ids

    # Examples: a chat as texts that are tokenised each by itself, as RL does, and what of them is trained

    def _parts(
        self, messages: Sequence[Message], tools: Sequence[Tool], trained_roles: Sequence[Role]
    ) -> list[_Part]:
        """What is heard before the first turn, the turn, what is heard after it, …"""
        roles = [message.role for message in messages]
        turns = [i for i, role in enumerate(roles) if role == "assistant"]
        last = ["assistant", *(role for role in trained_roles if role != "assistant")]
        if not roles or roles[0] == "assistant" or roles[-1] not in last:
            raise OrreryError(
                f"chat of roles {roles}: an example ends with an {' or '.join(last)} message and does not begin with an assistant's"
            )
        parts = [
            self._heard(
                messages[: turns[0] if turns else None], 0, bool(turns), tools, trained_roles
            )
        ]
        for turn, following in zip(turns, [*turns[1:], None][: len(turns)], strict=True):
            parts.append(
                _Part(
                    self._said(messages[turn]), [EVERYTHING] if "assistant" in trained_roles else []
                )
            )
            if turn + 1 < len(messages):
                parts.append(
                    self._heard(
                        messages[turn + 1 : following],
                        turn + 1,
                        following is not None,
                        (),
                        trained_roles,
                    )
                )
        if not any(part.trained for part in parts):
            raise OrreryError(
                f"chat of roles {roles}: nothing of it is trained with trained_roles {list(trained_roles)}; leave the chat out"
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
        trained[:1] = False  # nothing stands before it to predict it from
        return np.array(ids, dtype=np.int32), trained

    def _heard(
        self,
        messages: Sequence[Message],
        first: int,
        is_answered: bool,
        tools: Sequence[Tool],
        trained_roles: Sequence[Role],
    ) -> _Part:
        """Messages between two turns of the assistant; `first` is the number of the first. `is_answered`: the assistant speaks next.

        The chat's beginning is rendered by itself, later messages behind a placeholder turn.
        """
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
                    trained.append(
                        (start - begin, (end if at < 0 else at + len(self._end)) - begin)
                    )
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
        """Where the content of message `at` of `chat`, number `number` of the example, stands in `whole`."""
        marked = self._render(
            [*chat[:at], chat[at] | {"content": CONTENT}, *chat[at + 1 :]], tools, is_answered
        )
        before, _, after = marked.partition(CONTENT)
        is_alone = marked.count(CONTENT) == 1 and len(before) + len(after) <= len(whole)
        if not is_alone or not whole.startswith(before) or not whole.endswith(after):
            role = chat[at]["role"]
            raise OrreryError(
                f"tokenizer: its chat template does not write message {number} ({role}) as a text of its own, so its tokens cannot be told "
                f"from the others; leave {role!r} out of stages.sft.trained_roles"
            )
        return len(before), len(whole) - len(after)

    # Finding out what the folder's format is

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = False,
    ) -> str:
        functions = [{"type": "function", "function": msgspec.to_builtins(tool)} for tool in tools]
        if functions and self._syntax is None:
            raise OrreryError(
                "tokenizer: its chat template has no tool calls that we can parse; use a task without tools or another model"
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
            raise OrreryError(
                f"tokenizer: its chat template refuses the roles {[m['role'] for m in messages]}: {error}"
            ) from error

    def _after_turn(self, messages: list[dict[str, Any]]) -> str:
        whole = self._render([*BEHIND, *messages], add_generation_prompt=True)
        return whole[self._begin(whole) :]

    def _begin(self, whole: str) -> int:
        """Where the placeholder's turn has ended."""
        return whole.index(self._end, whole.rindex(PLACEHOLDER) + len(PLACEHOLDER)) + len(self._end)

    def _end_of_turn(self) -> str:
        whole = self._render(BEHIND)
        if PLACEHOLDER not in whole:
            raise OrreryError(
                "tokenizer: its chat template drops what the assistant said; use another model"
            )
        after = whole.rpartition(PLACEHOLDER)[2]
        ends = [
            (after.index(token), token)
            for i in self.stop_token_ids
            if (token := self.tokenizer.id_to_token(i)) in after
        ]
        if not ends:
            raise OrreryError(
                f"tokenizer: no stop token follows the assistant's turn in its chat template but {after!r}; set eos_token to its end"
            )
        return min(ends)[1]

    def _stop_token_ids(self, folder: Path) -> list[int]:
        stops = [self._token_id(self._globals.get("eos_token"))]
        path = folder / "generation_config.json"
        if path.is_file():
            more = read_object(path, "copy the model's folder again").get("eos_token_id")
            stops += more if isinstance(more, list) else [more]
            if odd := [one for one in stops if not isinstance(one, int | None)]:
                raise OrreryError(
                    f"{path}: eos_token_id {odd[0]!r}: it is a token's number, or a list of them; copy the model's folder again"
                )
        stops = list(dict.fromkeys(i for i in stops if i is not None))
        if not stops:
            raise OrreryError(f"tokenizer: {folder} names no eos_token, so no turn would ever end")
        return stops

    def _token_id(self, token: Any) -> int | None:
        return None if token is None else self.tokenizer.token_to_id(_content(token))


def _take_calls(text: str, characters: bool) -> tuple[str, list[ToolCall]]:
    """The text without its calls, and these; a malformed one stays text. In time linear in the text, whatever a policy wrote."""
    opens, closes = (CALL, END_CALL) if characters else ("<tool_call>", "</tool_call>")
    kept, calls, after = [], [], 0
    while (begin := text.find(opens, after)) >= 0 and (
        end := text.find(closes, begin + len(opens))
    ) >= 0:
        call = _parse_call(text[begin + len(opens) : end], characters)
        before, after = after, end + len(closes)
        kept.append(text[before : after if call is None else begin])
        calls += [] if call is None else [call]
    return "".join([*kept, text[after:]]), calls


def _parse_call(text: str, characters: bool) -> ToolCall | None:
    """A call from the text between its markers; None where it is malformed."""
    try:
        if characters:
            name, _, rest = text.partition(" ")
            arguments = json.loads(rest) if rest.startswith("{") else {"input": rest}
        else:
            call = json.loads(text)
            name, arguments = call["name"], call["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        msgspec.json.encode(
            (name, arguments)
        )  # JSON can spell what UTF-8 cannot: half a surrogate pair, which no file could hold
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return (
        ToolCall(name, arguments)
        if isinstance(name, str) and name and isinstance(arguments, dict)
        else None
    )


def _hugging_face(message: Message) -> dict[str, Any]:
    """A message as chat templates expect it."""
    entry: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        entry["tool_calls"] = [
            {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.tool_calls
        ]
    if message.name is not None:
        entry["name"] = message.name
    return entry


@contextmanager
def _naming(where: str) -> Iterator[None]:
    try:
        yield
    except OrreryError as error:
        raise OrreryError(f"{where}: {error}") from error


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else token


def _template_source(config: dict[str, Any], folder: Path) -> str:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text()
    template = config.get("chat_template")
    if isinstance(template, list):  # named templates
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str):
        raise OrreryError(
            f"tokenizer: {folder} has no chat template; use an instruction-tuned model or add chat_template.jinja"
        )
    return template


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text in some templates; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    """The sandbox that chat templates are written for: the same options, filters and functions as in transformers."""

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = TODAY.strftime
    return environment
