"""Tasks: problems, replies and judges, by kind.

- `make(task_use)` gives the task of a manifest's `TaskUse`; `KINDS` are the built-in ones.
- The open door: a package that declares an entry point in the group `orrery.tasks` (name = kind, value = a class as `task.Task`
  describes it) adds a kind. It may not take the name of another.
- The args are checked by the task's own `Args`; every mistake is one sentence with the nearest name.
"""

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import pydantic

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import TaskUse
from orrery.tasks.nearest import did_you_mean
from orrery.tasks.task import Judgement, Message, Problem, Task, Tool, ToolCall

__all__ = ["KINDS", "Judgement", "Message", "Problem", "Task", "Tool", "ToolCall", "kinds", "make"]

ENTRY_POINT_GROUP = "orrery.tasks"
KINDS = {  # kind -> module:class, imported at first use
    "reverse_text": "orrery.tasks.reverse_text:ReverseText",
    "calculator": "orrery.tasks.calculator:Calculator",
    "reasoning_gym": "orrery.tasks.reasoning_gym:ReasoningGym",
    "reverse_words": "orrery.tasks.reverse_words:ReverseWords",
    "few_shot": "orrery.tasks.few_shot:FewShot",
    "lengths": "orrery.tasks.lengths:Lengths",
}


@cache
def kinds() -> dict[str, str]:
    """All kinds, built in and installed, as `module:class`. Raises OrreryError where two packages claim one name."""
    found = dict(KINDS)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if found.setdefault(point.name, point.value) != point.value:
            claims = f"{found[point.name]} and {point.value}"
            raise OrreryError(
                f"task kind {point.name!r} is claimed by {claims}; uninstall one or rename its entry point"
            )
    return found


def make(task_use: TaskUse) -> Task:
    """The task that `task_use` describes. Raises OrreryError, one sentence, on an unknown kind or on args that do not fit."""
    where = f"task {task_use.name!r}"
    known = kinds()
    if task_use.kind not in known:
        raise OrreryError(
            f"{where}: kind: there is no {task_use.kind!r}; {did_you_mean(task_use.kind, known)}"
        )
    module, _, attribute = known[task_use.kind].partition(":")
    try:
        kind = getattr(import_module(module), attribute)
    except ImportError as error:
        raise OrreryError(
            f"{where}: kind {task_use.kind!r} cannot be imported from {module}: {error}; install its package"
        ) from error
    try:
        return kind(kind.Args.model_validate(task_use.args), task_use.seed)
    except pydantic.ValidationError as error:
        raise OrreryError(f"{where}: args{_sentence(error, kind.Args)}") from error
    except OrreryError as error:
        raise OrreryError(f"{where}: args.{error}") from error


def _sentence(invalid: pydantic.ValidationError, args: type[pydantic.BaseModel]) -> str:
    errors: list[Any] = invalid.errors()
    error = next(
        (error for error in errors if error["type"] == "extra_forbidden"), errors[0]
    )  # a misspelt arg is also missing
    path = "".join(f".{part}" for part in error["loc"])
    match error["type"]:
        case "extra_forbidden":
            return f": there is no {error['loc'][-1]!r}; {did_you_mean(str(error['loc'][-1]), args.model_fields)}"
        case "missing":
            return f"{path} is missing; this task needs {', '.join(args.model_fields)}"
        case "value_error":
            return f"{path}: {error['ctx']['error']}"
    return f"{path}: {error['input']!r} does not fit: {error['msg'][0].lower()}{error['msg'][1:]}"
