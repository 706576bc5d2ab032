"""Everything about a manifest's tasks that can be known before a process starts.

- Every `TaskUse` builds and makes its first problems, within `MAX_CPU_S` of processor time.
- They fit the tokenizer's alphabet, the model's vocabulary and the engine's context; so do the tools' replies to nonsense. Not checked
  where the tokenizer is pretrained and not on this machine: specs are written on other machines than those that run them.
- What trains, SFT included, and evaluation do not use the same problems: the same kind, args and seed is a mistake, also within `few_shot`.
"""

import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Manifest, Model, TaskUse
from orrery.tasks import make
from orrery.tasks.chat import Renderer, write_tokenizer
from orrery.tasks.task import Message, Role, Task, ToolCall

NUM_PROBLEMS = 16
MAX_CPU_S = 3.0


def task_uses(manifest: Manifest) -> Iterator[tuple[str, TaskUse]]:
    """Every task use of a manifest with its path in it."""
    for side in ("train", "evaluation"):
        for i, use in enumerate(getattr(manifest.tasks, side)):
            yield f"tasks.{side}[{i}]", use
    if (sft := manifest.stages.sft) is not None:
        if sft.data.kind == "demonstrations":
            yield "stages.sft.data.task", sft.data.task
        if sft.validation is not None and sft.validation.data.kind == "demonstrations":
            yield "stages.sft.validation.data.task", sft.validation.data.task


def check(manifest: Manifest) -> list[str]:
    """One line a task use that is well. Raises OrreryError, one sentence, at the first that is not."""
    renderer, lines, sft = _renderer(manifest.model), [], manifest.stages.sft
    for path, use in task_uses(manifest):
        try:
            with _limited(use):
                longest = _longest_prompt_tokens(
                    use, renderer, sft.trained_roles if path.startswith("stages.sft") else ()
                )
        except OrreryError as error:
            raise OrreryError(f"{path}: {error}") from error
        except Exception as error:  # a task is plug-in code, and may raise anything
            raise OrreryError(
                f"{path}: task {use.name!r}: no problems can be made with these args ({error!r}); correct {path}.args"
            ) from error
        if renderer is None:
            lines.append(
                f"{path}: {use.kind} {use.name!r}, prompts not counted: the tokenizer is not here"
            )
            continue
        context, turn = (
            manifest.inference.max_model_len_tokens,
            manifest.orchestrator.sampling.max_tokens_per_turn,
        )
        if longest + turn > context:
            raise OrreryError(
                f"{path}: a prompt of {longest} tokens and a turn of {turn} do not fit inference.max_model_len_tokens {context}; "
                f"give it at least {longest + turn}"
            )
        lines.append(f"{path}: {use.kind} {use.name!r}, prompts up to {longest} tokens")
    trained = [
        (path, use)
        for path, use in task_uses(manifest)
        if path.startswith(("tasks.train", "stages.sft.data"))
    ]
    for i, use in enumerate(manifest.tasks.evaluation):
        for path, other in trained:
            if _problems(use) == _problems(other):
                raise OrreryError(
                    f"tasks.evaluation[{i}]: these are the problems of {path}; give it another seed or split"
                )
    return lines


def _problems(use: TaskUse) -> tuple[str, dict[str, Any], int]:
    """What determines the problems: examples before them do not make them others."""
    if use.kind == "few_shot":
        return use.args["kind"], use.args["args"], use.seed
    return use.kind, use.args, use.seed


def _renderer(model: Model) -> Renderer | None:
    """Return the renderer, or None if a pretrained tokenizer is not on this machine."""
    if (
        model.tokenizer.kind == "pretrained"
        and not (Path(model.tokenizer.path) / "tokenizer.json").is_file()
    ):
        return None
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(model, Path(folder))
        return Renderer(Path(folder), model.vocab_size)


class _TooLong(BaseException):
    """The time is over. Not an Exception, because a task may catch those."""


@contextmanager
def _limited(use: TaskUse) -> Iterator[None]:
    """Raise OrreryError if the body takes more than `MAX_CPU_S` of CPU time. Main thread only."""

    def stop(*_: Any) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CPU_S)
    try:
        yield
    except _TooLong:
        raise OrreryError(
            f"task {use.name!r}: args {use.args}: its first {NUM_PROBLEMS} problems take more than {MAX_CPU_S:g} s; make them smaller"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@cache
def _task(use: str) -> Task:
    """Manifests share tasks, and a task keeps what it drew: a held-out puzzle can take tenths of a second."""
    return make(TaskUse.model_validate_json(use))


def _longest_prompt_tokens(
    use: TaskUse, renderer: Renderer | None, trained_roles: Sequence[Role]
) -> int:
    """Return the longest prompt's number of tokens; 0 without a renderer.

    `trained_roles` are those of the demonstrations, if the task has some.
    """
    task, longest = _task(use.model_dump_json()), 0
    demonstrate = getattr(task, "demonstration", None)
    for index in range(NUM_PROBLEMS):
        problem = task.problem(index)
        if trained_roles and demonstrate is None:
            raise OrreryError(
                f"task {use.name!r}: kind {use.kind} has no demonstrations; use stages.sft.data of kind chat_file or sft: null"
            )
        example = demonstrate(index) if trained_roles else None
        if renderer is None:
            continue
        longest = max(longest, len(renderer.prompt(problem.messages, problem.tools)))
        for name in [tool.name for tool in problem.tools] + ["no such tool"] * bool(problem.tools):
            nonsense = Message("assistant", "", (ToolCall(name, {"input": "?"}),))
            replies = task.reply(problem, [*problem.messages, nonsense])
            if isinstance(replies, list):
                renderer.next_turn(replies)
        if example is not None:
            renderer.example(example, problem.tools, trained_roles)
    return longest
