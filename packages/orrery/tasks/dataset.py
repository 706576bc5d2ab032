"""Problems with answers from a file: JSONL, JSON, CSV, Parquet, or a fetched dataset.

- `prompt` and `answer` are templates over columns: `{question}`. A prompt that is one column
  may hold chat messages. `answer_pattern` cuts the answer out of a longer text.
- `held_out` says which rows train and which evaluate. `split` chooses the side.
- Each epoch has an order of its own, a function of (seed, epoch).
- A reply is judged in an isolated process (`scorer_pool.py`). A reply without a verdict is wrong
  (metric `unscorable`).
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import Field, model_validator

from orrery.manifest.errors import OrreryError
from orrery.manifest.publish import sha256_of_data
from orrery.manifest.schema import Record
from orrery.manifest.schema.model import Sha256
from orrery.tasks.rows import DataRows, open_rows, sides
from orrery.tasks.scorer_pool import SCORERS
from orrery.tasks.task import Judgement, Message, Problem, Role, Split, did_you_mean
from orrery.tasks.verdicts import Verdict, scorer_of

COLUMN = re.compile(r"\{([A-Za-z_][^{}]*)\}")
FIELD = re.compile(r"\{\{|\}\}|" + COLUMN.pattern)
SHOWN = 3  # rows in an error message
KEPT = 8192  # more than the rollouts in flight


def columns_of(template: str) -> list[str]:
    """Return the columns that a template names."""
    return [found[1] for found in FIELD.finditer(template) if found[1]]


class ProblemFile(Record):
    """A file, or a folder's `split`. `sha256` is that of `digest.sha256_of_data`."""

    kind: Literal["source"]
    path: str
    sha256: Sha256
    split: str | None

    def open(self) -> DataRows:
        try:
            found = sha256_of_data(Path(self.path))
        except OSError as error:
            raise OrreryError(
                f"path: {self.path}: {error.strerror}; name a file or a folder of problems"
            ) from error
        if found != self.sha256:
            raise OrreryError(
                f"sha256: {self.path} has {found}, the manifest says {self.sha256}; write the new "
                "one into the spec, or restore the old file"
            )
        rows = open_rows(Path(self.path), self.split)
        if not len(rows):
            raise OrreryError(f"path: {self.path} holds no row; write one problem a line")
        return rows


class Fraction(Record):
    """Rows are held out by the hash of their prompt, so that equal prompts are on one side."""

    kind: Literal["fraction"]
    fraction: Annotated[float, Field(gt=0.0, lt=1.0)]


class Column(Record):
    """Rows whose `column` is one of `values` are held out."""

    kind: Literal["column"]
    column: str
    values: Annotated[tuple[str | int | bool, ...], Field(min_length=1, strict=False)]


class Dataset:
    class Args(Record):
        source: ProblemFile
        held_out: Annotated[Fraction | Column | ProblemFile, Field(discriminator="kind")]
        split: Split
        where: dict[str, Annotated[tuple[str | int | bool, ...], Field(strict=False)]]
        system: str | None
        prompt: str
        answer: str
        answer_pattern: str | None
        verdict: Verdict

        @model_validator(mode="after")
        def _patterns(self) -> "Dataset.Args":
            if self.answer_pattern is not None and re.compile(self.answer_pattern).groups != 1:
                raise ValueError(
                    f"answer_pattern {self.answer_pattern!r} needs one group, (…) around the answer"
                )
            for name in ("prompt", "answer"):
                if not columns_of(getattr(self, name)):
                    raise ValueError(f"{name} {getattr(self, name)!r} names no column; write {{…}}")
            return self

    def __init__(self, args: Args, seed: int) -> None:
        self.args, self.seed = args, seed
        self._rows = self._source.open()
        self._check_columns()
        self._kept = np.asarray(list(self._side()), dtype=np.int64)
        if not len(self._kept):
            raise OrreryError(
                f"split: no row of {self._source.path} is on the side {args.split!r}; "
                "change held_out or where"
            )
        self._made = lru_cache(KEPT)(self._make)
        self._order = lru_cache(4)(self._shuffled)

    @property
    def _source(self) -> ProblemFile:
        held_out = self.args.held_out
        if isinstance(held_out, ProblemFile) and self.args.split == "held_out":
            return held_out
        return self.args.source

    def _side(self) -> Iterable[int]:
        held_out, on_side = self.args.held_out, self.args.split == "held_out"
        falls: Iterable[bool]
        if isinstance(held_out, Fraction):
            falls = sides(len(self._rows), held_out.fraction, self._prompt_text)
        elif isinstance(held_out, Column):
            name, values = held_out.column, held_out.values
            falls = (self._value(i, name) in values for i in range(len(self._rows)))
        else:
            falls = (on_side for _ in range(len(self._rows)))
        for index, is_held_out in enumerate(falls):
            if is_held_out == on_side and self._passes(index):
                yield index

    def _passes(self, index: int) -> bool:
        return all(self._value(index, name) in kept for name, kept in self.args.where.items())

    def _check_columns(self) -> None:
        """Raise OrreryError if rows lack a column that a template, filter or split names."""
        columns = [*columns_of(self.args.prompt), *columns_of(self.args.answer), *self.args.where]
        if isinstance(self.args.held_out, Column):
            columns.append(self.args.held_out.column)
        lacks: dict[str, list[int]] = {}
        for index in range(len(self._rows)):
            row = self._row(index)
            for name in columns:
                if name not in row:
                    lacks.setdefault(name, []).append(index)
        for name, rows in lacks.items():
            near = did_you_mean(name, self._row(rows[0]))
            advice = f"correct the template or add the column; {near}"
            kind = f"lack the column {name!r}"
            raise OrreryError(self._sentence(kind, rows, advice, len(self._rows)))

    def _row(self, index: int) -> dict[str, Any]:
        try:
            return self._rows[index]
        except ValueError as error:
            raise OrreryError(
                f"source: {self._rows.place(index)}: {error}; correct the row"
            ) from error

    def _value(self, index: int, name: str) -> Any:
        return self._row(index)[name]

    def _text(self, index: int, template: str) -> str:
        """Fill the columns into a template. Doubled braces stand for one."""

        def fill(found: re.Match[str]) -> str:
            return str(self._value(index, found[1])) if found[1] else found[0][0]

        return FIELD.sub(fill, template)

    def _prompt_text(self, index: int) -> str:
        return self._text(index, self.args.prompt)

    def _messages(self, index: int) -> tuple[Message, ...]:
        before = [] if self.args.system is None else [Message("system", self.args.system)]
        whole = COLUMN.fullmatch(self.args.prompt)
        if whole and isinstance(given := self._value(index, whole[1]), list):
            return (*before, *map(self._message, given))
        return (*before, Message("user", self._prompt_text(index)))

    def _message(self, given: Any) -> Message:
        match given:
            case {"role": str(role), "content": str(content)} if role in get_args(Role):
                return Message(role, content)  # type: ignore[arg-type] # one of Role
        raise OrreryError(f'prompt: {given!r} is no message {{"role": …, "content": …}}')

    def _answer(self, index: int) -> str:
        """Return the reference answer. Raise OrreryError if `answer_pattern` does not match."""
        text = self._text(index, self.args.answer)
        if self.args.answer_pattern is None:
            return text.strip()
        found = re.findall(self.args.answer_pattern, text)
        if not found:
            raise OrreryError(
                f"source: {self._rows.place(index)}: answer_pattern {self.args.answer_pattern!r} "
                f"is not found in {text[-60:]!r}; correct the pattern or the row"
            )
        return found[-1].strip()

    def _shuffled(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(self._kept)

    def _place(self, index: int) -> int:
        epoch, at = divmod(index, len(self._kept))
        return int(self._order(epoch)[at])

    def _make(self, index: int) -> Problem:
        at = self._place(index)
        return Problem(index, self._messages(at), answer=self._answer(at))

    def problem(self, index: int) -> Problem:
        return self._made(index)

    def reply(self, problem: Problem, messages: Sequence[Message]) -> None:
        return None

    async def judge(self, problem: Problem, messages: Sequence[Message]) -> Judgement:
        request = self._request(self._place(problem.index), problem.answer)
        score = await SCORERS.score("verdict", request, messages[-1].content)
        if score is None:
            return Judgement(0.0, {"exact": 0.0, "unscorable": 1.0})
        reward = min(max(float(score), 0.0), 1.0)
        return Judgement(reward, {"exact": float(score >= 1.0), "unscorable": 0.0})

    def _request(self, at: int, answer: str) -> dict[str, Any]:
        row = self._row(at) if self.args.verdict.kind == "python" else None
        return {"verdict": self.args.verdict.model_dump(), "answer": answer, "row": row}

    def demonstration(self, index: int) -> list[Message]:
        at = self._place(index)
        reply = self._text(at, self.args.answer)
        return [*self._messages(at), Message("assistant", reply)]

    def check_rows(self, tokens: Callable[[Problem], int] | None, most_tokens: int) -> int:
        """Check every row of the side, and return how many there are.

        `tokens` counts a problem's prompt. Raise OrreryError with a count and the first rows if
        columns lack, answers are empty or wrong by their own verdict, prompts stand on both sides
        or are longer than `most_tokens`.
        """
        found: dict[str, list[int]] = {}
        reasons: dict[str, str] = {}
        for at in map(int, self._kept):
            misfit = self._misfit(at, tokens, most_tokens)
            if misfit is not None:
                kind, reason = misfit
                found.setdefault(kind, []).append(at)
                reasons.setdefault(kind, reason)
        for kind, rows in found.items():
            raise OrreryError(self._sentence(kind, rows, reasons[kind], len(self._kept)))
        if isinstance(self.args.held_out, ProblemFile | Column):
            self._check_sides()
        return len(self._kept)

    def _misfit(
        self, at: int, tokens: Callable[[Problem], int] | None, most_tokens: int
    ) -> tuple[str, str] | None:
        """Return the kind of row `at`'s misfit and its first reason with the next step."""
        try:
            problem = Problem(at, self._messages(at), answer=self._answer(at))
        except OrreryError as error:
            return "cannot be read", str(error)
        if not problem.answer:
            return "have an empty answer", "fill it, or leave these rows out by `where`"
        if not any(message.content.strip() for message in problem.messages):
            return "have an empty prompt", "fill it, or leave these rows out by `where`"
        if (reason := self._self_judged(at, problem.answer)) is not None:
            return "have an answer that the verdict calls wrong", reason
        if tokens is not None and (length := tokens(problem)) > most_tokens:
            return (
                "have a prompt that is too long",
                f"the first has {length} tokens, and {most_tokens} fit beside a turn; "
                "raise context_tokens, or leave these rows out by `where`",
            )
        return None

    def _self_judged(self, at: int, answer: str) -> str | None:
        """Return why the verdict refuses the row's own answer, or None."""
        verdict = self.args.verdict
        try:
            scorer = scorer_of(self._request(at, answer))
            if verdict.kind in ("json_schema", "python"):  # the answer is not a reply
                return None
            reply = f"\\boxed{{{answer}}}" if verdict.kind == "math" else answer
            if verdict.kind in ("exact", "pattern") and verdict.pattern is not None:
                reply = self._text(at, self.args.answer)
            right = scorer(reply) == 1.0
        except OrreryError:
            raise
        except Exception as error:  # a library's parser
            return f"{error}; correct the answer or the verdict"
        return None if right else f"the first is {answer!r}; correct it, or choose another verdict"

    def _check_sides(self) -> None:
        other: Split = "train" if self.args.split == "held_out" else "held_out"
        if other == "held_out":
            return  # the held-out side's check finds the same pairs
        sibling = Dataset(self.args.model_copy(update={"split": other}), self.seed)
        trained = {sibling._prompt_text(int(at)) for at in sibling._kept}
        both = [int(at) for at in self._kept if self._prompt_text(int(at)) in trained]
        if both:
            advice = "leave them out of one side, or use held_out of kind fraction"
            raise OrreryError(
                self._sentence("are training rows too", both, advice, len(self._kept))
            )

    def _sentence(self, kind: str, rows: list[int], advice: str, num_rows: int) -> str:
        places = ", ".join(self._rows.place(at) for at in rows[:SHOWN])
        more = ", …" if len(rows) > SHOWN else ""
        return f"source: {len(rows)} of {num_rows} rows {kind} ({places}{more}): {advice}"
