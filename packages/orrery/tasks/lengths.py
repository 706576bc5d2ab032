"""Answers of exactly drawn lengths, to measure speed.

- Lengths are log-normal by `median_tokens` and `sigma`, at most `max_tokens`. The longest of a
  thousand is about e^(3.1 · sigma) medians. Random weights never end a turn by themselves.
- All members of a group have the same length. The reward is a hash of the answer, for gradients.
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
                    f"median_tokens {self.median_tokens} exceeds max_tokens {self.max_tokens}; "
                    "lower it to at most that"
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
        text = messages[-1].content.encode(errors="replace")
        digest = hashlib.blake2b(text, digest_size=2).digest()
        return Judgement(int.from_bytes(digest, "big") / 65535, {})
