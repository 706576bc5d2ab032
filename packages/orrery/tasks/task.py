"""The task protocol: problems, replies and a judge; and the split of problems into two sides.

- A problem is a pure function of (args, seed, index), in any process. All types are JSON.
- `reply` and `judge` may be coroutines. An exception from them is a failure, never a reward of 0.
  A judge must accept any text of a model.
- A function that is not a coroutine blocks the caller's event loop. Slow work, and running a
  model's text, belongs into another process (`scorer_pool.py`).
- The orchestrator calls `problem` in a thread, one call at a time, beside `reply` and `judge`.
"""

import difflib
import hashlib
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.manifest.schema import Record

Role = Literal["system", "user", "assistant", "tool"]
Split = Literal["train", "held_out"]

MAX_DRAWS = 10_000


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call of the assistant. A call of one free text has the arguments `{"input": text}`."""

    name: str
    arguments: dict[str, Any]


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn of a chat. Only the assistant has `tool_calls`; `name` is a tool's name."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None


class Tool(msgspec.Struct, frozen=True):
    """A function offered to the model. `parameters` is a JSON schema of its arguments."""

    name: str
    description: str
    parameters: dict[str, Any]


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """A chat that ends before the assistant speaks, and the answer for the judge (JSON).

    `exact_tokens`: every turn samples exactly so many tokens. None: a stop token ends a turn.
    """

    index: int
    messages: tuple[Message, ...]
    answer: Any
    tools: tuple[Tool, ...] = ()
    exact_tokens: int | None = None


class Judgement(msgspec.Struct, frozen=True):
    """`reward` in [0, 1], and named numbers for the metrics."""

    reward: float
    metrics: dict[str, float]


class JudgeBroken(RunFailed):
    """The judge cannot be trusted, and the run ends. Any other exception costs one rollout."""


@runtime_checkable
class Task(Protocol):
    """Built as `Kind(args, seed)`. `Args`, without defaults, checks the `args` of a `TaskUse`.

    A task may also have `demonstration(index) -> list[Message]`: a whole chat for SFT, judged 1.0.
    """

    Args: type[Record]

    def problem(self, index: int) -> Problem:
        """Return problem `index`, from 0 without end."""

    def reply(
        self, problem: Problem, messages: Sequence[Message]
    ) -> list[Message] | Awaitable[list[Message] | None] | None:
        """Return the reply to the whole chat `messages`, or None if the episode is over."""

    def judge(
        self, problem: Problem, messages: Sequence[Message]
    ) -> Judgement | Awaitable[Judgement]:
        """Judge a finished chat."""


def split_of(text: str) -> Split:
    """Return the side of a problem's text, whatever the seed: one text of eight is held out.

    A text is held out if the first byte of its BLAKE2b digest is below 32.
    """
    return "held_out" if hashlib.blake2b(text.encode()).digest()[0] < 32 else "train"


def draw(
    split: Split, kind: str, seed: int, index: int, sample: Callable[[random.Random], str]
) -> str:
    """Return the first text of `sample` on the side `split`. Pure in (split, kind, seed, index)."""
    rng = random.Random(f"{kind}/{seed}/{index}")
    for _ in range(MAX_DRAWS):
        text = sample(rng)
        if split_of(text) == split:
            return text
    raise OrreryError(
        f"task {kind}: no {split} text in {MAX_DRAWS} draws; the args allow too few texts: "
        "widen the lengths or the alphabet"
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `did you mean 'x'?`, or the first twelve known names if none is near."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    if not known:
        return "there are none"
    return f"choose from {', '.join(known[:12])}{' …' if len(known) > 12 else ''}"
