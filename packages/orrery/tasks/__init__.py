"""Make tasks by kind. A task poses problems, answers tool calls and rewards chats.

Packages add `task.Task` classes by entry points in the group `orrery.tasks`.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import msgspec
import pydantic

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Count, Record, TaskUse
from orrery.tasks.task import (
    Judgement,
    Message,
    Problem,
    Task,
    Tool,
    ToolCall,
    did_you_mean,
)

__all__ = ["KINDS", "Judgement", "Message", "Problem", "Task", "Tool", "ToolCall", "kinds", "make"]

EXAMPLES_SEED = 30_000  # no seed in jsonnet/lib/run.libsonnet equals this
ENTRY_POINT_GROUP = "orrery.tasks"
KINDS = {  # module:class, imported at first use
    "reverse_text": "orrery.tasks.synthetic:ReverseText",
    "calculator": "orrery.tasks.synthetic:Calculator",
    "reasoning_gym": "orrery.tasks.reasoning_gym:ReasoningGym",
    "reverse_words": "orrery.tasks.synthetic:ReverseWords",
    "few_shot": "orrery.tasks:FewShot",
    "lengths": "orrery.tasks.synthetic:Lengths",
    "dataset": "orrery.tasks.dataset:Dataset",
}


@cache
def kinds() -> dict[str, str]:
    """Return `module:class` by kind. Raise OrreryError if two packages add the same kind."""
    found = dict(KINDS)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if found.setdefault(point.name, point.value) != point.value:
            claims = f"{found[point.name]} and {point.value}"
            raise OrreryError(
                f"task kind {point.name!r} is claimed by {claims}. "
                "Uninstall one or rename its entry point"
            )
    return found


def make(task_use: TaskUse) -> Task:
    where, kind_name = f"task {task_use.name!r}", task_use.kind
    known = kinds()
    if kind_name not in known:
        raise OrreryError(
            f"{where}: kind: there is no {kind_name!r}; {did_you_mean(kind_name, known)}"
        )
    module, _, attribute = known[kind_name].partition(":")
    try:
        kind = getattr(import_module(module), attribute)
    except ImportError as error:
        raise OrreryError(
            f"{where}: kind {kind_name!r} cannot be imported from {module}: {error}. "
            "Install its package"
        ) from error
    try:
        return kind(kind.Args.model_validate(task_use.args), task_use.seed)
    except pydantic.ValidationError as error:
        raise OrreryError(f"{where}: args{_sentence(error, kind.Args, task_use.args)}") from error
    except OrreryError as error:
        raise OrreryError(f"{where}: args.{error}") from error


def _sentence(
    invalid: pydantic.ValidationError, args: type[pydantic.BaseModel], values: dict[str, Any]
) -> str:
    errors: list[Any] = invalid.errors()
    # A misspelt field causes two errors, unknown and missing. Report the unknown field.
    error = next((error for error in errors if error["type"] == "extra_forbidden"), errors[0])
    path = "".join(f".{part}" for part in _without_kinds(error["loc"], values))
    match error["type"]:
        case "extra_forbidden":
            name = error["loc"][-1]
            return f": there is no {name!r}; {did_you_mean(str(name), args.model_fields)}"
        case "missing" if len(error["loc"]) > 1:
            return f"{path} is missing; add it"
        case "missing":
            return f"{path} is missing; this task needs {', '.join(args.model_fields)}"
        case "union_tag_invalid":
            given, known = error["ctx"]["tag"], error["ctx"]["expected_tags"].replace("'", "")
            return f"{path}.kind: there is no {given!r}; {did_you_mean(given, known.split(', '))}"
        case "value_error":
            return f"{path}: {error['ctx']['error']}"
    message = error["msg"]
    return f"{path}: {error['input']!r} does not fit: {message[0].lower()}{message[1:]}"


def _without_kinds(loc: Sequence[int | str], given: Any) -> Iterator[int | str]:
    """Yield pydantic's `loc` without the kinds that discriminated unions add."""
    is_kind = False
    for part in loc:
        is_kind = not is_kind and isinstance(given, dict) and given.get("kind") == part
        if not is_kind:
            yield part
            given = given.get(part) if isinstance(given, dict) else None


class FewShot:
    """A task that puts solved examples before each problem of an inner task.

    A spare example replaces one that equals the problem. System prompts are joined.
    """

    class Args(Record):
        kind: str
        args: dict[str, Any]
        num_examples: Count
        system: str | None

    def __init__(self, args: Args, seed: int) -> None:
        if args.kind == "few_shot":
            raise OrreryError("kind: few_shot cannot contain few_shot. Raise num_examples instead")
        self.task = _inner(args.kind, args.args, seed)
        train = {"split": "train"} if "split" in args.args else {}
        examples = _inner(args.kind, args.args | train, EXAMPLES_SEED)
        if not hasattr(examples, "demonstration"):
            raise OrreryError(
                f"kind: {args.kind!r} has no demonstrations to show. Use the task itself"
            )
        self.num_examples, self.system = args.num_examples, args.system
        with_spare = range(args.num_examples + 1)
        self.examples = [_without_system(examples.demonstration(index)) for index in with_spare]
        if hasattr(self.task, "check_rows"):
            self.check_rows = self._check_rows

    def problem(self, index: int) -> Problem:
        return self._after_examples(self.task.problem(index))

    def _after_examples(self, problem: Problem) -> Problem:
        before = self._before(problem)
        chat = (*before, *_without_system(problem.messages))
        return msgspec.structs.replace(problem, messages=chat)

    def _before(self, problem: Problem) -> list[Message]:
        own = [message.content for message in problem.messages if message.role == "system"]
        system = "\n\n".join([self.system, *own] if self.system is not None else own)
        prompt = _without_system(problem.messages)
        others = [chat for chat in self.examples if chat[: len(prompt)] != prompt]
        shown = [message for chat in others[: self.num_examples] for message in chat]
        return [Message("system", system), *shown] if own or self.system is not None else shown

    def _check_rows(self, tokens: Callable[[Problem], int] | None, max_tokens: int) -> int:
        count = None if tokens is None else lambda problem: tokens(self._after_examples(problem))
        return self.task.check_rows(count, max_tokens)

    def reply(
        self, problem: Problem, messages: Sequence[Message]
    ) -> list[Message] | Awaitable[list[Message] | None] | None:
        return self.task.reply(problem, messages)

    def judge(
        self, problem: Problem, messages: Sequence[Message]
    ) -> Judgement | Awaitable[Judgement]:
        return self.task.judge(problem, messages)

    def demonstration(self, index: int) -> list[Message]:
        before = self._before(self.task.problem(index))
        return [*before, *_without_system(self.task.demonstration(index))]


def _without_system(chat: Sequence[Message]) -> list[Message]:
    return [message for message in chat if message.role != "system"]


def _inner(kind: str, args: dict[str, Any], seed: int) -> Any:
    use = TaskUse(name="few_shot", kind=kind, args=args, weight=1.0, seed=seed, max_turns=1)
    try:
        return make(use)
    except OrreryError as error:
        raise OrreryError(str(error).removeprefix("task 'few_shot': ")) from error
