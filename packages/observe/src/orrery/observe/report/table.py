"""Rows of one kind as columns, so that millions of them fit into memory.

- Numbers of one type are eight bytes each; texts are kept once; anything else stays an object.
- A row is made when it is asked for: a dict with every key of the table, None where the row did not say it.
"""

import sys
from array import array
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, repeat
from math import nan
from typing import Any

from orrery.observe.metrics import Attempts, Row

NOTHING = {"d": nan, "q": -(2**63), None: None}  # what stands for None, by the type of an array
TYPE_CODES = {float: "d", int: "q"}


class Table(Sequence[Row]):
    """Appended row by row; of `keys` alone where they are given."""

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
        """The values of one key, by row; of a key that no row said, None each."""
        return list(self._values(key))

    def each(self, *keys: str) -> Iterator[tuple]:
        """The values of some keys, row by row."""
        return zip(*map(self._values, keys), strict=True)

    def settle(self, attempts: Attempts) -> None:
        """Keep the rows that count, oldest first."""
        self._choose([index for index, row in enumerate(self) if attempts.counts(row)])
        self.sort("time_s")

    def sort(self, key: str) -> None:
        """Sort rows by one key; equal ones stay in order."""
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
        """A row, or a list of them."""
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._num_rows))]
        place = range(self._num_rows)[index]
        return {key: column.at(place) for key, column in self._columns.items()}


class _Column:
    """The values of one key, up to the last row that says it."""

    def __init__(self) -> None:
        self._code: str | None = None  # of an array; None of a list
        self._values: Any = []

    @property
    def num_said(self) -> int:
        return len(self._values)

    def put(self, index: int, value: Any) -> None:
        """Set row `index`, which is behind all that are there, to what is not None."""
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
