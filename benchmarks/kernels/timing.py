"""Check a kernel against float32, time it with CUDA events, and compare with the hardware's bound.

The bounds are rates of one H200, measured with large bfloat16 products and copies.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from orrery.trainer.bench.rank import STEP, divide_step, trace_events
from record import parser_of, record

STARTED = time.monotonic()
GEMM_FLOPS = 650e12  # FLOP/s of large bfloat16 products
BYTES = 4.2e12  # bytes/s of device memory


def smoke_and_device(name: str, doc: str | None) -> tuple[bool, str]:
    """Parse `--smoke`, and return it with the device. Exit if a real run finds no GPU."""
    options, device = _parsed(name, _smoke_parser(doc))
    return options.smoke, device


def limited_run(name: str, doc: str | None) -> tuple[bool, float, str]:
    """Parse and return `--smoke`, `--seconds`, and the device. Exit if a real run finds no GPU."""
    parser = _smoke_parser(doc)
    parser.add_argument("--seconds", type=float, default=200, help="start no row after this time")
    options, device = _parsed(name, parser)
    return options.smoke, options.seconds, device


def _smoke_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with `--smoke`."""
    parser = parser_of(doc)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, nothing recorded")
    return parser


def _parsed(name: str, parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, str]:
    options, has_gpu = parser.parse_args(), torch.cuda.is_available()
    if not options.smoke and not has_gpu:
        sys.exit(f"{name}: there is no GPU here; run it on a host with one, or with --smoke")
    return options, "cuda" if has_gpu else "cpu"


def record_share(path: Path, value: float, goal: float, **fields: Any) -> None:
    """Record a share of the bound, and copy the record out."""
    record(path, value=value, unit="of the bound", goal=goal, better="higher", **fields)
    copy_out(path)


def record_row(path: Path, row: dict[str, Any], goal: float, **fields: Any) -> None:
    """Record a row that `guarded` returned, give it the goal, and copy the record out.

    Exit if the row has no value.
    """
    if row["value"] is None:
        sys.exit(f"this row did not run: {row}")
    row["goal"] = goal
    facts = {"value": row["value"], "unit": row["unit"], "goal": goal, "better": "higher"}
    record(path, **facts, **fields)
    copy_out(path)


def milliseconds(call: Callable[[], Any], repeats: int = 10) -> float:
    """Return the median device time of `repeats` calls, after two warm-up calls.

    Without a GPU, return the wall-clock time of one call.
    """
    for _ in range(2):
        call()
    if not torch.cuda.is_available():
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for before, after in events:
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in events)


def profiled(call: Callable[[], Any], count: int = 1) -> dict[str, Any]:
    """Return a call's device time by kind, and its longest kernels with launches, in ms / count."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as trace, record_function(STEP):
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        phases = divide_step(trace_events(trace, Path(folder)), STEP)
    ms = 1e3 / count
    by_kind = {kind: round(s * ms, 2) for kind, s in phases.by_kind.items() if s * ms > 5e-3}
    longest = [[name, round(s * ms, 2), launches] for name, _, s, launches in phases.longest]
    return {"ms_by_kind": by_kind, "longest_kernels": longest}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the Frobenius norm of the difference over that of `expected`."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def require(
    what: str, actual: list[Tensor], expected: list[Tensor], tolerances: list[float]
) -> dict[str, float]:
    """Return each result's error. Exit if one exceeds its tolerance or is NaN."""
    errors = [relative_error(a, e) for a, e in zip(actual, expected, strict=True)]
    for index, (error, tolerance) in enumerate(zip(errors, tolerances, strict=True)):
        if not error <= tolerance:
            raise SystemExit(
                f"{what}: result {index} is off by {error:.3g} of its norm; "
                f"at most {tolerance:g} is rounding"
            )
    return {str(index): error for index, error in enumerate(errors)}


def copy_out(path: Path) -> None:
    """Copy a result to the folder $OUT, if it is set and does not hold the result."""
    folder = os.environ.get("OUT")
    if folder and path.resolve().parent != Path(folder).resolve():
        shutil.copy(path, folder)


def seconds() -> float:
    """Return the seconds since this module was imported."""
    return round(time.monotonic() - STARTED, 1)


def guarded(
    variant: str, until_s: float, measure: Callable[..., dict[str, Any]], *given: Any
) -> dict[str, Any]:
    """Return a row named `variant` with the fields that `measure(*given)` returns, or its error.

    Later than `until_s` seconds after the start, do not measure, and say `left_out` in the row.
    """
    row: dict[str, Any] = {"variant": variant, "unit": "TFLOP/s", "value": None, "goal": None}
    if seconds() > until_s:
        row["left_out"] = "out of time"
    else:
        try:
            row |= measure(*given)
        except Exception as error:
            row["raised"] = f"{type(error).__name__}: {str(error)[:300]}"
    facts = {key: value for key, value in row.items() if key not in ("variant", "unit", "goal")}
    shown = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in facts.items())
    print(f"{variant}: {', '.join(shown)}", flush=True)
    return row
