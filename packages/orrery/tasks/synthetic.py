"""Pose single-turn tasks with random text: reverse text, reverse words, sample given lengths.

Reward of a reversal: correctly placed characters or words / max(len(reply), len(answer)).
"""

import hashlib
import math
import random
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, model_validator

from orrery.manifest.schema import Count, PositiveInt, Record
from orrery.tasks.task import Judgement, Message, Problem, SingleTurn, Split, draw

WORDS = (
    "apple", "arm", "baby", "bank", "bird", "boat", "book", "bread", "bridge", "brother", "chair",
    "child", "church", "city", "cloud", "coat", "corn", "cup", "day", "dog", "door", "dream",
    "earth", "egg", "field", "fire", "fish", "flower", "food", "friend", "garden", "glass", "gold",
    "grass", "hand", "hat", "heart", "hill", "home", "horse", "ice", "island", "king", "lake",
    "leaf", "letter", "light", "map", "milk", "money", "moon", "mother", "music", "night", "ocean",
    "paper", "picture", "plant", "queen", "rain", "ring", "river", "road", "salt", "sand", "school",
    "sea", "ship", "shoe", "sky", "smile", "snow", "song", "star", "stone", "street", "sugar",
    "summer", "sun", "table", "teacher", "train", "tree", "village", "wall", "water", "wind",
    "window", "winter", "wood",
)  # fmt: skip


COMPARED = 512  # maximum characters in `lcs_ratio`, whose time is their product


class _Reverse(SingleTurn):
    def problem(self, index: int) -> Problem:
        raise NotImplementedError

    def demonstration(self, index: int) -> list[Message]:
        problem = self.problem(index)
        return [*problem.messages, Message("assistant", problem.answer)]


class ReverseText(_Reverse):
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
                    f"alphabet {self.alphabet!r} must contain each character once, and no blank"
                )
            return self

    def _string(self, rng: random.Random) -> str:
        length = rng.randint(self.args.min_length, self.args.max_length)
        return "".join(rng.choice(self.args.alphabet) for _ in range(length))

    def problem(self, index: int) -> Problem:
        text = draw(self.args.split, "reverse_text", self.seed, index, self._string)
        return Problem(index, (Message("user", self.args.instruction + text),), answer=text[::-1])

    def judge(self, problem: Problem, messages: Sequence[Message]) -> Judgement:
        reply, answer = messages[-1].content.strip(), problem.answer
        a, b = reply[:COMPARED], answer[:COMPARED]
        lcs_ratio = 2 * longest_common_subsequence(a, b) / (len(a) + len(b))
        metrics = {"exact": float(reply == answer), "lcs_ratio": lcs_ratio}
        return Judgement(_share_in_place(reply, answer), metrics)


class ReverseWords(_Reverse):
    class Args(Record):
        min_words: PositiveInt
        max_words: PositiveInt
        instruction: str
        split: Split

        @model_validator(mode="after")
        def numbers_rise(self) -> "ReverseWords.Args":
            if not self.min_words <= self.max_words <= len(WORDS):
                raise ValueError(
                    f"min_words {self.min_words} must be at most max_words {self.max_words}, and "
                    f"max_words at most {len(WORDS)}"
                )
            return self

    def _text(self, rng: random.Random) -> str:
        return " ".join(rng.sample(WORDS, rng.randint(self.args.min_words, self.args.max_words)))

    def problem(self, index: int) -> Problem:
        text = draw(self.args.split, "reverse_words", self.seed, index, self._text)
        answer = " ".join(reversed(text.split()))
        return Problem(index, (Message("user", self.args.instruction + text),), answer=answer)

    def judge(self, problem: Problem, messages: Sequence[Message]) -> Judgement:
        reply, answer = messages[-1].content.split(), problem.answer.split()
        return Judgement(_share_in_place(reply, answer), {"exact": float(reply == answer)})


def _share_in_place(reply: Sequence[str], answer: Sequence[str]) -> float:
    num_right = sum(a == b for a, b in zip(reply, answer, strict=False))
    return num_right / max(len(reply), len(answer))


def longest_common_subsequence(a: str, b: str) -> int:
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], diagonal + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


class Lengths(SingleTurn):
    """Sample answers of given lengths, to measure speed.

    Each problem draws a log-normal length for all its answers. The reward is a hash of the answer,
    so rewards differ within a group.
    """

    class Args(Record):
        median_tokens: PositiveInt
        sigma: Annotated[float, Field(ge=0.0, le=10.0)]
        max_tokens: PositiveInt
        prompt_words: Count

        @model_validator(mode="after")
        def median_is_reached(self) -> "Lengths.Args":
            if self.median_tokens > self.max_tokens:
                raise ValueError(
                    f"median_tokens {self.median_tokens} exceeds max_tokens {self.max_tokens}. "
                    "Lower it to at most that"
                )
            return self

    def problem(self, index: int) -> Problem:
        rng = random.Random(f"lengths/{self.seed}/{index}")
        drawn = round(self.args.median_tokens * math.exp(rng.gauss(0.0, self.args.sigma)))
        words = " ".join(
            "".join(rng.choice("abcdefghijkl") for _ in range(4))
            for _ in range(self.args.prompt_words)
        )
        num_tokens = min(max(drawn, 1), self.args.max_tokens)
        return Problem(index, (Message("user", words),), answer=None, exact_tokens=num_tokens)

    def judge(self, problem: Problem, messages: Sequence[Message]) -> Judgement:
        text = messages[-1].content.encode(errors="replace")
        digest = hashlib.blake2b(text, digest_size=2).digest()
        return Judgement(int.from_bytes(digest, "big") / 65535, {})
