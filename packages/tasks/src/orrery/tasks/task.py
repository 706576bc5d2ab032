"""What a task is: problems, the environment's replies, and a judge.

- A task is pure and deterministic given (args, seed, index): the same three give the same problem in any process.
- Every type here is JSON through msgspec (`msgspec.json.encode`), so that it can stand in a checkpoint or in a file of samples.
- `reply` and `judge` may be coroutines. An exception from them is a failure of the infrastructure and never a reward of 0:
  whatever the model wrote, a judge answers.
- The caller's event loop stands still while one that is no coroutine runs. What may take long, or runs what a model wrote, is a coroutine
  that waits for another process (`scorers.py`).
- The orchestrator calls `problem` in a thread of its own, one call at a time, beside `reply` and `judge`, which run in the event loop's.
"""

from collections.abc import Awaitable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from orrery.manifest.errors import RunFailed
from orrery.manifest.schema import Record

Role = Literal["system", "user", "assistant", "tool"]


class ToolCall(msgspec.Struct, frozen=True):
    """A tool that the assistant asks for. A call of one free text has the arguments `{"input": text}`."""

    name: str
    arguments: dict[str, Any]


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn of a chat; `tool_calls` only where the role is assistant, `name` (the tool's) only where it is tool."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None


class Tool(msgspec.Struct, frozen=True):
    """A function offered to the model; `parameters` is a JSON schema of its arguments."""

    name: str
    description: str
    parameters: dict[str, Any]


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """The chat so far, ending before the assistant speaks, and the answer that the judge compares with (JSON).

    `exact_tokens`: every turn has so many sampled tokens, no more and no less, whatever they are; None: it ends with a stop token.
    """

    index: int
    messages: tuple[Message, ...]
    answer: Any
    tools: tuple[Tool, ...] = ()
    exact_tokens: int | None = None


class Judgement(msgspec.Struct, frozen=True):
    """`reward` in [0, 1] and named numbers beside it."""

    reward: float
    metrics: dict[str, float]


class JudgeBroken(RunFailed):
    """The judge cannot be trusted, and the run ends. Any other exception costs one rollout."""


@runtime_checkable
class Task(Protocol):
    """Built as `Kind(args, seed)`; `Args` is the record (no defaults) that `args` of a `TaskUse` must fit.

    A task that can also show how it is done has `demonstration(index) -> list[Message]`: the whole chat, for SFT, judged 1.0.
    """

    Args: type[Record]

    def problem(self, index: int) -> Problem:
        """Problem number `index` (from 0, without end)."""

    def reply(
        self, problem: Problem, messages: Sequence[Message]
    ) -> list[Message] | Awaitable[list[Message] | None] | None:
        """What the environment says after the assistant's last message of `messages` (the whole chat); None: the episode is over."""

    def judge(
        self, problem: Problem, messages: Sequence[Message]
    ) -> Judgement | Awaitable[Judgement]:
        """The verdict on a finished chat."""
