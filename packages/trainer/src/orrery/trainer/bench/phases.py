"""A step's time by kind of work, from the profiler's trace.

- Every instant of the step belongs to one kind: to the computation that runs then (shared evenly where several do), else to a copy, else
  to communication (which is then *exposed*), else to `idle`. So the kinds add up to the step.
- A kernel's kind follows from its name and from what was open on the host when it was launched; the table below is the whole rule.
- Its pass is backward where autograd's engine launched it, the optimizer's inside `Optimizer.step`, else forward (with the loss and what
  the learner does around). What a backward pass computes again counts as backward.
- Without a GPU the operators of the host stand for kernels, each with the time that it spends outside of others.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IDLE = "idle"
COMMUNICATION = "communication"
COPIES = "copies"
# (kind, what the kernel's own name holds, what one of the open host ranges' names holds); the first row that fits decides
_RULES = (
    (COMMUNICATION, r"nccl|gloo|c10d::|symm_mem|deep_ep", None),
    (
        "sharding copies",
        None,
        r"FSDP::",
    ),  # torch._foreach_copy_ into gathers has the name of the optimizer's kernels
    ("optimizer", r"multi_tensor_apply|[Aa]dam", None),
    ("optimizer", None, r"Optimizer\.step|optimizer\.step"),
    ("lm head", None, r"TokenLogprob"),
    (
        "elementwise",
        r"^triton_(poi|red|per|fused)_",
        None,
    ),  # what the compiler fuses, whatever operators its name lists
    ("attention", r"flash|fmha|sdpa|[Aa]ttention", None),
    ("attention", None, r"varlen_attention|scaled_dot_product|flash_attention|_attn"),
    ("grouped products", r"GroupProblemShape|[Gg]rouped", None),
    ("grouped products", r"gemm|mm|nvjet|cutlass|wgmma", r"grouped_m"),
    ("expert rows", r"spread_rows|sum_rows|swiglu_rows|expert_rows|sort|Sort|histogram", None),
    (
        "dense products",
        r"gemm|Gemm|GEMM|nvjet|cublas|cutlass|splitK|^triton_tem|aten::(add|b)?mm_?$",
        None,
    ),
    ("sharding copies", r"split_with_sizes|chunk_cat", None),
)
KINDS = (
    "dense products", "grouped products", "attention", "lm head", "expert rows", "elementwise", "sharding copies", "optimizer", COPIES,
    COMMUNICATION, IDLE,
)  # fmt: skip
_PATTERNS = tuple(
    (
        kind,
        None if name is None else re.compile(name),
        None if around is None else re.compile(around),
    )
    for kind, name, around in _RULES
)


@dataclass(frozen=True)
class Phases:
    """Seconds. `by_kind` adds up to `step_s`; `communication` in it is the exposed part."""

    step_s: float
    by_kind: dict[str, float]
    by_pass: dict[
        str, dict[str, float]
    ]  # forward, backward, optimizer → kind → seconds that its kernels ran, overlaps not taken off
    communication_total_s: float  # communication, hidden or not
    num_kernels: int
    longest: list[
        tuple[str, str, float, int]
    ]  # (kernel, kind, seconds in all, how many) of the kernels that took longest


@dataclass(frozen=True)
class Piece:
    """What ran in one stretch of time, in microseconds of the trace's clock."""

    begin: float
    end: float
    kind: str
    name: str
    stage: str


def read(path: Path) -> list[dict[str, Any]]:
    """A Chrome trace's events."""
    with path.open() as file:
        return json.load(file)["traceEvents"]


def divide(events: list[dict[str, Any]], step: str) -> Phases:
    """The time of the step whose host range is called `step`. Raises ValueError where the trace has none."""
    begin, end = window(events, step)
    found = [piece for piece in pieces(events, step) if piece.end > begin and piece.begin < end]
    by_kind = {kind: seconds / 1e6 for kind, seconds in _exclusive(found, begin, end).items()}
    by_pass: dict[str, dict[str, float]] = {}
    totals: dict[tuple[str, str], tuple[float, int]] = {}
    for piece in found:
        row = by_pass.setdefault(piece.stage, {})
        row[piece.kind] = row.get(piece.kind, 0.0) + (piece.end - piece.begin) / 1e6
        seconds, count = totals.get((piece.name, piece.kind), (0.0, 0))
        totals[piece.name, piece.kind] = seconds + (piece.end - piece.begin) / 1e6, count + 1
    longest = sorted(
        ((name[:120], kind, *total) for (name, kind), total in totals.items()),
        key=lambda one: -one[2],
    )[:25]
    spoken = _union(sorted((p.begin, p.end) for p in found if p.kind == COMMUNICATION))
    return Phases((end - begin) / 1e6, by_kind, by_pass, spoken / 1e6, len(found), longest)


def kind_of(name: str, around: Iterable[str]) -> str:
    """The kind of a kernel by its own name and the names of the host ranges that were open at its launch."""
    around = tuple(around)
    for kind, own, outer in _PATTERNS:
        if (own is None or own.search(name)) and (
            outer is None or any(outer.search(one) for one in around)
        ):
            return kind
    return "elementwise"


def stage_of(around: Iterable[str]) -> str:
    around = tuple(around)
    if any("ptimizer.step" in one for one in around):
        return "optimizer"
    return "backward" if any(one.startswith("autograd::engine") for one in around) else "forward"


def pieces(events: list[dict[str, Any]], step: str) -> list[Piece]:
    """Everything that ran, on the device where the trace has one."""
    launches: dict[int, tuple[str, ...]] = {}
    on_device = [
        event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    host = [
        event
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "user_annotation")
    ]
    if not on_device:
        return [piece for piece in _host_pieces(host) if piece.name != step]
    calls = [
        event
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and "correlation" in event.get("args", {})
    ]
    for call, around in _enclosing(host, calls):
        launches[call["args"]["correlation"]] = around
    found = []
    for event in on_device:
        around = launches.get(event.get("args", {}).get("correlation"), ())
        kind = kind_of(event["name"], around)
        if event["cat"] != "kernel" and kind not in ("optimizer",):
            kind = COPIES
        found.append(
            Piece(event["ts"], event["ts"] + event["dur"], kind, event["name"], stage_of(around))
        )
    return found


def window(events: list[dict[str, Any]], step: str) -> tuple[float, float]:
    """When the host range `step` began and ended, in microseconds of the trace's clock. Raises ValueError where there is none."""
    for event in events:
        if (
            event.get("ph") == "X"
            and event.get("name") == step
            and event.get("cat") == "user_annotation"
        ):
            return event["ts"], event["ts"] + event["dur"]
    raise ValueError(f"the trace has no range {step!r}")


def _by_thread(events: list[dict[str, Any]]) -> dict[Any, list[dict[str, Any]]]:
    threads = defaultdict(list)
    for event in events:
        threads[event["tid"]].append(event)
    for each in threads.values():
        each.sort(key=lambda event: (event["ts"], -event["dur"]))
    return threads


def _enclosing(
    ranges: list[dict[str, Any]], calls: list[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """Each call with the names of the ranges of its thread that were open when it began, the outermost first."""
    outer = _by_thread(ranges)
    for thread, inner in _by_thread(calls).items():
        ahead = outer.get(thread, [])
        stack: list[tuple[float, str]] = []
        at = 0
        for call in inner:
            while at < len(ahead) and ahead[at]["ts"] <= call["ts"]:
                begin = ahead[at]["ts"]
                while stack and stack[-1][0] <= begin:
                    stack.pop()
                stack.append((begin + ahead[at]["dur"], ahead[at]["name"]))
                at += 1
            while stack and stack[-1][0] <= call["ts"]:
                stack.pop()
            yield call, tuple(name for _, name in stack)


def _host_pieces(host: list[dict[str, Any]]) -> Iterator[Piece]:
    """The stretches in which each operator was the innermost one."""
    for ranges in _by_thread(host).values():
        edges = [(event["ts"] + event["dur"], 0, -i, event) for i, event in enumerate(ranges)]
        edges += [(event["ts"], 1, i, event) for i, event in enumerate(ranges)]
        edges.sort(
            key=lambda edge: edge[:3]
        )  # at one instant the inner ends first, then the outer begins first
        open_ranges: list[dict[str, Any]] = []
        clock = 0.0
        for at, opens, _, event in edges:
            if open_ranges and at > clock and open_ranges[-1]["cat"] == "cpu_op":
                around = tuple(one["name"] for one in open_ranges)
                yield Piece(clock, at, kind_of(around[-1], around), around[-1], stage_of(around))
            clock = at
            if opens:
                open_ranges.append(event)
            elif event in open_ranges:
                open_ranges.remove(event)


def _exclusive(found: list[Piece], begin: float, end: float) -> dict[str, float]:
    """Microseconds of [begin, end] by kind, every instant counted once."""
    edges: list[tuple[float, int, str]] = []
    for piece in found:
        edges += [(max(piece.begin, begin), 1, piece.kind), (min(piece.end, end), -1, piece.kind)]
    edges.sort()
    time, running, clock = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0), begin
    for at, change, kind in [*edges, (end, 0, IDLE)]:
        if at > clock:
            work = [
                each
                for each, count in running.items()
                if count and each not in (COPIES, COMMUNICATION)
            ]
            owners = (
                work or [each for each in (COPIES, COMMUNICATION) if running[each]][:1] or [IDLE]
            )
            for owner in owners:
                time[owner] += (at - clock) / len(owners)
            clock = at
        running[kind] += change
    return time


def _union(spans: list[tuple[float, float]]) -> float:
    total, until = 0.0, float("-inf")
    for begin, end in spans:
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
