"""Everything about a manifest's tasks that can be known before a process starts.

- Every `TaskUse` builds; its first problems fit the tokenizer's alphabet, the model's vocabulary and the engine's context; so do the tools'
  replies to nonsense.
- What trains, SFT included, and evaluation do not use the same problems: the same kind, args and seed is a mistake, also within `few_shot`.
"""

import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Manifest, TaskUse
from orrery.tasks import make
from orrery.tasks.chat import Renderer, write_tokenizer
from orrery.tasks.task import Message, Role, Task, ToolCall

NUM_PROBLEMS = 16


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
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(manifest.model, Path(folder))
        renderer = Renderer(Path(folder), manifest.model.vocab_size)
    lines, sft = [], manifest.stages.sft
    for path, use in task_uses(manifest):
        try:
            longest = _longest_prompt_tokens(use, renderer, sft.trained_roles if path.startswith("stages.sft") else ())
        except OrreryError as error:
            raise OrreryError(f"{path}: {error}") from error
        context, turn = manifest.inference.max_model_len_tokens, manifest.orchestrator.sampling.max_tokens_per_turn
        if longest + turn > context:
            raise OrreryError(
                f"{path}: a prompt of {longest} tokens and a turn of {turn} do not fit inference.max_model_len_tokens {context}; "
                f"give it at least {longest + turn}"
            )
        lines.append(f"{path}: {use.kind} {use.name!r}, prompts up to {longest} tokens")
    trained = [(path, use) for path, use in task_uses(manifest) if path.startswith(("tasks.train", "stages.sft.data"))]
    for i, use in enumerate(manifest.tasks.evaluation):
        for path, other in trained:
            if _problems(use) == _problems(other):
                raise OrreryError(f"tasks.evaluation[{i}]: these are the problems of {path}; give it another seed or split")
    return lines


def _problems(use: TaskUse) -> tuple[str, dict[str, Any], int]:
    """What determines the problems: examples before them do not make them others."""
    if use.kind == "few_shot":
        return use.args["kind"], use.args["args"], use.seed
    return use.kind, use.args, use.seed


@cache
def _task(use: str) -> Task:
    """Manifests share tasks, and a task keeps what it drew: a held-out puzzle can take tenths of a second."""
    return make(TaskUse.model_validate_json(use))


def _longest_prompt_tokens(use: TaskUse, renderer: Renderer, trained_roles: Sequence[Role]) -> int:
    """`trained_roles`: of the demonstrations, where the task gives them."""
    task, longest = _task(use.model_dump_json()), 0
    for index in range(NUM_PROBLEMS):
        problem = task.problem(index)
        longest = max(longest, len(renderer.prompt(problem.messages, problem.tools)))
        for name in [tool.name for tool in problem.tools] + ["no such tool"] * bool(problem.tools):
            nonsense = Message("assistant", "", (ToolCall(name, {"input": "?"}),))
            replies = task.reply(problem, [*problem.messages, nonsense])
            if isinstance(replies, list):
                renderer.next_turn(replies)
        if trained_roles:
            if not hasattr(task, "demonstration"):
                raise OrreryError(
                    f"task {use.name!r}: kind {use.kind} has no demonstrations; use stages.sft.data of kind chat_file or sft: null"
                )
            renderer.example(task.demonstration(index), problem.tools, trained_roles)
    return longest
