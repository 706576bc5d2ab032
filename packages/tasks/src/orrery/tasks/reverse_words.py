"""Write words in reverse order. Single turn; for pretrained tokenizers, to whose tokens single characters say little.

- In: `min_words`, `max_words`, `instruction` before the words, and `split` (the two sides are disjoint: `split.py`).
- Reward: the share of words in their right place, Σ [reply[i] = answer[i]] / max(words of the reply, words of the answer). Metric: `exact`.
"""

import random
from collections.abc import Sequence

from pydantic import model_validator

from orrery.manifest.schema import PositiveInt, Record
from orrery.tasks.split import Split, draw
from orrery.tasks.task import Judgement, Message, Problem

WORDS = (
    "apple", "arm", "baby", "bank", "bird", "boat", "book", "bread", "bridge", "brother", "chair", "child", "church", "city", "cloud",
    "coat", "corn", "cup", "day", "dog", "door", "dream", "earth", "egg", "field", "fire", "fish", "flower", "food", "friend",
    "garden", "glass", "gold", "grass", "hand", "hat", "heart", "hill", "home", "horse", "ice", "island", "king", "lake", "leaf",
    "letter", "light", "map", "milk", "money", "moon", "mother", "music", "night", "ocean", "paper", "picture", "plant", "queen",
    "rain", "ring", "river", "road", "salt", "sand", "school", "sea", "ship", "shoe", "sky", "smile", "snow", "song", "star", "stone",
    "street", "sugar", "summer", "sun", "table", "teacher", "train", "tree", "village", "wall", "water", "wind", "window", "winter",
    "wood",
)  # fmt: skip


class ReverseWords:
    class Args(Record):
        min_words: PositiveInt
        max_words: PositiveInt
        instruction: str
        split: Split

        @model_validator(mode="after")
        def numbers_rise(self) -> "ReverseWords.Args":
            if not self.min_words <= self.max_words <= len(WORDS):
                raise ValueError(
                    f"min_words {self.min_words} and max_words {self.max_words} do not rise, up to {len(WORDS)} at most"
                )
            return self

    def __init__(self, args: Args, seed: int) -> None:
        self.args, self.seed = args, seed

    def _text(self, rng: random.Random) -> str:
        return " ".join(rng.sample(WORDS, rng.randint(self.args.min_words, self.args.max_words)))

    def problem(self, index: int) -> Problem:
        text = draw(self.args.split, "reverse_words", self.seed, index, self._text)
        return Problem(
            index,
            (Message("user", self.args.instruction + text),),
            answer=" ".join(reversed(text.split())),
        )

    def reply(self, problem: Problem, messages: Sequence[Message]) -> None:
        return None

    def judge(self, problem: Problem, messages: Sequence[Message]) -> Judgement:
        said, answer = messages[-1].content.split(), problem.answer.split()
        placed = sum(a == b for a, b in zip(said, answer, strict=False)) / max(
            len(said), len(answer)
        )
        return Judgement(placed, {"exact": float(said == answer)})

    def demonstration(self, index: int) -> list[Message]:
        problem = self.problem(index)
        return [*problem.messages, Message("assistant", problem.answer)]
