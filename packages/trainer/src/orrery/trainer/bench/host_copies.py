"""Copies between device and host memory in a step, from the profiler's trace, and how much of them hides behind computation.

- A direction's time is that in which at least one of its copies runs; what is hidden of it is that in which a kernel runs as well. Kernels
  of communication do not count: a copy beside a collective alone still keeps the step waiting.
- Copies from one place of the device to another are no transfers, and not here.
- Small copies, such as counts that the host asks for, are in the sums with the little they take.
"""

import re
from dataclasses import dataclass
from typing import Any

from orrery.trainer.bench.phases import COMMUNICATION, kind_of, window

DIRECTIONS = {"to host": re.compile(r"Memcpy DtoH"), "to device": re.compile(r"Memcpy HtoD")}
Spans = list[tuple[float, float]]


@dataclass(frozen=True)
class Copies:
    """Of one direction: bytes, seconds in which some copy ran, and of those the seconds in which a kernel computed beside it."""

    num_bytes: int
    num_copies: int
    seconds: float
    hidden_s: float


def host_copies(events: list[dict[str, Any]], step: str) -> dict[str, Copies]:
    """By direction, of the step whose host range is called `step`; nothing where the trace has no device."""
    begin, end = window(events, step)

    def spans(found: list[dict[str, Any]]) -> Spans:
        return joined([(max(one["ts"], begin), min(one["ts"] + one["dur"], end)) for one in found])

    inside = [
        one
        for one in events
        if one.get("ph") == "X"
        and "dur" in one
        and one["ts"] < end
        and one["ts"] + one["dur"] > begin
    ]
    kernels = [one for one in inside if one.get("cat") == "kernel"]
    if not kernels:
        return {}
    computing = spans([one for one in kernels if kind_of(one["name"], ()) != COMMUNICATION])
    result = {}
    for direction, pattern in DIRECTIONS.items():
        copies = [
            one for one in inside if one.get("cat") == "gpu_memcpy" and pattern.match(one["name"])
        ]
        copying = spans(copies)
        num_bytes = sum(int(one.get("args", {}).get("bytes", 0)) for one in copies)
        result[direction] = Copies(
            num_bytes, len(copies), length(copying) / 1e6, length(common(copying, computing)) / 1e6
        )
    return result


def joined(spans: Spans) -> Spans:
    """The same time as spans apart from one another, in order."""
    result: Spans = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        elif begin < end:
            result.append((begin, end))
    return result


def common(some: Spans, others: Spans) -> Spans:
    """Where both have a span; both joined."""
    result, i, j = [], 0, 0
    while i < len(some) and j < len(others):
        begin, end = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if begin < end:
            result.append((begin, end))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return result


def length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)
