"""Another task with solved examples before every problem, for small pretrained models.

- In: `kind` and `args` of the task, `num_examples` of its demonstrations, and `system`, the chat's
  first message (null: none).
- All seeds and splits share the examples, so engines cache this prefix once per policy version. The
  examples are of the training side if the task has a `split`.
"""

from collections.abc import Awaitable, Sequence
from typing import Any

import msgspec

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Count, Record, TaskUse
from orrery.tasks.task import Judgement, Message, Problem

NAME = "few_shot"  # the inner task's name
EXAMPLES_SEED = 30_000  # beyond all problem seeds (jsonnet/lib/run.libsonnet, `seeds`)


class FewShot:
    class Args(Record):
        kind: str
        args: dict[str, Any]
        num_examples: Count
        system: str | None

    def __init__(self, args: Args, seed: int) -> None:
        if args.kind == "few_shot":
            raise OrreryError("kind: few_shot within few_shot; raise num_examples instead")
        self.task = _inner(args.kind, args.args, seed)
        train = {"split": "train"} if "split" in args.args else {}
        examples = _inner(args.kind, args.args | train, EXAMPLES_SEED)
        if not hasattr(examples, "demonstration"):
            raise OrreryError(
                f"kind: {args.kind!r} has no demonstrations to show; use the task itself"
            )
        before = [] if args.system is None else [Message("system", args.system)]
        for index in range(args.num_examples):
            before += examples.demonstration(index)
        self.before = tuple(before)

    def problem(self, index: int) -> Problem:
        problem = self.task.problem(index)
        return msgspec.structs.replace(problem, messages=(*self.before, *problem.messages))

    def reply(
        self, problem: Problem, messages: Sequence[Message]
    ) -> list[Message] | Awaitable[list[Message] | None] | None:
        return self.task.reply(problem, messages)

    def judge(
        self, problem: Problem, messages: Sequence[Message]
    ) -> Judgement | Awaitable[Judgement]:
        return self.task.judge(problem, messages)

    def demonstration(self, index: int) -> list[Message]:
        return [*self.before, *self.task.demonstration(index)]


def _inner(kind: str, args: dict[str, Any], seed: int) -> Any:
    from orrery.tasks import make  # it imports this module

    use = TaskUse(name=NAME, kind=kind, args=args, weight=1.0, seed=seed, max_turns=1)
    try:
        return make(use)
    except OrreryError as error:  # drop the inner task's name
        raise OrreryError(str(error).removeprefix(f"task {NAME!r}: ")) from error
