"""Read a report's data from a run directory.

Each step has the newest attempt's row. Curves of over POINTS points are thinned to each interval's
mean, extremes or maximum.
"""

import logging
import sys
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import UndefinedError

from orrery.manifest.diff import RECEIPT, read_receipt
from orrery.manifest.errors import OrreryError, explain_os_error
from orrery.manifest.identity import load
from orrery.manifest.json_file import read_object
from orrery.manifest.plan import plan
from orrery.manifest.schema import Manifest
from orrery.runtime.metrics import Attempts, Row, rows, used_by_process
from orrery.runtime.run_directory import (
    MANIFEST,
    STAGES,
    done_path,
    evaluated_path,
    metrics_dir,
    result_path,
)

NOTHING = {"d": nan, "q": -(2**63), None: None}  # array type → substitute for None
TYPE_CODES = {float: "d", int: "q"}
POINTS = 1000

Line = tuple[list[Any], list[Any]]
Thinning = Callable[[Sequence[Any], Sequence[Any]], Line]


class Table(Sequence[Row]):
    """Store rows by column, to fit long runs into memory. Keep only `keys`, if given."""

    def __init__(self, keys: Collection[str] = ()):
        self._columns = {key: _Column() for key in keys}
        self._takes_any, self._num_rows = not keys, 0

    def append(self, row: Row) -> None:
        for key, value in row.items():
            if value is None and key in self._columns:
                continue
            if (column := self._columns.get(key)) is not None:
                column.put(self._num_rows, value)
            elif self._takes_any:
                self._columns[key] = column = _Column()
                if value is not None:
                    column.put(self._num_rows, value)
        self._num_rows += 1

    def column(self, key: str) -> list[Any]:
        return list(self._values(key))

    def each(self, *keys: str) -> Iterator[tuple]:
        return zip(*map(self._values, keys), strict=True)

    def settle(self, attempts: Attempts) -> None:
        self._choose([index for index, row in enumerate(self) if attempts.counts(row)])
        self.sort("time_s")

    def sort(self, key: str) -> None:
        values = self.column(key)
        self._choose(sorted(range(len(values)), key=values.__getitem__))

    def _choose(self, indices: list[int]) -> None:
        if indices != list(range(self._num_rows)):
            for column in self._columns.values():
                column.choose(indices)
            self._num_rows = len(indices)

    def _values(self, key: str) -> Iterator[Any]:
        column = self._columns.get(key, _Column())
        return chain(column.said(), repeat(None, self._num_rows - column.num_said))

    def __len__(self) -> int:
        return self._num_rows

    def __iter__(self) -> Iterator[Row]:
        keys = list(self._columns)
        for values in self.each(*keys) if keys else repeat((), self._num_rows):
            yield dict(zip(keys, values, strict=True))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._num_rows))]
        place = range(self._num_rows)[index]
        return {key: column.at(place) for key, column in self._columns.items()}


class _Column:
    def __init__(self) -> None:
        self._code: str | None = None  # type code of an array, None for a list
        self._values: Any = []

    @property
    def num_said(self) -> int:
        return len(self._values)

    def put(self, index: int, value: Any) -> None:
        code = TYPE_CODES.get(type(value))
        if code == "q" and abs(value) >= 2**63:
            code = None
        if not self._values:
            self._code, self._values = code, [] if code is None else array(code)
        elif self._code is not None and code != self._code:
            self._code, self._values = None, list(self.said())
        if gap := index - len(self._values):
            self._values.extend([NOTHING[self._code]] * gap)
        self._values.append(sys.intern(value) if isinstance(value, str) else value)

    def said(self) -> Iterator[Any]:
        return map(self._plain, self._values)

    def at(self, index: int) -> Any:
        return self._plain(self._values[index]) if index < len(self._values) else None

    def choose(self, indices: list[int]) -> None:
        chosen = [
            self._values[index] if index < len(self._values) else NOTHING[self._code]
            for index in indices
        ]
        self._values = chosen if self._code is None else array(self._code, chosen)

    def _plain(self, value: Any) -> Any:
        return None if value != value or (self._code == "q" and value == NOTHING["q"]) else value


class Span(NamedTuple):
    role: str
    name: str
    start_s: float
    end_s: float
    step: int | None


class Spans(Sequence[Span]):
    def __init__(self) -> None:
        self._table = Table(Span._fields)

    def add(self, span: Span) -> None:
        self._table.append(span._asdict())

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[Span]:
        return map(Span._make, self._table.each(*Span._fields))

    def __getitem__(self, index: Any) -> Any:
        found = self._table[index]
        return [Span(**row) for row in found] if isinstance(index, slice) else Span(**found)


def means(xs: Sequence[Any], ys: Sequence[Any]) -> Line:
    pieces = [[i for i in piece if ys[i] is not None] for piece in _pieces(len(xs), means)]
    said = [piece for piece in pieces if piece]
    return [xs[piece[0]] for piece in said], [
        sum(ys[index] for index in piece) / len(piece) for piece in said
    ]


def extremes(xs: Sequence[Any], ys: Sequence[Any]) -> Line:
    chosen: list[int] = []
    for piece in _pieces(len(xs), extremes):
        if said := [index for index in piece if ys[index] is not None]:
            chosen += sorted({min(said, key=ys.__getitem__), max(said, key=ys.__getitem__)})
    return [xs[index] for index in chosen], [ys[index] for index in chosen]


def largest(xs: Sequence[Any], ys: Sequence[Any]) -> Line:
    chosen = [max(piece, key=ys.__getitem__) for piece in _pieces(len(xs), largest)]
    return [xs[index] for index in chosen], [ys[index] for index in chosen]


def piece_size(num_points: int, thin: Thinning) -> int:
    return -(-num_points // (POINTS // 2 if thin is extremes else POINTS))


def _pieces(num_points: int, thin: Thinning) -> list[range]:
    size = piece_size(num_points, thin)
    return [range(start, min(start + size, num_points)) for start in range(0, num_points, size)]


Interval = tuple[float, float]

KINDS = {  # (process, event) of a row → field of `RunData`
    ("trainer.0", "validation"): "validation",
    ("trainer.0", "compare"): "compared",
    ("trainer.0", "round"): "rounds",
    ("orchestrator.0", "batch"): "batches",
    ("orchestrator.0", "stopped_early"): "stopped_early",
    ("orchestrator.0", "evaluation"): "evaluations",
    ("orchestrator.0", "update"): "updates",
    ("orchestrator.0", "admission"): "admission",
    ("orchestrator.0", "engine"): "engines",
    ("orchestrator.0", "guest_refused"): "refused_sites",
    ("launcher.0", "engine_restart"): "engine_restarts",
}


@dataclass(frozen=True)
class RunData:
    run_dir: Path
    manifest: Manifest
    stages: dict[str, Row]
    rl: Table
    sft: Table
    validation: Table  # losses on held-out SFT examples
    compared: Table  # log-probs of trainer and engine
    rounds: Table  # weight exchanges with other sites
    batches: Table
    stopped_early: Table  # one row if RL ended at `evaluation.stop_at`
    evaluations: Table
    updates: Table
    engine_restarts: Table
    refused_sites: Table  # sites refused after wrong answers
    admission: Table
    engines: Mapping[int, Table]
    usage: Sequence[Row]
    processors: Mapping[str, Table]
    spans: Sequence[Span]  # RL's newest attempt
    result: Row
    evaluated: list[Row]
    network: float | None  # inter-node bytes/s per device, from RL's receipt

    @classmethod
    def load(cls, run_dir: Path) -> "RunData":
        """Read the run. Raise OrreryError if a file is invalid."""
        manifest = load(run_dir / MANIFEST)
        stages = [path.parent.name for path in run_dir.glob(f"{STAGES}/*/DONE")]
        return cls(
            run_dir=run_dir,
            manifest=manifest,
            stages={stage: _done(done_path(run_dir, stage)) for stage in stages},
            **_metrics(metrics_dir(run_dir)),
            spans=_spans(metrics_dir(run_dir)),
            result=_result(result_path(run_dir, "evaluate")),
            evaluated=_evaluated(evaluated_path(run_dir)),
            network=_network(run_dir / RECEIPT),
        )


# `UndefinedError`: a row lacks a field that the page shows
MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, UndefinedError)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise OrreryError for unreadable files and malformed rows in the `with` body."""
    try:
        yield
    except OSError as error:
        raise OrreryError(f"{explain_os_error(error)}; restore this file, or remove it") from error
    except MALFORMED as error:
        logging.getLogger("report").debug("a damaged row", exc_info=error)
        raise OrreryError(
            f"{what}: a row is malformed ({error!r}); remove that row and type `orrery "
            "report` again"
        ) from error


def same_weights(run: RunData) -> list[tuple[int, float]]:
    """Return (version, max |Δ log-prob| of trainer and engine with equal weights)."""
    key = "logprob_max_abs_diff_same_weights"
    found = [(step - 1, value) for step, value in run.rl.each("step", key) if value is not None]
    return found + [(row["version"], row[key]) for row in run.compared[-1:] if row[key] is not None]


def without_signal(run: RunData) -> float | None:
    """Return the share of rollouts in groups with only zero advantages."""
    counts = [each for each in run.batches.each("num_without_signal", "num_sampled") if each[1]]
    return sum(num for num, _ in counts) / sum(all_ for _, all_ in counts) if counts else None


def _evaluated(path: Path) -> list[Row]:
    with reading(str(path)):
        return list(rows(path))


def _network(path: Path) -> float | None:
    try:
        attempts = read_receipt(path)["stages"]["rl"]["attempts"]
        return attempts[-1]["network"]["gbit_per_s"] * 1e9 / 8
    except (OrreryError, *MALFORMED):  # ignore an old or damaged receipt
        return None


def _done(path: Path) -> Row:
    remedy = "remove it and run the stage again"
    row = read_object(path, remedy)
    for key in ("attempt", "started_s", "ended_s", "wall_s"):
        if not isinstance(row.get(key), int | float):
            raise OrreryError(
                f"{path}: {key} is not a number, so this marker was damaged; {remedy}"
            )
    return row


def _result(path: Path) -> Row:
    if not path.exists():
        return {}
    remedy = "remove stages/evaluate/DONE and run the stage again"
    result = read_object(path, remedy)
    for when in ("before", "after"):
        policy = result.get(when)
        if not isinstance(policy, dict):
            raise OrreryError(f"{path}: {when} is not an object; {remedy}")
        for key in ("reward_mean", "num_rollouts", "num_failed"):
            if not isinstance(policy.get(key), int | float | None):
                raise OrreryError(f"{path}: {when}.{key} is not a number; {remedy}")
    return result


def unfinished(run: RunData) -> list[str]:
    done = {*run.stages, "report"}
    return [stage.name for stage in plan(run.manifest) if stage.name not in done]


def wall_s(run: RunData, *left_out: str) -> float:
    """Return the seconds of all attempts at finished stages except `left_out`."""
    finished = {stage: done for stage, done in run.stages.items() if stage not in left_out}
    lost = [
        row["last_s"] - row["first_s"]
        for row in run.usage
        if row["stage"] in finished and row["attempt"] != finished[row["stage"]]["attempt"]
    ]
    return sum(done["wall_s"] for done in finished.values()) + sum(lost)


def _metrics(folder: Path) -> dict[str, Any]:
    tables = {name: Table() for name in ("rl", "sft", *KINDS.values())}
    tables["admission"] = Table(("time_s", "limit", "num_in_flight"))
    engines: dict[int, Table] = defaultdict(lambda: Table(("time_s", "kv_usage")))
    processors: dict[str, Table] = defaultdict(lambda: Table(("time_s", "cpu_percent")))
    usage: dict[tuple[str, int], Row] = {}
    for path in sorted(folder.glob("*.jsonl")):
        if path.name.endswith(".spans.jsonl"):
            continue
        process, attempts, found = path.name.removesuffix(".jsonl"), Attempts(), set()
        with reading(str(path)):
            for row in rows(path):
                attempts.add(row)
                if row.get("event") == "usage":
                    _take_usage(row, usage, processors)
                elif (kind := _kind(process, row)) == "engines":
                    engines[row["engine"]].append(row)
                elif kind is not None:
                    tables[kind].append(row)
                    found.add(kind)
            for kind in found:
                tables[kind].settle(attempts)
    for table in (*engines.values(), *processors.values()):
        table.sort("time_s")
    return tables | {"engines": engines, "processors": processors, "usage": list(usage.values())}


def _kind(process: str, row: Row) -> str | None:
    event, stage = row.get("event"), row.get("stage")
    if event is None:
        is_step = process == "trainer.0" and row.get("step") is not None
        return stage if is_step and stage in ("rl", "sft") else None
    return KINDS.get((process, event)) if process != "orchestrator.0" or stage == "rl" else None


def _take_usage(row: Row, usage: dict[tuple[str, int], Row], processors: dict[str, Table]) -> None:
    time_s, stage, attempt = row["time_s"], row["stage"], row["attempt"]
    new = {"stage": stage, "attempt": attempt, "first_s": time_s, "last_s": time_s}
    ends = usage.setdefault((stage, attempt), new)
    ends["first_s"], ends["last_s"] = min(ends["first_s"], time_s), max(ends["last_s"], time_s)
    if stage == "rl":
        for process, used in used_by_process(row).items():
            processors[process].append({"time_s": time_s, "cpu_percent": used.get("cpu_percent")})


def _spans(metrics: Path) -> Spans:
    found, newest = Spans(), None
    for path in sorted(metrics.glob("*.spans.jsonl")):
        process = path.name.removesuffix(".spans.jsonl")
        with reading(str(path)):
            for row in rows(path):
                if row.get("stage") != "rl":
                    continue
                if newest is None or row["attempt"] > newest:
                    found, newest = Spans(), row["attempt"]
                if row["attempt"] == newest:
                    role = f"inference.{row['engine']}" if "engine" in row else process
                    times_s = row["start_s"], row["end_s"]
                    found.add(Span(role, row["name"], *times_s, row.get("step")))
    return found


def union(intervals: list[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def overlap_s(left: list[Interval], right: list[Interval]) -> float:
    left, right, total, i, j = union(left), union(right), 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


@dataclass(frozen=True)
class Shares:
    """Shares of time in RL's newest attempt, from the first busy moment to training's end."""

    window_s: float
    trainer_busy: float  # `trainer.0` runs forward, backward or optimizer
    engine_busy: float  # an engine has a request in flight
    overlapped: float  # share of `trainer.0`'s busy time with a busy engine


def shares(spans: Iterable[Span]) -> Shares | None:
    training: dict[str, list[Interval]] = defaultdict(list)
    generating: dict[str, list[Interval]] = defaultdict(list)
    for role, name, start_s, end_s, _ in spans:
        if role.startswith("trainer.0") and name in ("forward_backward", "optimizer"):
            _join(training[role], start_s, end_s)
        elif role.startswith("inference.") and name == "generate":
            _join(generating[role], start_s, end_s)
    trained, generated = union([*chain(*training.values())]), union([*chain(*generating.values())])
    if not any(end > start for start, end in trained):
        return None
    start = min([*trained, *generated])[0]
    window = [(start, max(end for _, end in trained))]
    window_s = window[0][1] - start
    busy_s = overlap_s(trained, window)
    return Shares(
        window_s,
        busy_s / window_s,
        overlap_s(generated, window) / window_s,
        overlap_s(trained, generated) / busy_s,
    )


def _join(intervals: list[Interval], start_s: float, end_s: float) -> None:
    if intervals and intervals[-1][0] <= start_s <= intervals[-1][1]:
        intervals[-1] = (intervals[-1][0], max(intervals[-1][1], end_s))
    else:
        intervals.append((start_s, end_s))
