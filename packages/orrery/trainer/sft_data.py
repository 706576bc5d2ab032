"""Read SFT chats by index, and tokenise them shortly before training.

- Chats come from a task's demonstrations, a JSONL file or a dataset.
- Unknown fields of messages, tool calls and tools raise OrreryError.
- Each epoch permutes the chats with the seed (manifest.seed, epoch).
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, get_args

import msgspec
import numpy as np

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import ChatDataset, ChatFile, Demonstrations, Manifest, SftData
from orrery.tasks import Message, Tool, ToolCall, make
from orrery.tasks.chat import Example, Renderer
from orrery.tasks.rows import DataRows, JsonLines, Tables, saved_files, saved_split, saved_state
from orrery.tasks.task import Role
from orrery.wire.columns import Columns

if TYPE_CHECKING:
    from orrery.trainer.text_data import Texts

CHECKED_TOKENS = 2_000_000  # tokens that each rank checks at start
CHECKED_AT_ONCE = 64
KEPT_TOKENS = 32_000_000  # maximum tokens cached for later epochs, 5 bytes each
FORM = '{"messages": [{"role", "content"}]}'
REFUSED = ("functions", "chat_template_kwargs")  # unsupported fields that would change the prompt
MESSAGE_FIELDS: dict[Role, tuple[str, ...]] = {
    "system": ("role", "content", "name"),
    "user": ("role", "content", "name"),
    "assistant": ("role", "content", "name", "tool_calls"),
    "tool": ("role", "content", "name", "tool_call_id"),
}


@dataclass(frozen=True)
class Chat:
    where: str
    messages: list[Message]
    tools: tuple[Tool, ...] = ()


class Chats(Protocol):
    """Indexing raises OrreryError for a malformed chat."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Chat: ...


def open_chats(data: SftData, field: str) -> Chats:
    """Open chats. Raise OrreryError if the data is missing, changed or empty."""
    chats = KINDS[data.kind](data, field)
    if not len(chats):
        raise OrreryError(f"{field}: has no chats; give at least one chat")
    return chats


class DemonstratedChats:
    def __init__(self, data: Demonstrations, field: str):
        self._task, self._name = make(data.task), data.task.name
        self._num_problems = data.num_problems
        demonstrate = getattr(self._task, "demonstration", None)
        if demonstrate is None:
            raise OrreryError(
                f"{field}.task: {data.task.kind!r} has no demonstrations; use a chat file, "
                f"or set {field.removesuffix('.data')} to null"
            )
        self._demonstrate: Callable[[int], list[Message]] = demonstrate

    def __len__(self) -> int:
        return self._num_problems

    def __getitem__(self, index: int) -> Chat:
        tools = tuple(self._task.problem(index).tools)
        return Chat(f"demonstration {index} of {self._name}", self._demonstrate(index), tools)


class RowChats:
    def __init__(self, rows: DataRows, column: str = "messages"):
        self._rows, self._column = rows, column

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Chat:
        def read() -> dict[str, Any]:
            row = dict(self._rows[index])
            return {"messages": row.pop(self._column), **row}

        return _chat(self._rows.place(index), read)


def _file_chats(data: ChatFile, field: str) -> Chats:
    """Open JSONL: each line is `{"messages": [...]}`, with optional `tools`."""
    try:
        rows = JsonLines(Path(data.path))
    except OSError as error:
        raise OrreryError(f"{field}.path: {error}") from error
    if rows.sha256 != data.sha256:
        raise OrreryError(
            f"{field}.sha256: {data.path} has {rows.sha256}, the manifest says {data.sha256}; "
            "restore the file, or write the new one into the spec"
        )
    return RowChats(rows)


def _dataset_chats(data: ChatDataset, field: str) -> Chats:
    try:
        folder = saved_split(Path(data.path), data.split)
        state = saved_state(folder)
        if (found := state["_fingerprint"]) != data.fingerprint:
            raise OrreryError(
                f"fingerprint: {folder} has {found}, the manifest says {data.fingerprint}; "
                "restore the folder, or write the new one into the spec"
            )
        files = saved_files(folder, state)
        return RowChats(Tables(folder, files, data.column, ("tools", *REFUSED)), data.column)
    except OrreryError as error:
        raise OrreryError(f"{field}.{error}") from error


def _chat(where: str, read: Callable[[], dict[str, Any]]) -> Chat:
    try:
        row = read()
        messages = [_message(number, entry) for number, entry in enumerate(row["messages"])]
        _check_order_of_results(row["messages"])
        for name in REFUSED:
            if row.get(name):
                raise OrreryError(
                    f"{name!r} would change the chat, but is not read; use messages and tools, "
                    f"or leave it out"
                )
        tools = enumerate(_parsed(row.get("tools") or ()) or ())
        return Chat(where, messages, tuple(_tool(f"tool {n}", tool) for n, tool in tools))
    except OrreryError as error:
        raise OrreryError(f"{where}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OrreryError(
            f"{where}: not a chat of the form {FORM} ({type(error).__name__}: {error})"
        ) from error


def _message(number: int, entry: dict[str, Any]) -> Message:
    role, content, calls = entry["role"], entry.get("content"), entry.get("tool_calls") or ()
    if role not in get_args(Role):
        raise ValueError(f"role {role!r} is none of {', '.join(get_args(Role))}")
    _refuse_other_fields(f"message {number} ({role})", entry, MESSAGE_FIELDS[role])
    if content is None and not calls:
        needed = "content or tool_calls" if role == "assistant" else "content"
        raise OrreryError(
            f"message {number} ({role}) has no {needed}; "
            f'add it (empty content is "content": ""), or leave the message out'
        )
    if not isinstance(content, str | None):
        raise TypeError(f"the content of a message is text, not {type(content).__name__}")
    parsed = tuple(_call(f"a call of message {number}", call) for call in calls)
    return Message(role, content or "", parsed, entry.get("name"))


def _call(what: str, call: dict[str, Any]) -> ToolCall:
    function = call["function"]
    _refuse_other_fields(what, call, ("id", "type", "function"))
    _refuse_other_fields(what, function, ("name", "arguments"))
    fields = {"name": function["name"], "arguments": _parsed(function["arguments"])}
    return msgspec.convert(fields, ToolCall)


def _check_order_of_results(entries: list[dict[str, Any]]) -> None:
    waiting: list[Any] = []
    for number, entry in enumerate(entries):
        if entry["role"] == "assistant":
            waiting = [call.get("id") for call in entry.get("tool_calls") or ()]
        elif entry["role"] == "tool":
            given, has_call = entry.get("tool_call_id"), bool(waiting)
            expected = waiting.pop(0) if has_call else None
            what = f"message {number} (tool) has the tool_call_id {given!r}"
            if given is not None and not has_call:
                raise OrreryError(f"{what} and no call before it waits for a result")
            if None not in (given, expected) and given != expected:
                raise OrreryError(
                    f"{what} where the next call is {expected!r}; "
                    f"put results in the order of their calls"
                )


def _tool(what: str, given: Any) -> Tool:
    tool = _parsed(given)
    function = tool.get("function", tool)
    if function is not tool:
        _refuse_other_fields(what, tool, ("type", "function"))
    _refuse_other_fields(what, function, Tool.__struct_fields__)
    try:
        return msgspec.convert(function, Tool)
    except msgspec.ValidationError as error:
        fields = ", ".join(Tool.__struct_fields__)
        raise OrreryError(f"{what}: {error}; give it {fields}") from error


def _refuse_other_fields(what: str, given: dict[str, Any], known: Collection[str]) -> None:
    for name, value in given.items():
        if name not in known and value not in (None, []):
            raise OrreryError(
                f"{what} has the field {name!r}, which is not read; remove it, "
                f"or use one of {', '.join(known)}"
            )


def _parsed(given: Any) -> Any:
    return json.loads(given) if isinstance(given, str) else given


KINDS: dict[str, Callable[[Any, str], Chats]] = {
    "demonstrations": DemonstratedChats,
    "chat_file": _file_chats,
    "dataset": _dataset_chats,
}


class Examples:
    def __init__(
        self,
        chats: Chats,
        renderer: Renderer,
        trained_roles: Sequence[Role],
        max_tokens: int,
        max_positions: int,
    ):
        self.chats, self._renderer, self._trained_roles = chats, renderer, trained_roles
        self._max_tokens, self._max_positions = max_tokens, max_positions
        self._kept: dict[int, Example] = {}
        self._num_kept_tokens = 0

    def __len__(self) -> int:
        return len(self.chats)

    def check(self, indices: Sequence[int]) -> None:
        num_tokens = 0
        for begin in range(0, len(indices), CHECKED_AT_ONCE):
            num_tokens += self.columns(indices[begin : begin + CHECKED_AT_ONCE]).num_tokens
            if num_tokens >= CHECKED_TOKENS:
                return

    def columns(self, indices: Iterable[int]) -> Columns:
        """Tokenise chats. Raise OrreryError if a chat is malformed or too long."""
        indices = list(indices)
        new = [index for index in dict.fromkeys(indices) if index not in self._kept]
        made = self._tokenise(new)
        tokens = [made[index] if index in made else self._kept[index] for index in indices]
        offsets = np.cumsum([0, *(len(ids) for ids, _ in tokens)], dtype=np.int64)
        token = {
            "token_id": np.concatenate([ids for ids, _ in tokens]),
            "trained": np.concatenate([trained for _, trained in tokens]),
            "rl_weight": np.zeros(offsets[-1], dtype=np.float32),
            "cross_entropy_weight": np.ones(offsets[-1], dtype=np.float32),
        }
        return Columns(offsets, token)

    def _tokenise(self, indices: list[int]) -> dict[int, Example]:
        chats = [self.chats[index] for index in indices]
        rows = [(chat.where, chat.messages, chat.tools) for chat in chats]
        made = self._renderer.examples(rows, self._trained_roles)
        for index, chat, example in zip(indices, chats, made, strict=True):
            num_tokens = len(example[0])
            if num_tokens > self._max_positions:
                raise OrreryError(
                    f"{chat.where}: {num_tokens} tokens do not fit model.max_positions "
                    f"{self._max_positions}; cut the chat or leave it out"
                )
            if num_tokens > self._max_tokens:
                raise OrreryError(
                    f"{chat.where}: {num_tokens} tokens do not fit "
                    f"trainer.memory.max_tokens_per_micro_batch {self._max_tokens}; "
                    f"raise it or leave the chat out"
                )
            if self._num_kept_tokens + num_tokens <= KEPT_TOKENS:
                self._kept[index] = example
                self._num_kept_tokens += num_tokens
        return dict(zip(indices, made, strict=True))


def load_examples(
    manifest: Manifest, tokenizer: Path, share: tuple[int, int] = (0, 1)
) -> "Examples | Texts":
    """Open the training data, and check this rank's examples. `share`: (rank, number of ranks)."""
    examples = open_examples(manifest, manifest.sft.data, "stages.sft.data", tokenizer)
    examples.check(range(share[0], len(examples), share[1]))
    return examples


def open_examples(
    manifest: Manifest, data: SftData, field: str, tokenizer: Path
) -> "Examples | Texts":
    if data.kind == "text":
        from orrery.trainer.text_data import open_texts  # `text_data` imports this module

        return open_texts(manifest, field, data, tokenizer)
    renderer = Renderer(tokenizer, manifest.model.vocab_size)
    limits = manifest.trainer.memory.max_tokens_per_micro_batch, manifest.model.max_positions
    return Examples(open_chats(data, field), renderer, manifest.sft.trained_roles, *limits)


def batches(examples: "Examples | Texts", manifest: Manifest, num_done: int) -> Iterator[Columns]:
    spec = manifest.sft
    order = endless_order(len(examples), manifest.seed, num_done * spec.examples_per_batch)
    for _ in range(num_done, spec.num_steps):
        yield examples.columns(islice(order, spec.examples_per_batch))


def endless_order(num_examples: int, seed: int, start: int = 0) -> Iterator[int]:
    epoch, begin = divmod(start, num_examples)
    while True:
        yield from map(int, np.random.default_rng([seed, epoch]).permutation(num_examples)[begin:])
        epoch, begin = epoch + 1, 0


@contextmanager
def prefetch(items: Iterator[Columns]) -> Iterator[Callable[[], Columns]]:
    """Yield a function that returns the next item. A thread prepares one item ahead."""
    with ThreadPoolExecutor(1, thread_name_prefix="tokenise") as thread:
        made = thread.submit(next, items)

        def take() -> Columns:
            nonlocal made
            item = made.result()
            made = thread.submit(next, items)
            return item

        yield take
