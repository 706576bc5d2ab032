"""Run benchmarks (`benchmarks/<area>/<figure>.py`) and list their results (`<figure>.json`)."""

import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from orrery.launcher.process import require
from orrery.manifest.check import nearest
from orrery.manifest.errors import OrreryError
from orrery.runtime.run_directory import MANIFEST

TRAINER = "orrery.trainer.bench"
RATES = "orrery.trainer.bench.rates"


@dataclass(frozen=True)
class Figure:
    name: str
    variant: str
    value: float
    unit: str
    goal: float | None
    better: str
    hardware: str
    measured_at: str

    @property
    def holds(self) -> bool | None:
        if self.goal is None:
            return None
        return self.value >= self.goal if self.better == "higher" else self.value <= self.goal

    @property
    def sign(self) -> str:
        return "≥" if self.better == "higher" else "≤"


def figures(root: Path) -> list[Figure]:
    found = []
    for path in sorted(root.glob("**/*.json")):
        try:
            found += _figures(json.loads(path.read_text()), path.relative_to(root).with_suffix(""))
        except (ValueError, KeyError, AttributeError) as error:
            raise OrreryError(
                f"{path}: is not a benchmark record ({error!r}). Type `git restore {path}`"
            ) from None
    return found


def _figures(record: dict, name: Path) -> list[Figure]:
    rows = record.get("rows") or []
    measured = [(row.get("unit", record["unit"]), row["value"]) for row in rows]
    if not rows or ("value" in record and (record["unit"], record["value"]) not in measured):
        rows = [{}, *rows]
    found = []
    for row in rows:
        if row.get("unit", record["unit"]) != record["unit"]:
            row = {"goal": None, **row}
        row = {**record, **row}
        if row["value"] is None:
            continue
        hardware = row.get("hardware", "")
        if not isinstance(hardware, str):
            hardware = hardware.get("name", json.dumps(hardware))
        found.append(
            Figure(
                name=str(name),
                variant=str(row.get("variant") or row.get("name") or ""),
                value=float(row["value"]),
                unit=row["unit"],
                goal=row.get("goal"),
                better=row.get("better", "higher"),
                hardware=hardware,
                measured_at=str(row.get("measured_at", "")),
            )
        )
    return found


def print_table(root: Path) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("figure", "variant", "value", "unit", "goal", "holds", "hardware", "measured"):
        table.add_column(column, justify="right" if column in ("value", "goal") else "left")
    for one in figures(root):
        goal = "" if one.goal is None else f"{one.sign} {one.goal:g}"
        holds = {None: "", True: "[green]yes[/green]", False: "[red]no[/red]"}[one.holds]
        value, date = f"{one.value:.4g}", one.measured_at[:10]
        table.add_row(one.name, one.variant, value, one.unit, goal, holds, one.hardware, date)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def run(root: Path, figure: str) -> int:
    record, script = root / f"{figure}.json", root / f"{figure}.py"
    recorded = sorted(str(path.relative_to(root).with_suffix("")) for path in root.glob("*/*.json"))
    if figure in recorded:
        try:
            words = _without_folders(shlex.split(json.loads(record.read_text())["command"])[1:])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OrreryError(
                f"{record}: names no benchmark command ({error!r}). Run the script beside it"
            ) from None
    elif script.is_file():
        words = [str(script.relative_to(root.parent))]
    else:
        near = nearest(figure, recorded)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(recorded)}"
        raise OrreryError(f"benchmark {figure!r}: not a known figure; {hint}")
    print(f"+ {shlex.join(['python', *words])}", flush=True)
    return subprocess.run([sys.executable, *words], cwd=root.parent).returncode


def _without_folders(words: list[str]) -> list[str]:
    folders = {"--runs", "--out"}
    pairs = zip(["", *words], words, strict=False)
    return [word for before, word in pairs if not {before, word} & folders]


def trainer(words: list[str]) -> int:
    from orrery.launcher.runs import find
    from orrery.manifest.identity import find_workspace

    require("bench trainer", "torch")
    if words and not words[0].startswith("-") and not words[0].endswith(".json"):
        workspace = find_workspace()
        run = find(words[0], workspace)
        path = run.path / MANIFEST
        if not path.exists():
            path = workspace.manifest_path(run.manifest.name)
        words = [str(path), *words[1:]]
    return subprocess.run([sys.executable, "-m", TRAINER, *words]).returncode


def rates(words: list[str]) -> int:
    require("bench rates", "torch")
    return subprocess.run([sys.executable, "-m", RATES, *words]).returncode
