"""Rollouts of drawn lengths, for measuring: every answer has exactly as many tokens as its problem says, whatever is sampled.

- In: `median_tokens`, `sigma` and `max_tokens` of a log-normal distribution, and `prompt_words`. The longest of a thousand lengths is about
  e^(3.1 · sigma) medians: with `sigma` 1 the tail is twenty times the median.
- Random weights never end a turn, so with them every rollout of another task has its limit's length; real policies have a long tail.
- Every member of a group has the length of its problem. Reward: a hash of what was said, so that there are gradients and nothing to learn.
"""

import hashlib
import math
import random
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, model_validator

from orrery.manifest.schema import Count, PositiveInt, Record
from orrery.tasks.task import Judgement, Message, Problem


class Lengths:
    class Args(Record):
        median_tokens: PositiveInt
        sigma: Annotated[float, Field(ge=0.0, le=10.0)]
        max_tokens: PositiveInt
        prompt_words: Count

        @model_validator(mode="after")
        def median_is_reached(self) -> "Lengths.Args":
            if self.median_tokens > self.max_tokens:
                raise ValueError(
                    f"median_tokens {self.median_tokens} exceeds max_tokens {self.max_tokens}; lower it to at most that"
                )
            return self

    def __init__(self, args: Args, seed: int) -> None:
        self.args, self.seed = args, seed

    def problem(self, index: int) -> Problem:
        rng = random.Random(f"lengths/{self.seed}/{index}")
        drawn = round(self.args.median_tokens * math.exp(rng.gauss(0.0, self.args.sigma)))
        words = " ".join(
            "".join(rng.choice("abcdefghijkl") for _ in range(4))
            for _ in range(self.args.prompt_words)
        )
        num_tokens = min(max(drawn, 1), self.args.max_tokens)
        return Problem(index, (Message("user", words),), answer=None, exact_tokens=num_tokens)

    def reply(self, problem: Problem, messages: Sequence[Message]) -> None:
        return None

    def judge(self, problem: Problem, messages: Sequence[Message]) -> Judgement:
        digest = hashlib.blake2b(
            messages[-1].content.encode(errors="replace"), digest_size=2
        ).digest()
        return Judgement(int.from_bytes(digest, "big") / 65535, {})
