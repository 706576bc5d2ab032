"""Pose the problems of a JSONL, JSON, CSV or Parquet file, or of a fetched dataset.

`docs/datasets.md` describes the arguments. `held_out` divides the rows into a training and a
held-out side, and `split` chooses one.
"""

import hashlib
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import Field, model_validator

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Record
from orrery.manifest.schema.model import Sha256
from orrery.manifest.shards import check_held, checked_sha256
from orrery.runtime.timing import scaled
from orrery.tasks.rows import DataRows, open_rows
from orrery.tasks.scorer_pool import MEMORY_BYTES, SCORERS
from orrery.tasks.task import (
    Judgement,
    Message,
    Problem,
    Role,
    SingleTurn,
    Split,
    scored,
    split_of,
)
from orrery.tasks.verdicts import Verdict, compiled, scorer_of, told

COLUMN = re.compile(r"\{([A-Za-z_][^{}]*)\}")
FIELD = re.compile(r"\{\{|\}\}|" + COLUMN.pattern)
SHOWN = 3  # maximum rows in an error
TRIED = 16  # rows that test a user's reward function
LONG_ANSWER = 4  # answers of so many words seem to hold a derivation
KEPT = 8192  # cached problems, more than rollouts in flight


def columns_of(template: str) -> list[str]:
    return [found[1] for found in FIELD.finditer(template) if found[1]]


def written(value: Any) -> str:
    if isinstance(value, dict | list | bool):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def filled(template: str, row: dict[str, Any], text: Callable[[Any], str] = written) -> str:
    """Replace each `{column}` by `text(row[column])`. Doubled braces become single."""

    def fill(found: re.Match[str]) -> str:
        if not found[1]:
            return found[0][0]
        return "" if row[found[1]] is None else text(row[found[1]])

    return FIELD.sub(fill, template)


class ProblemFile(Record):
    kind: Literal["source"]
    path: str
    sha256: Sha256
    split: str | None

    def open(self) -> DataRows:
        try:
            found = checked_sha256(Path(self.path))
        except OSError as error:
            raise OrreryError(
                f"path: {self.path}: {error.strerror}. Name a file or a folder of problems"
            ) from error
        if found != self.sha256:
            raise OrreryError(
                f"sha256: {self.path} has {found}, the manifest says {self.sha256}. Write the new "
                "sha256 into the spec, or restore the old file"
            )
        check_held(Path(self.path), self.split)
        rows = open_rows(Path(self.path), self.split)
        if not len(rows):
            raise OrreryError(f"path: {self.path} has no rows. Write one problem a line")
        return rows


class Fraction(Record):
    """Hold out rows by the filled prompt's hash, so equal prompts share a side."""

    kind: Literal["fraction"]
    fraction: Annotated[float, Field(gt=0.0, lt=1.0)]


class Column(Record):
    kind: Literal["column"]
    column: str
    values: Annotated[tuple[str | int | bool, ...], Field(min_length=1, strict=False)]


class Dataset(SingleTurn):
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
            if self.answer_pattern is not None and compiled(self.answer_pattern, 0).groups != 1:
                raise ValueError(
                    f"answer_pattern {self.answer_pattern!r} needs one group, (…) around the answer"
                )
            for name in ("prompt", "answer"):
                if not columns_of(getattr(self, name)):
                    raise ValueError(f"{name} {getattr(self, name)!r} names no column. Write {{…}}")
            return self

    def __init__(self, args: Args, seed: int) -> None:
        super().__init__(args, seed)
        own_file = isinstance(args.held_out, ProblemFile) and args.split == "held_out"
        field = "held_out" if own_file else "source"
        file: ProblemFile = getattr(args, field)
        try:
            self._rows = file.open()
        except OrreryError as error:
            raise OrreryError(f"{field}.{error}") from error
        self._kept = np.asarray(self._side(), dtype=np.int64)
        if not len(self._kept):
            raise OrreryError(
                f"split: no row of {file.path} is on the side {args.split!r}. "
                "Change held_out or where"
            )
        self._tried = set(self._kept[:TRIED].tolist())
        self._made = lru_cache(KEPT)(self._make)
        self._order = lru_cache(4)(self._shuffled)

    def _side(self) -> list[int]:
        fields: dict[str, Collection[str]] = {
            name: columns_of(getattr(self.args, name)) for name in ("prompt", "answer")
        }
        fields["where"] = self.args.where
        if isinstance(self.args.held_out, Column):
            fields["held_out"] = (self.args.held_out.column,)
        columns = list(dict.fromkeys(name for names in fields.values() for name in names))
        kept, lacks = [], dict[str, list[int]]()
        for at in range(len(self._rows)):
            row = self._row(at)
            missing = [name for name in columns if name not in row]
            for name in missing:
                lacks.setdefault(name, []).append(at)
            if not missing and self._side_of(row) == self.args.split and self._passes(row):
                kept.append(at)
        for name, rows in lacks.items():
            has = ", ".join(map(repr, self._row(rows[0]))) or "none"
            what = " and ".join(f"`{field}`" for field in fields if name in fields[field])
            advice = f"correct {what} or add the column. The first such row has the columns {has}"
            kind = f"rows lack the column {name!r} of {what}"
            raise OrreryError(self._sentence(kind, rows, advice, len(self._rows)))
        return kept

    def _side_of(self, row: dict[str, Any]) -> Split:
        match self.args.held_out:
            case Fraction(fraction=fraction):
                # The hash covers `str` of values. Any change would move rows between sides.
                return split_of(filled(self.args.prompt, row, str), fraction)
            case Column(column=column, values=values):
                return "held_out" if row[column] in values else "train"
        return self.args.split  # each side has its own file

    def _passes(self, row: dict[str, Any]) -> bool:
        return all(row[name] in values for name, values in self.args.where.items())

    def _row(self, at: int) -> dict[str, Any]:
        try:
            return self._rows[at]
        except ValueError as error:
            place = self._rows.place(at)
            raise OrreryError(f"source: {place}: {error}. Correct the row") from error

    def _messages(self, at: int, row: dict[str, Any]) -> tuple[Message, ...]:
        before = [] if self.args.system is None else [Message("system", self.args.system)]
        whole = COLUMN.fullmatch(self.args.prompt)
        if whole and isinstance(given := row[whole[1]], list):
            chat = [*map(self._message, given)]
            if chat and chat[-1].role == "assistant":
                raise OrreryError(
                    f"prompt: {self._rows.place(at)}: the chat in {whole[1]!r} ends with the "
                    "assistant's reply, which would show the answer. End it with a user's message"
                )
            return (*before, *chat)
        return (*before, Message("user", filled(self.args.prompt, row)))

    def _message(self, given: Any) -> Message:
        match given:
            case {"role": str(role), "content": str(content)} if role in get_args(Role):
                return Message(role, content)  # type: ignore[arg-type] # one of Role
        raise OrreryError(f'prompt: {given!r} is no message {{"role": …, "content": …}}')

    def _answer(self, at: int, row: dict[str, Any]) -> str:
        text = filled(self.args.answer, row)
        if self.args.answer_pattern is None:
            return text.strip()
        found = compiled(self.args.answer_pattern, 0).findall(text)
        if not found:
            raise OrreryError(
                f"source: {self._rows.place(at)}: answer_pattern "
                f"{self.args.answer_pattern!r} is not found in {text[-60:]!r}. Correct the pattern "
                "or the row"
            )
        return found[-1].strip()

    def _shuffled(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(self._kept)

    def _place(self, index: int) -> int:
        epoch, at = divmod(index, len(self._kept))
        return int(self._order(epoch)[at])

    def _make(self, index: int) -> Problem:
        return self._problem(index, self._place(index))

    def _problem(self, index: int, at: int) -> Problem:
        row = self._row(at)
        return Problem(index, self._messages(at, row), answer=self._answer(at, row))

    def problem(self, index: int) -> Problem:
        return self._made(index)

    async def judge(self, problem: Problem, messages: Sequence[Message]) -> Judgement:
        request = self._request(self._place(problem.index), problem.answer)
        # A user's function may be random, so its scores are not cached.
        is_users = self.args.verdict.kind == "python"
        score = SCORERS.score if is_users else SCORERS.score_once
        return scored(await score("verdict", request, messages[-1].content))

    def _request(self, at: int, answer: str) -> dict[str, Any]:
        verdict, row = self.args.verdict.model_dump(), None
        if self.args.verdict.kind == "python":
            # Absolute, because scorer processes have another working directory.
            verdict["path"] = str(Path(self.args.verdict.path).absolute())
            # Scorers read JSON, so timestamps become text.
            row = json.loads(json.dumps(self._row(at), default=str))
        return {"verdict": verdict, "answer": answer, "row": row}

    def demonstration(self, index: int) -> list[Message]:
        row = self._row(at := self._place(index))
        return [*self._messages(at, row), Message("assistant", filled(self.args.answer, row))]

    def check_rows(self, tokens: Callable[[Problem], int] | None, max_tokens: int) -> int:
        """Check and count the rows of `split`.

        Raise OrreryError for an unusable row, a prompt on both sides, or a prompt that `tokens`
        counts as more than `max_tokens`.
        """
        found: dict[str, list[int]] = {}
        reasons: dict[str, str] = {}
        kept = self._kept.tolist()
        answers: dict[tuple[str, ...], str] = {}
        try:
            misfits = watched(lambda at: self._misfit(at, tokens, max_tokens, answers), kept)
        except RowFailed as error:
            raise OrreryError(
                f"source: {self._rows.place(error.row)}: checking the row {error}; correct its "
                "answer, the pattern or the reward function, or leave the row out by `where`"
            ) from error
        for at, (kind, reason) in misfits.items():
            found.setdefault(kind, []).append(at)
            reasons.setdefault(kind, reason)
        side = "training" if self.args.split == "train" else "held-out"
        for kind, rows in found.items():
            raise OrreryError(self._sentence(f"{side} rows {kind}", rows, reasons[kind], len(kept)))
        if self.args.split == "held_out" and not isinstance(self.args.held_out, Fraction):
            self._check_against_training()
        return len(self._kept)

    def _misfit(
        self,
        at: int,
        tokens: Callable[[Problem], int] | None,
        max_tokens: int,
        answers: dict[tuple[str, ...], str],
    ) -> tuple[str, str] | None:
        """Return (error, advice), or None for a valid row."""
        try:
            problem = self._problem(at, at)
        except OrreryError as error:
            return "cannot be read", str(error)
        if not problem.answer:
            return "have an empty answer", "fill it, or leave these rows out by `where`"
        if not any(message.content.strip() for message in problem.messages):
            return "have an empty prompt", "fill it, or leave these rows out by `where`"
        prompt = tuple(message.content for message in problem.messages)
        if answers.setdefault(prompt, problem.answer) != problem.answer:
            return (
                "have the prompt of an earlier row and another answer",
                "keep one of them, or leave these rows out by `where`",
            )
        if self.args.verdict.kind == "python":
            if at in self._tried and (reason := self._tried_reward(at, problem.answer)) is not None:
                return f"fail in the reward function ({len(self._tried)} rows were tried)", reason
        elif (reason := self._self_judged(at, problem.answer)) is not None:
            return "have an answer that the verdict calls wrong", reason
        if tokens is not None and (length := tokens(problem)) > max_tokens:
            return (
                "have a prompt that is too long",
                f"the first has {length} tokens, and {max_tokens} fit beside a turn; "
                "raise context_tokens, or leave these rows out by `where`",
            )
        return None

    def _self_judged(self, at: int, answer: str) -> str | None:
        """Return why the verdict rejects the row's own answer, or None."""
        verdict = self.args.verdict
        try:
            if verdict.kind == "json_schema":  # the answer is a schema of replies
                scorer_of(self._request(at, answer))
                return None
            reply = f"\\boxed{{{answer}}}" if verdict.kind == "math" else answer
            has_pattern = verdict.kind in ("exact", "pattern") and verdict.pattern is not None
            if has_pattern:
                reply = filled(self.args.answer, self._row(at))
            right = _is_right(verdict, answer, reply)
        except OrreryError:
            raise
        except Exception as error:
            return f"{error}; {self._cut(answer) or 'correct the answer or the verdict'}"
        remedy = self._cut(answer)
        if remedy is None and has_pattern and self.args.answer_pattern is None:
            remedy = (
                "set `answer` to a right reply, such as '#### {answer}', and `answer_pattern` to "
                "the expression that extracts the answer from it, such as '#### (.+)'"
            )
        remedy = remedy or "correct it, or choose another verdict"
        return None if right else f"the first is {answer[-60:]!r}; {remedy}"

    def _cut(self, answer: str) -> str | None:
        if self.args.answer_pattern is not None or len(answer.split()) < LONG_ANSWER:
            return None
        mark = "#### " if "####" in answer else "answer is "
        return f"cut the answer out of the text, such as answer_pattern: '{mark}(.+)'"

    def _tried_reward(self, at: int, answer: str) -> str | None:
        scorer = scorer_of(self._request(at, answer))
        for what, reply in (("the row's answer", answer), ("an empty reply", "")):
            try:
                score = scorer(reply)
            except Exception as error:
                return f"for {what} it raises {told(error)}; correct the function"
            if not 0.0 <= score <= 1.0:
                return f"for {what} it returns {score:g}; return a number from 0 to 1"
        return None

    def _check_against_training(self) -> None:
        train = Dataset(self.args.model_copy(update={"split": "train"}), self.seed)
        trained = set(map(train._prompt, train._kept))
        both = [int(at) for at in self._kept if self._prompt(at) in trained]
        if both:
            advice = "leave them out of one side, or use held_out of kind fraction"
            kind = "held-out rows are training rows too"
            raise OrreryError(self._sentence(kind, both, advice, len(self._kept)))

    @cached_property
    def digests(self) -> np.ndarray:
        """Return uint64 [rows of `split`, 2]: digests of each row and of its prompt."""
        found = np.empty((len(self._kept), 2), dtype=np.uint64)
        for i, row in enumerate(map(self._row, self._kept.tolist())):
            prompt = filled(self.args.prompt, row)
            found[i] = _digest(json.dumps(row, default=str)), _digest(prompt)
        return found

    def check_against(self, trained: Mapping[str, np.ndarray]) -> None:
        """Raise OrreryError if a row or prompt is in `trained` ({task's path: `digests`})."""
        own = self.digests
        for path, digests in trained.items():
            if both := self._kept[np.isin(own, digests).any(axis=1)].tolist():
                advice = (
                    "held_out of kind fraction divides the rows by `prompt` and `fraction`; give "
                    "both tasks equal values, use held_out of kind column, or leave these rows "
                    "out of one task by `where`"
                )
                kind = f"evaluation rows are rows of {path} too"
                raise OrreryError(self._sentence(kind, both, advice, len(own)))

    def _prompt(self, at: int) -> str:
        return filled(self.args.prompt, self._row(at))

    def _sentence(self, kind: str, rows: list[int], advice: str, num_rows: int) -> str:
        places = ", ".join(self._rows.place(at) for at in rows[:SHOWN])
        more = ", …" if len(rows) > SHOWN else ""
        return f"source: {len(rows)} of {num_rows} {kind} ({places}{more}): {advice}"


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


@lru_cache(2**16)
def _is_right(verdict: Verdict, answer: str, reply: str) -> bool:
    request = {"verdict": verdict.model_dump(), "answer": answer, "row": None}
    return scorer_of(request)(reply) == 1.0


ROW_S = 10.0  # limit per row. SIGALRM ends the checking fork even in C code.


class RowFailed(Exception):
    def __init__(self, row: int, how: str):
        super().__init__(how)
        self.row = row


def watched(
    check: Callable[[int], Any], rows: Sequence[int], limit_s: float = ROW_S
) -> dict[int, Any]:
    """Call `check` on each row in one fork. Return {row: result} without None results.

    Results must be JSON values other than strings. Raise RowFailed if a check ends the fork or
    exceeds `limit_s`. Raise OrreryError if `check` does.
    """
    limit_s = scaled(limit_s)
    reader, writer = os.pipe()
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        try:
            _serve(check, rows, limit_s, writer)
        finally:
            os._exit(1)
    os.close(writer)
    results = []
    with os.fdopen(reader, "rb") as lines:
        for line in lines:
            results.append(json.loads(line))
    _, status = os.waitpid(pid, 0)
    if results and isinstance(results[-1], str):
        raise OrreryError(results[-1])
    if len(results) < len(rows):
        is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
        how = f"takes more than {limit_s:g} s" if is_late else "ends the process"
        raise RowFailed(rows[len(results)], how)
    return {row: said for row, said in zip(rows, results, strict=True) if said is not None}


def _serve(check: Callable[[int], Any], rows: Sequence[int], limit_s: float, writer: int) -> None:
    os.dup2(2, 1)  # a user's function may print
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + MEMORY_BYTES
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    with os.fdopen(writer, "wb") as lines:
        for row in rows:
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            try:
                said = check(row)
            except OrreryError as error:
                said = str(error)
            lines.write(json.dumps(said).encode() + b"\n")
            lines.flush()
            if isinstance(said, str):
                return
        signal.setitimer(signal.ITIMER_REAL, 0)
