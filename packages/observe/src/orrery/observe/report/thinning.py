"""Thinning: no line of a page has more than `POINTS` points, however long the run.

A line of as many points or fewer stays as it is. A longer one is cut into pieces of equally many points each; what stands for a piece is
what tells the truth about that line: its mean, where a rate or a share over time is meant; its extremes, where single values matter.
A y of None is no point.
"""

from collections.abc import Callable, Sequence
from typing import Any

POINTS = 1000

Line = tuple[list[Any], list[Any]]  # x and y of each point
Thinning = Callable[[Sequence[Any], Sequence[Any]], Line]


def means(xs: Sequence[Any], ys: Sequence[Any]) -> Line:
    """Each piece's mean, at the piece's begin."""
    pieces = [
        [index for index in piece if ys[index] is not None] for piece in _pieces(len(xs), means)
    ]
    said = [piece for piece in pieces if piece]
    return [xs[piece[0]] for piece in said], [
        sum(ys[index] for index in piece) / len(piece) for piece in said
    ]


def extremes(xs: Sequence[Any], ys: Sequence[Any]) -> Line:
    """Each piece's lowest and highest point, in their order: the line covers what the line of all points would."""
    chosen: list[int] = []
    for piece in _pieces(len(xs), extremes):
        if said := [index for index in piece if ys[index] is not None]:
            chosen += sorted({min(said, key=ys.__getitem__), max(said, key=ys.__getitem__)})
    return [xs[index] for index in chosen], [ys[index] for index in chosen]


def largest(xs: Sequence[Any], ys: Sequence[Any]) -> Line:
    """Each piece's highest point."""
    chosen = [max(piece, key=ys.__getitem__) for piece in _pieces(len(xs), largest)]
    return [xs[index] for index in chosen], [ys[index] for index in chosen]


def piece_size(num_points: int, thin: Thinning) -> int:
    """Points in each piece of a line of so many."""
    return -(-num_points // (POINTS // 2 if thin is extremes else POINTS))


def _pieces(num_points: int, thin: Thinning) -> list[range]:
    size = piece_size(num_points, thin)
    return [range(start, min(start + size, num_points)) for start in range(0, num_points, size)]
