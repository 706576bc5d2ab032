"""Pose and judge single-turn problems of a family of `reasoning-gym`.

- Each problem is item 0 of a dataset with a separate seed. Items 1, 2, … repeat item 0 of the
  next seeds.
- Reward: the library's score of the text in `<answer>` tags or, without tags, of the reply.
"""

import copy
import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import reasoning_gym as library
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Record
from orrery.tasks.scorer_pool import HASH_SEED, SCORERS
from orrery.tasks.task import (
    Judgement,
    Message,
    Problem,
    SingleTurn,
    Split,
    did_you_mean,
    scored,
    split_of,
)

MAX_DRAWS = 1000
KEPT_DRAWS = 8192  # more than rollouts in flight


class Family:
    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self.name, self.config = name, config
        if name not in DATASETS:
            raise OrreryError(
                f"family: reasoning-gym has no {name!r}; {did_you_mean(name, DATASETS)}"
            )
        known = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"}
        for option in config:
            if option not in known:
                nearest = did_you_mean(option, known)
                raise OrreryError(f"config: family {name} has no option {option!r}; {nearest}")
        try:
            self._first, second = self._create(0), self._create(1)
            self._reseeds = self._reseeded(1)[0] == second[0]
        except (AssertionError, TypeError, ValueError) as error:
            reason = error or type(error).__name__
            raise OrreryError(f"config: family {name} refuses {config}: {reason}") from error

    def dataset(self, seed: int) -> Any:
        return self._reseeded(seed) if self._reseeds else self._create(seed)

    def _create(self, seed: int) -> Any:
        return library.create_dataset(self.name, **self.config, seed=seed, size=1)

    def _reseeded(self, seed: int) -> Any:
        """Return a dataset with `seed`, without reading files again."""
        dataset = copy.copy(self._first)
        dataset.config, dataset.seed = dataclasses.replace(dataset.config, seed=seed), seed
        return dataset


class ReasoningGym(SingleTurn):
    class Args(Record):
        family: str
        config: dict[str, Any]
        split: Split

    def __init__(self, args: Args, seed: int) -> None:
        super().__init__(args, seed)
        self._family = Family(args.family, args.config)
        self._drawn = lru_cache(KEPT_DRAWS)(self._draw)

    def _draw(self, index: int) -> tuple[int, dict[str, Any]]:
        for draw in range(MAX_DRAWS):
            text = f"reasoning_gym/{self.seed}/{index}/{draw}"
            digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
            seed = int.from_bytes(digest, "big") >> 1
            item = self._family.dataset(seed)[0]
            if split_of(item["question"]) == self.args.split:
                return seed, item
        raise OrreryError(
            f"task reasoning_gym: no {self.args.split} question of family {self.args.family} in "
            f"{MAX_DRAWS} draws. Config {self.args.config} allows too few questions: widen it"
        )

    def problem(self, index: int) -> Problem:
        item = self._drawn(index)[1]
        return Problem(index, (Message("user", item["question"]),), answer=item["answer"])

    async def judge(self, problem: Problem, messages: Sequence[Message]) -> Judgement:
        seed, item = self._drawn(problem.index)
        family, config, text = self.args.family, self.args.config, messages[-1].content
        request = [family, config, seed, item["question"]]
        return scored(await SCORERS.score("reasoning_gym", request, text))

    def demonstration(self, index: int) -> list[Message]:
        problem = self.problem(index)
        if not isinstance(problem.answer, str):
            raise OrreryError(
                f"task reasoning_gym: family {self.args.family} has no reference answers, "
                "so it cannot give demonstrations"
            )
        return [*problem.messages, Message("assistant", problem.answer)]


def scorer_of(request: list[Any]) -> Callable[[str], float]:
    """Return the library's scorer for a request [family, config, seed, question].

    Raise OrreryError if the seed gives another question in this process.
    """
    name, config, seed, question = request
    dataset = _family(name, json.dumps(config)).dataset(seed)
    item = dataset[0]
    if item["question"] != question:
        raise OrreryError(
            f"family {name}: two processes make different problems of seed {seed}. "
            f"Set PYTHONHASHSEED={HASH_SEED}"
        )
    return lambda text: float(dataset.score_answer(extract_answer(text) or text, item))


@cache
def _family(name: str, config: str) -> Family:
    return Family(name, json.loads(config))
