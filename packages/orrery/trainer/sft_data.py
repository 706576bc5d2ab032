"""Read SFT chats or texts by index, and tokenise them just before training.

- Chats come from task demonstrations, JSONL files or datasets.
- Unknown fields of messages, tool calls and tools raise OrreryError.
- The seed of an epoch's permutation is (manifest.seed, epoch).
- Stop tokens enclose each text document. Parts of long documents overlap by one token, because the
  loss excludes each part's first token.
"""

import json
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, get_args

import msgspec
import numpy as np

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import (
    ChatDataset,
    ChatFile,
    Demonstrations,
    Manifest,
    SftData,
    TextData,
)
from orrery.manifest.shards import Shard, check_held, checked_sha256, data_names, files_of
from orrery.tasks import Message, Tool, ToolCall, make
from orrery.tasks.chat import Example, Renderer
from orrery.tasks.rows import (
    DataRows,
    Joined,
    JsonLines,
    Tables,
    open_rows,
    saved_files,
    saved_split,
    saved_state,
)
from orrery.tasks.task import Role
from orrery.wire.columns import Columns

if TYPE_CHECKING:
    from orrery.trainer.elastic import SiteTraining

CHECKED_TOKENS = 2_000_000  # tokens that each rank checks at start
CHECKED_AT_ONCE = 64
CHECKED_CHARACTERS = 1_000_000
KEPT_TOKENS = 32_000_000  # most tokens cached for later epochs, 5 bytes each
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
    """Chats by index. Indexing raises OrreryError for a malformed chat."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Chat: ...


def open_chats(data: SftData, field: str) -> Chats:
    """Open chats. Raise OrreryError if data is missing, empty or has a wrong sha256."""
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
    try:
        rows = JsonLines(Path(data.path))
    except OSError as error:
        raise OrreryError(f"{field}.path: {error}") from error
    _check_sha256(data, field, rows.sha256)
    return RowChats(rows)


def _check_sha256(data: ChatFile | TextData, field: str, found: str) -> None:
    if found != data.sha256:
        raise OrreryError(
            f"{field}.sha256: {data.path} has {found}, the manifest says {data.sha256}; "
            "restore the file, or write the new sha256 into the spec"
        )


def _dataset_chats(data: ChatDataset, field: str) -> Chats:
    try:
        folder = saved_split(Path(data.path), data.split)
        state = saved_state(folder)
        if (found := state["_fingerprint"]) != data.fingerprint:
            raise OrreryError(
                f"fingerprint: {folder} has {found}, the manifest says {data.fingerprint}; "
                "restore the folder, or write the new fingerprint into the spec"
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
        raise TypeError(f"the content of a message must be text, not {type(content).__name__}")
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
                raise OrreryError(f"{what}, but no call before it waits for a result")
            if None not in (given, expected) and given != expected:
                raise OrreryError(
                    f"{what}, but the next call is {expected!r}; "
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
        """Raise OrreryError if a chat is malformed or too long."""
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


class TextDocuments:
    """Documents as chats, for comparison by `sft.refuse_shared`."""

    def __init__(self, texts: "Texts") -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Chat:
        return Chat(self._texts.rows.place(index), [Message("user", self._texts.text(index))])


class Texts:
    """Text documents by index. If `is_partial`, files of other DiLoCo sites may be missing."""

    def __init__(
        self,
        data: TextData,
        field: str,
        renderer: Renderer,
        max_tokens: int,
        is_partial: bool = False,
    ) -> None:
        self._data, self._field = data, field
        self._renderer, self._max_tokens = renderer, max_tokens
        self.chats = TextDocuments(self)
        path = Path(data.path)
        try:
            found = checked_sha256(path, data.num_shards)
            if not is_partial:
                check_held(path, data.split)
        except OrreryError as error:
            raise OrreryError(f"{field}.{error}") from error
        except OSError as error:
            raise OrreryError(
                f"{field}.path: {data.path}: {error.strerror}; name a file or a folder of text"
            ) from error
        _check_sha256(data, field, found)

    @cached_property
    def rows(self) -> DataRows:
        try:
            if self._data.shard_by == "file":
                rows: DataRows = Joined(list(self._parts_by_file.values()))
            else:
                rows = open_rows(Path(self._data.path), self._data.split)
        except OrreryError as error:
            raise OrreryError(f"{self._field}.{error}") from error
        if not len(rows):
            raise OrreryError(f"{self._field}.path: {self._data.path} has no rows; add documents")
        return rows

    @cached_property
    def _parts_by_file(self) -> dict[str, DataRows]:
        path, split = Path(self._data.path), self._data.split
        if split is None or not path.is_dir():
            raise OrreryError(
                f'shard_by "file": needs a folder of `orrery fetch dataset` and its split, not '
                f"{path} and {json.dumps(split)}. Name them, or leave shard_by out"
            )
        held = [name for name in files_of(data_names(path), split) if (path / name).is_file()]
        if not held:
            open_rows(path, split)  # raises for an unknown split
        return {name: open_rows(path / name) for name in held}

    def __len__(self) -> int:
        return len(self.rows)

    def check(self, indices: Sequence[int]) -> None:
        """Raise OrreryError if a document is malformed. Stop after CHECKED_CHARACTERS."""
        num_characters = 0
        for index in indices:
            num_characters += len(self.text(index))
            self.columns([index])
            if num_characters >= CHECKED_CHARACTERS:
                return

    def documents(self, shard: int | None) -> Sequence[int]:
        """Return the document indices of `shard` (None: all).

        Raise OrreryError if the shard is empty or lacks a file.
        """
        if shard is None:
            return range(len(self.rows))
        num_shards, most = self._data.num_shards, len(self.rows)
        found: Sequence[int] = range(shard, most, num_shards)
        if self._data.shard_by == "file":
            found, most = self._documents_of_files((shard, num_shards))
        if not found:
            raise OrreryError(
                f"{self._field}.num_shards {num_shards}: shard {shard} has no "
                f"document; set it to at most {most}"
            )
        return found

    def _documents_of_files(self, shard: Shard) -> tuple[Sequence[int], int]:
        path, split = Path(self._data.path), self._data.split or ""
        try:
            check_held(path, split, shard)
        except OrreryError as error:
            raise OrreryError(
                f"{self._field}.{error}, or `orrery join` with the --shard of your files"
            ) from error
        names, found, begin = data_names(path), array("q"), 0
        mine = set(files_of(names, split, shard))
        for name, rows in self._parts_by_file.items():
            if name in mine:
                found.extend(range(begin, begin + len(rows)))
            begin += len(rows)
        return found, len(files_of(names, split))

    def columns(self, documents: Iterable[int]) -> Columns:
        parts = [part for index in documents for part in self._parts(index)]
        offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        trained = np.ones(offsets[-1], dtype=bool)
        trained[offsets[:-1]] = False
        token = {
            "token_id": np.concatenate(parts),
            "trained": trained,
            "rl_weight": np.zeros(offsets[-1], dtype=np.float32),
            "cross_entropy_weight": np.ones(offsets[-1], dtype=np.float32),
        }
        return Columns(offsets, token)

    def text(self, index: int) -> str:
        row = self.rows[index]
        found = row.get(self._data.column)
        if not isinstance(found, str):
            raise OrreryError(
                f"{self._field}.column: {self.rows.place(index)} has no text in "
                f"{self._data.column!r}; choose from {', '.join(row)}"
            )
        return found

    def _parts(self, index: int) -> Iterator[np.ndarray]:
        end = self._renderer.stop_token_ids[0]
        ids = np.array([end, *self._encoded(index), end], dtype=np.int32)
        for begin in range(0, len(ids) - 1, self._max_tokens - 1):
            yield ids[begin : begin + self._max_tokens]

    def _encoded(self, index: int) -> list[int]:
        try:
            return self._renderer.encode(self.text(index))
        except OrreryError as error:
            raise OrreryError(f"{self.rows.place(index)}: {error}") from error


def load_examples(
    manifest: Manifest, tokenizer: Path, share: tuple[int, int] = (0, 1)
) -> Examples | Texts:
    """Open the training data, and check this rank's examples. `share`: (rank, number of ranks)."""
    examples = open_examples(manifest, manifest.sft.data, "stages.sft.data", tokenizer)
    examples.check(range(share[0], len(examples), share[1]))
    return examples


def open_examples(
    manifest: Manifest, data: SftData, field: str, tokenizer: Path
) -> Examples | Texts:
    if data.kind == "text":
        return open_texts(manifest, field, data, tokenizer)
    renderer = Renderer(tokenizer, manifest.model.vocab_size)
    limits = manifest.trainer.memory.max_tokens_per_micro_batch, manifest.model.max_positions
    return Examples(open_chats(data, field), renderer, manifest.sft.trained_roles, *limits)


def open_texts(manifest: Manifest, field: str, data: TextData, tokenizer: Path) -> Texts:
    has_sites = manifest.trainer.elastic is not None and manifest.sft.data is data
    is_partial = has_sites and data.shard_by == "file"
    renderer = Renderer(tokenizer, manifest.model.vocab_size)
    return Texts(data, field, renderer, manifest.max_text_tokens, is_partial)


def batches(examples: Examples | Texts, manifest: Manifest, num_done: int) -> Iterator[Columns]:
    spec = manifest.sft
    order = endless_order(len(examples), manifest.seed, num_done * spec.examples_per_batch)
    for _ in range(num_done, spec.num_steps):
        yield examples.columns(islice(order, spec.examples_per_batch))


def endless_order(num_examples: int, seed: int, start: int = 0) -> Iterator[int]:
    epoch, begin = divmod(start, num_examples)
    while True:
        yield from map(int, np.random.default_rng([seed, epoch]).permutation(num_examples)[begin:])
        epoch, begin = epoch + 1, 0


def text_order(documents: Sequence[int], seed: int, shard: int | None, start: int) -> Iterator[int]:
    """Yield endless epochs of `documents`, each permuted anew. Skip the first `start`."""
    epoch, begin = divmod(start, len(documents))
    while True:
        draw = np.random.default_rng([seed, epoch, 0 if shard is None else 1 + shard])
        yield from (documents[i] for i in draw.permutation(len(documents))[begin:])
        epoch, begin = epoch + 1, 0


def text_batches(
    texts: Texts, manifest: Manifest, num_done: int, site: "SiteTraining | None"
) -> Iterator[Columns]:
    spec = manifest.sft
    shard, start = None, num_done * spec.examples_per_batch
    if site is not None:
        shard, start = site.shard, site.start
    order = text_order(texts.documents(shard), manifest.seed, shard, start)
    for _ in range(num_done, spec.num_steps):
        yield texts.columns(islice(order, spec.examples_per_batch))


@contextmanager
def prefetch(items: Iterator[Columns]) -> Iterator[Callable[[], Columns]]:
    """Yield a function that returns the next item. A thread prepares one ahead."""
    with ThreadPoolExecutor(1, thread_name_prefix="tokenise") as thread:
        made = thread.submit(next, items)

        def take() -> Columns:
            nonlocal made
            item = made.result()
            made = thread.submit(next, items)
            return item

        yield take
