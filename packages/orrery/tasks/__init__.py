"""Tasks: problems, replies and judges, by kind.

- `make` builds the task of a `TaskUse`. `KINDS` are the built-in kinds.
- A package adds a kind by an entry point in the group `orrery.tasks`: name = new kind, value = a
  `task.Task` class.
- The task's `Args` check the args. Every error is one sentence with the nearest name.
"""

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import pydantic

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import TaskUse
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

ENTRY_POINT_GROUP = "orrery.tasks"
KINDS = {  # kind -> module:class, imported at first use
    "reverse_text": "orrery.tasks.reverse:ReverseText",
    "calculator": "orrery.tasks.calculator:Calculator",
    "reasoning_gym": "orrery.tasks.reasoning_gym:ReasoningGym",
    "reverse_words": "orrery.tasks.reverse:ReverseWords",
    "few_shot": "orrery.tasks.few_shot:FewShot",
    "lengths": "orrery.tasks.lengths:Lengths",
}


@cache
def kinds() -> dict[str, str]:
    """Return all kinds as `module:class`. Raise OrreryError on a duplicate name."""
    found = dict(KINDS)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if found.setdefault(point.name, point.value) != point.value:
            claims = f"{found[point.name]} and {point.value}"
            raise OrreryError(
                f"task kind {point.name!r} is claimed by {claims}; "
                "uninstall one or rename its entry point"
            )
    return found


def make(task_use: TaskUse) -> Task:
    """Build the task. Raise OrreryError on an unknown kind or bad args."""
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
            f"{where}: kind {kind_name!r} cannot be imported from {module}: {error}; "
            "install its package"
        ) from error
    try:
        return kind(kind.Args.model_validate(task_use.args), task_use.seed)
    except pydantic.ValidationError as error:
        raise OrreryError(f"{where}: args{_sentence(error, kind.Args)}") from error
    except OrreryError as error:
        raise OrreryError(f"{where}: args.{error}") from error


def _sentence(invalid: pydantic.ValidationError, args: type[pydantic.BaseModel]) -> str:
    errors: list[Any] = invalid.errors()
    # A misspelt arg is also missing: report extra names first.
    error = next((error for error in errors if error["type"] == "extra_forbidden"), errors[0])
    path = "".join(f".{part}" for part in error["loc"])
    match error["type"]:
        case "extra_forbidden":
            name = error["loc"][-1]
            return f": there is no {name!r}; {did_you_mean(str(name), args.model_fields)}"
        case "missing":
            return f"{path} is missing; this task needs {', '.join(args.model_fields)}"
        case "value_error":
            return f"{path}: {error['ctx']['error']}"
    message = error["msg"]
    return f"{path}: {error['input']!r} does not fit: {message[0].lower()}{message[1:]}"
