"""Any family of the `reasoning-gym` library by name, judged by the family's own scorer. Single turn.

- In: `family` (`leg_counting`, `countdown`, …) and `config`, the family's own options; options left out have the library's defaults,
  which the Python lock pins.
- Problem `index` is item 0 of a dataset whose seed is a hash of (seed, index). The library itself seeds item i with seed + i, so that
  the plain seeds 0 and 1 would share all problems but one. Families with few distinct problems can still repeat one across seeds.
- Reward: the scorer's value, cut to [0, 1], on the text between `<answer>` tags where there are some, else on the whole reply.
  Scorers parse what a model wrote, some with `eval`, so they run in processes of their own (`scorers.py`, with limits). A reply on which
  one raises, ends or takes more than 10 s is a wrong answer (metric `unscorable`).
- Demonstration: the reference answer. Families without one have no demonstrations.
"""

import copy
import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import reasoning_gym as library
from reasoning_gym.factory import DATASETS

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Record
from orrery.tasks.nearest import did_you_mean
from orrery.tasks.scorers import Scorers
from orrery.tasks.task import Judgement, Message, Problem

SCORERS = Scorers()


class ReasoningGym:
    class Args(Record):
        family: str
        config: dict[str, Any]

    def __init__(self, args: Args, seed: int) -> None:
        self.args, self.seed = args, seed
        if args.family not in DATASETS:
            raise OrreryError(f"family: reasoning-gym has no {args.family!r}; {did_you_mean(args.family, DATASETS)}")
        known = {field.name for field in dataclasses.fields(DATASETS[args.family][1])} - {"seed", "size"}
        for name in args.config:
            if name not in known:
                raise OrreryError(f"config: family {args.family} has no option {name!r}; {did_you_mean(name, known)}")
        try:
            self._first, second = self._create(0), self._create(1)
            self._reseeds = self._reseeded(1)[0] == second[0]
        except (AssertionError, TypeError, ValueError) as error:
            raise OrreryError(f"config: family {args.family} refuses {args.config}: {error or type(error).__name__}") from error

    def _create(self, seed: int) -> Any:
        return library.create_dataset(self.args.family, **self.args.config, seed=seed, size=1)

    def _reseeded(self, seed: int) -> Any:
        """The first dataset under another seed, without reading the family's word lists again (70 ms for `spell_backward`)."""
        dataset = copy.copy(self._first)
        dataset.config, dataset.seed = dataclasses.replace(dataset.config, seed=seed), seed
        return dataset

    def _dataset(self, index: int) -> Any:
        seed = int.from_bytes(hashlib.blake2b(f"reasoning_gym/{self.seed}/{index}".encode(), digest_size=4).digest(), "big") >> 1
        return self._reseeded(seed) if self._reseeds else self._create(seed)

    def problem(self, index: int) -> Problem:
        item = self._dataset(index)[0]
        return Problem(index, (Message("user", item["question"]),), answer=item["answer"])

    def reply(self, problem: Problem, messages: Sequence[Message]) -> None:
        return None

    async def judge(self, problem: Problem, messages: Sequence[Message]) -> Judgement:
        args = self.args.model_dump(mode="json")
        score = await SCORERS.score(args["family"], args["config"], self.seed, problem.index, messages[-1].content)
        if score is None:
            return Judgement(0.0, {"exact": 0.0, "unscorable": 1.0})
        return Judgement(min(max(score, 0.0), 1.0), {"exact": float(score >= 1.0), "unscorable": 0.0})

    def score(self, index: int, text: str) -> float:
        """The library's score of a reply to problem `index`. Runs what the policy wrote: for `scoring.py` alone, which has limits."""
        dataset, text = self._dataset(index), text.strip()
        return float(dataset.score_answer(library.utils.extract_answer(text) or text, dataset[0]))

    def demonstration(self, index: int) -> list[Message]:
        problem = self.problem(index)
        if not isinstance(problem.answer, str):
            raise OrreryError(f"task reasoning_gym: family {self.args.family} has no reference answers, so it cannot give demonstrations")
        return [*problem.messages, Message("assistant", problem.answer)]
