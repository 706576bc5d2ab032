"""Another task with solved examples before every problem: how a small pretrained model is told what is wanted.

- In: `kind` and `args` of the task, `num_examples` of its demonstrations, and `system`, the chat's first message (null: none).
- The examples are the same before every problem of every seed and split, so that engines keep them in their prefix cache once a policy
  version. Where the task has a `split`, they are of its training side.
- Replies, rewards and metrics are the task's own.
"""

from collections.abc import Awaitable, Sequence
from typing import Any

import msgspec

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Count, Record, TaskUse
from orrery.tasks.task import Judgement, Message, Problem

NAME = "few_shot"  # the inner task's name
EXAMPLES_SEED = (
    30_000  # beyond the seeds of every stream of problems (jsonnet/lib/run.libsonnet, `seeds`)
)


class FewShot:
    class Args(Record):
        kind: str
        args: dict[str, Any]
        num_examples: Count
        system: str | None

    def __init__(self, args: Args, seed: int) -> None:
        from orrery.tasks import make  # which imports the kinds

        def task(seed: int, **changes: Any) -> Any:
            use = TaskUse(
                name=NAME,
                kind=args.kind,
                args={**args.args, **changes},
                weight=1.0,
                seed=seed,
                max_turns=1,
            )
            try:
                return make(use)
            except OrreryError as error:  # prefix the inner task's fields
                raise OrreryError(str(error).removeprefix(f"task {NAME!r}: ")) from error

        if args.kind == "few_shot":
            raise OrreryError("kind: few_shot within few_shot; raise num_examples instead")
        self.task = task(seed)
        examples = task(EXAMPLES_SEED, **({"split": "train"} if "split" in args.args else {}))
        if not hasattr(examples, "demonstration"):
            raise OrreryError(
                f"kind: {args.kind!r} has no demonstrations to show; use the task itself"
            )
        first = [] if args.system is None else [Message("system", args.system)]
        self.before = (
            *first,
            *(
                message
                for index in range(args.num_examples)
                for message in examples.demonstration(index)
            ),
        )

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
