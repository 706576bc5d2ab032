"""Define the task protocol, and split problems into training and held-out.

- A problem is a pure function of (args, seed, index), with JSON values.
- An exception in `reply` or `judge` fails the rollout. Judges must accept any text.
- `reply` and `judge` run on the orchestrator's event loop. Slow work and code written by a model
  belong in another process (`scorer_pool.py`).
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
HELD_OUT = 1 / 8


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call. Plain-text arguments become `{"input": text}`."""

    name: str
    arguments: dict[str, Any]


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None


class Tool(msgspec.Struct, frozen=True):
    name: str
    description: str
    parameters: dict[str, Any]


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """A chat that ends before the assistant's turn, and the reference answer (JSON).

    `exact_tokens`: length of each assistant turn, or None for turns that end at a stop token.
    """

    index: int
    messages: tuple[Message, ...]
    answer: Any
    tools: tuple[Tool, ...] = ()
    exact_tokens: int | None = None


class Judgement(msgspec.Struct, frozen=True):
    reward: float  # in [0, 1]
    metrics: dict[str, float]


class JudgeBroken(RunFailed):
    """Rewards are wrong, so the run must end."""


@runtime_checkable
class Task(Protocol):
    """A task, built as `Kind(args, seed)`. The Pydantic model `Args` has no defaults.

    An optional `demonstration(index) -> list[Message]` returns a chat of reward 1.0 for SFT.
    """

    Args: type[Record]

    def problem(self, index: int) -> Problem:
        """Return problem `index` ≥ 0."""

    def reply(
        self, problem: Problem, messages: Sequence[Message]
    ) -> list[Message] | Awaitable[list[Message] | None] | None:
        """Return the messages after the model's turn, or None to end the episode."""

    def judge(
        self, problem: Problem, messages: Sequence[Message]
    ) -> Judgement | Awaitable[Judgement]:
        """Return the reward and metrics of a finished chat."""


class SingleTurn:
    def __init__(self, args: Any, seed: int) -> None:
        self.args, self.seed = args, seed

    def reply(self, problem: Problem, messages: Sequence[Message]) -> None:
        return None


def scored(score: float | None) -> Judgement:
    """Return a judgement with the reward `score` clipped to [0, 1], or 0 for None."""
    if score is None:
        return Judgement(0.0, {"exact": 0.0, "unscorable": 1.0})
    reward = min(max(score, 0.0), 1.0)
    return Judgement(reward, {"exact": float(score >= 1.0), "unscorable": 0.0})


def split_of(text: str, held_out: float = HELD_OUT) -> Split:
    """Return a text's split, by its hash. `held_out`: fraction of held-out texts."""
    first = int.from_bytes(hashlib.blake2b(text.encode()).digest()[:4], "big")
    return "held_out" if first < held_out * 2**32 else "train"


def draw(
    split: Split, kind: str, seed: int, index: int, sample: Callable[[random.Random], str]
) -> str:
    rng = random.Random(f"{kind}/{seed}/{index}")
    for _ in range(MAX_DRAWS):
        text = sample(rng)
        if split_of(text) == split:
            return text
    raise OrreryError(
        f"task {kind}: no {split} text in {MAX_DRAWS} draws. The args allow too few texts: "
        "widen the lengths or the alphabet"
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    if not known:
        return "there are none"
    return f"choose from {', '.join(known[:12])}{' …' if len(known) > 12 else ''}"
