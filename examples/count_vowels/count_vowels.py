"""Count the vowels of a word: a complete task. Its `pyproject.toml` declares the entry point."""

import random
from collections.abc import Sequence

from pydantic import PositiveInt

from orrery.manifest.schema import Record
from orrery.tasks.task import Judgement, Message, Problem


class CountVowels:
    class Args(Record):
        length: PositiveInt

    def __init__(self, args: Args, seed: int) -> None:
        self.args, self.seed = args, seed

    def problem(self, index: int) -> Problem:
        rng = random.Random(f"count_vowels/{self.seed}/{index}")
        word = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(self.args.length))
        return Problem(index, (Message("user", word),), answer=str(sum(c in "aeiou" for c in word)))

    def reply(self, problem: Problem, messages: Sequence[Message]) -> None:
        return None

    def judge(self, problem: Problem, messages: Sequence[Message]) -> Judgement:
        right = messages[-1].content.strip() == problem.answer
        return Judgement(float(right), {"exact": float(right)})

    def demonstration(self, index: int) -> list[Message]:
        problem = self.problem(index)
        return [*problem.messages, Message("assistant", problem.answer)]
