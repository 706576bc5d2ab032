"""Reverse a random string. Single turn.

- In: `alphabet`, `min_length`, `max_length`, `instruction` before the string, and `split` (the two sides are disjoint: `split.py`).
- Reward: the share of characters in their right place, Σ [reply[i] = answer[i]] / max(len(reply), len(answer)), without surrounding blanks.
- Metrics: `exact` (0 or 1) and `lcs_ratio` = 2·LCS / (len(reply) + len(answer)), the measure that others report for this task.
"""

import random
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, model_validator

from orrery.manifest.schema import Count, Record
from orrery.tasks.split import Split, draw
from orrery.tasks.task import Judgement, Message, Problem


class ReverseText:
    class Args(Record):
        alphabet: Annotated[str, Field(min_length=1)]
        min_length: Count
        max_length: Count
        instruction: str
        split: Split

        @model_validator(mode="after")
        def lengths_rise(self) -> "ReverseText.Args":
            if self.max_length < self.min_length:
                raise ValueError(
                    f"max_length {self.max_length} is below min_length {self.min_length}"
                )
            if len(set(self.alphabet)) < len(self.alphabet) or set(self.alphabet) & set(" \t\n"):
                raise ValueError(
                    f"alphabet {self.alphabet!r} must hold each character once, and no blank"
                )
            return self

    def __init__(self, args: Args, seed: int) -> None:
        self.args, self.seed = args, seed

    def _string(self, rng: random.Random) -> str:
        return "".join(
            rng.choice(self.args.alphabet)
            for _ in range(rng.randint(self.args.min_length, self.args.max_length))
        )

    def problem(self, index: int) -> Problem:
        text = draw(self.args.split, "reverse_text", self.seed, index, self._string)
        return Problem(index, (Message("user", self.args.instruction + text),), answer=text[::-1])

    def reply(self, problem: Problem, messages: Sequence[Message]) -> None:
        return None

    def judge(self, problem: Problem, messages: Sequence[Message]) -> Judgement:
        said, answer = messages[-1].content.strip(), problem.answer
        placed = sum(a == b for a, b in zip(said, answer, strict=False)) / max(
            len(said), len(answer)
        )
        lcs_ratio = 2 * longest_common_subsequence(said, answer) / (len(said) + len(answer))
        return Judgement(placed, {"exact": float(said == answer), "lcs_ratio": lcs_ratio})

    def demonstration(self, index: int) -> list[Message]:
        problem = self.problem(index)
        return [*problem.messages, Message("assistant", problem.answer)]


def longest_common_subsequence(a: str, b: str) -> int:
    """Length of the longest common subsequence, in len(a) · len(b) steps."""
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], diagonal + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]
