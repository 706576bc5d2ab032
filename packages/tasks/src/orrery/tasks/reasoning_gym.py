"""Any family of the `reasoning-gym` library by name, judged by the family's own scorer. Single turn.

- In: `family` (`leg_counting`, `countdown`, …), `config`, the family's own options, and `split` (the two sides are disjoint: `split.py`);
  options left out have the library's defaults, which the Python lock pins.
- Problem `index` is item 0 of the first dataset whose question stands in `split`, of those whose seeds are hashes of (seed, index, draw).
  The library itself seeds item i with seed + i, so that the plain seeds 0 and 1 would share all problems but one. Families with few
  distinct problems can still repeat one across the seeds of a side.
- A held-out problem takes eight draws in the mean: tenths of a second where the family makes hard puzzles.
- Reward: the scorer's value, cut to [0, 1], on the text between `<answer>` tags where there are some, else on the whole reply.
  Scorers parse what a model wrote, some with `eval`, so each reply has a process of its own (`scorers.py`, with limits). A reply on which
  one raises, ends or takes more than 5 s is a wrong answer (metric `unscorable`).
- Demonstration: the reference answer. Families without one have no demonstrations.
"""

import copy
import dataclasses
import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import reasoning_gym as library
from reasoning_gym.factory import DATASETS

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Record
from orrery.tasks.nearest import did_you_mean
from orrery.tasks.scorers import Scorers
from orrery.tasks.split import Split, split_of
from orrery.tasks.task import Judgement, Message, Problem

MAX_DRAWS = (
    1000  # a question can take half a second to make; seven of eight are of the training side
)
KEPT_DRAWS = 8192  # more than have rollouts in flight, so that a judge, which runs in the event loop, does not draw again
SCORERS = Scorers()


class Family:
    """A family of the library under a config: its dataset of one problem for any of the library's seeds."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self.name, self.config = name, config
        if name not in DATASETS:
            raise OrreryError(
                f"family: reasoning-gym has no {name!r}; {did_you_mean(name, DATASETS)}"
            )
        known = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"}
        for option in config:
            if option not in known:
                raise OrreryError(
                    f"config: family {name} has no option {option!r}; {did_you_mean(option, known)}"
                )
        try:
            self._first, second = self._create(0), self._create(1)
            self._reseeds = self._reseeded(1)[0] == second[0]
        except (AssertionError, TypeError, ValueError) as error:
            raise OrreryError(
                f"config: family {name} refuses {config}: {error or type(error).__name__}"
            ) from error

    def dataset(self, seed: int) -> Any:
        return self._reseeded(seed) if self._reseeds else self._create(seed)

    def _create(self, seed: int) -> Any:
        return library.create_dataset(self.name, **self.config, seed=seed, size=1)

    def _reseeded(self, seed: int) -> Any:
        """The first dataset under another seed, without reading the family's word lists again (70 ms for `spell_backward`)."""
        dataset = copy.copy(self._first)
        dataset.config, dataset.seed = dataclasses.replace(dataset.config, seed=seed), seed
        return dataset


class ReasoningGym:
    class Args(Record):
        family: str
        config: dict[str, Any]
        split: Split

    def __init__(self, args: Args, seed: int) -> None:
        self.args, self.seed = args, seed
        self._family = Family(args.family, args.config)
        self._drawn = lru_cache(KEPT_DRAWS)(self._draw)

    def _draw(self, index: int) -> tuple[int, dict[str, Any]]:
        """The library's seed of problem `index`, and the problem."""
        for draw in range(MAX_DRAWS):
            digest = hashlib.blake2b(
                f"reasoning_gym/{self.seed}/{index}/{draw}".encode(), digest_size=4
            ).digest()
            seed = int.from_bytes(digest, "big") >> 1
            item = self._family.dataset(seed)[0]
            if split_of(item["question"]) == self.args.split:
                return seed, item
        raise OrreryError(
            f"task reasoning_gym: no {self.args.split} question of family {self.args.family} in {MAX_DRAWS} draws; "
            f"config {self.args.config} allows too few: widen it"
        )

    def problem(self, index: int) -> Problem:
        item = self._drawn(index)[1]
        return Problem(index, (Message("user", item["question"]),), answer=item["answer"])

    def reply(self, problem: Problem, messages: Sequence[Message]) -> None:
        return None

    async def judge(self, problem: Problem, messages: Sequence[Message]) -> Judgement:
        seed, item = self._drawn(problem.index)
        score = await SCORERS.score(
            self.args.family, self.args.config, seed, item["question"], messages[-1].content
        )
        if score is None:
            return Judgement(0.0, {"exact": 0.0, "unscorable": 1.0})
        return Judgement(
            min(max(score, 0.0), 1.0), {"exact": float(score >= 1.0), "unscorable": 0.0}
        )

    def demonstration(self, index: int) -> list[Message]:
        problem = self.problem(index)
        if not isinstance(problem.answer, str):
            raise OrreryError(
                f"task reasoning_gym: family {self.args.family} has no reference answers, so it cannot give demonstrations"
            )
        return [*problem.messages, Message("assistant", problem.answer)]
