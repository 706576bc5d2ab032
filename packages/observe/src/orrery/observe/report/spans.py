"""Spans: what every role did and when; columns in memory, one by one to look at."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from orrery.observe.report.table import Table


class Span(NamedTuple):
    """One named stretch of a role's time, in seconds of the host's clock."""

    role: str
    name: str
    start_s: float
    end_s: float
    step: int | None


class Spans(Sequence[Span]):
    """Many spans, in the order in which they are added."""

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
