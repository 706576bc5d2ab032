"""Keep rows and spans as columns in memory, and thin long lines.

- Numbers of one type take eight bytes each.
- A row, made on access, is a dict with every key of the table, None for missing values.
- A line with more than POINTS points is cut into equal pieces, each drawn as its mean (rates and
  shares), its extremes (single values) or its largest value.
"""

import sys
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, repeat
from math import nan
from typing import Any, NamedTuple

from orrery.runtime.metrics import Attempts, Row

NOTHING = {"d": nan, "q": -(2**63), None: None}  # stored for None, by array type
TYPE_CODES = {float: "d", int: "q"}
POINTS = 1000

Line = tuple[list[Any], list[Any]]  # x and y of the drawn points
Thinning = Callable[[Sequence[Any], Sequence[Any]], Line]


class Table(Sequence[Row]):
    """Rows, appended one by one. With `keys`, values of other keys are dropped."""

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
        self._code: str | None = None  # type code of the array. None: a list
        self._values: Any = []

    @property
    def num_said(self) -> int:
        return len(self._values)

    def put(self, index: int, value: Any) -> None:
        """Set row `index`, after all others, to a value other than None."""
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
